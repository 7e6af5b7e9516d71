"""A model with code of its own, as a folder of the hub may hold: a Qwen3 whose states are halved before its head."""

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model


class OwnConfig(Qwen3Config):
    model_type = "own_model"


class OwnBackbone(Qwen3Model):
    config_class = OwnConfig

    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.last_hidden_state = output.last_hidden_state / 2
        return output


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnBackbone(config)
        self.post_init()
