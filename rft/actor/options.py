"""The options of a model whose weights are in this process. Messages name the yaml key and the cure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.base import ModelOptions
from rft.actor.forward.logits import vocabulary_size
from rft.actor.init import read_config
from rft.actor.lora.base import Lora
from rft.actor.optim.optimizer import Optimizer
from rft.algorithm.roles import POLICY, ROLES
from rft.errors import did_you_mean
from rft.imports import import_part
from rft.ranges import OpenFraction, PositiveInt

LIGER, PATTERNS = "rft.actor.forward.liger", "rft.actor.patterns"  # parts


@dataclass(frozen=True)
class ActorOptions(ModelOptions):
    """What an `Actor` reads, and what a run reads of each model whose weights are in this process.

    Args:
        path: a folder or hub name of a causal language model, or null.
        model_config: a transformers config with `model_type`, for a new model; null where a path is given.
        head: `lm` computes log-probabilities and entropy, `value` values, `score` one score a row, `step` one score a
            token; the last two are exported as classifiers of sequences and of tokens.
        micro_batch_tokens: cap on the tokens of one forward, padding included.
        packing: true packs the rows of a forward behind one another; false pads them to the longest.
        share_prefix: rows of a group compute the tokens that they begin with once.
        liger: Liger's fused kernels compute norms, rotations and gated layers; needs a GPU.
        frozen: patterns over the names of the model's state dict; the parameters that they match do not train.
        ema: null, or the decay of an average of the weights, which is exported beside them.
        lora: null, or the adapters that train in place of the model's own weights.
        optimizer: null for a model that never trains.
        trust_remote_code: python files in the folder of the model may run, where it needs them.
    """

    path: str | None
    model_config: dict[str, Any] | None
    head: Literal["lm", "value", "score", "step"]
    micro_batch_tokens: PositiveInt
    packing: bool
    share_prefix: bool
    liger: bool
    frozen: list[str]
    ema: OpenFraction | None
    lora: Lora | None
    optimizer: Optimizer | None
    trust_remote_code: bool

    def errors(self, key: str) -> Iterator[str]:
        yield from _architecture_errors(self.model_config, f"{key}.model_config")
        if self.frozen and self.optimizer is None:
            yield f"{key}.frozen={self.frozen}: the {key} never trains; set {key}.frozen=[]"
        if self.frozen and self.lora is not None:
            yield (
                f"{key}.frozen={self.frozen}: with {key}.lora no weight of the model itself trains; choose the layers "
                f"by {key}.lora.targets and set {key}.frozen=[]"
            )
        if self.ema is not None and key != POLICY:
            yield f"{key}.ema={self.ema}: checkpoints hold the average of the actor alone; set {key}.ema=null"
        if self.share_prefix and not self.packing:
            yield f"{key}.share_prefix=true: padded rows cannot share tokens; set its packing=true as well"
        if self.liger and key == POLICY:  # other models have its value, unless it is typed
            import_part(LIGER, "check_package", f"{key}.liger=true")(key)

    def freeze(self, model: PreTrainedModel) -> None:
        """Takes the parameters that `frozen` matches out of training."""
        if self.frozen:
            import_part(PATTERNS, "freeze", f"frozen={self.frozen}")(model, self.frozen)

    def check(self, key: str, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        """Reads the config of the model."""
        read_config(self.path, self.model_config, vocabulary_size(tokenizer), key, self.trust_remote_code)


def _architecture_errors(model_config: Mapping[str, Any] | None, key: str) -> Iterator[str]:
    """A message for every option of a new model that transformers does not know, and would ignore."""
    if model_config is None:
        return
    if "model_type" not in model_config:
        yield f"{key}: expected a transformers config as {{model_type: ..., options}}, got {model_config!r}"
        return
    kind = model_config["model_type"]
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        yield f"{key}.model_type={kind}: transformers has no such type{did_you_mean(str(kind), CONFIG_MAPPING)}"
        return
    architecture = CONFIG_MAPPING[kind]
    option_names = {*architecture().to_dict(), *architecture.attribute_map, "attn_implementation"}
    for name in model_config:
        if name not in option_names:
            yield f"{key}.{name}: a {kind} has no such option{did_you_mean(name, option_names)}"


def check_adapters(models: Mapping[str, ActorOptions]) -> Iterator[str]:
    """Checks that adapters can train and be saved, and that a model computed by the adapted policy shares its options.

    Args:
        models: the options of every model, by its key.
    """
    for key, options in models.items():
        if options.lora is not None:
            options.lora.part("check", key)(options.lora, key, options.path, options.optimizer is not None)
    policy = vars(models[POLICY])
    frozen = [role.key for role in ROLES if role.loss is None and role.follows and role.key in models]
    for key in frozen if models[POLICY].lora is not None else ():
        values = vars(models[key])
        shared = values.keys() & policy.keys() - {"lora", "optimizer", "frozen", "ema"}
        names = [name for name in values if name in shared and values[name] != policy[name]]
        if names and not {"path", "model_config"} & set(names):
            yield (
                f"{key}.{names[0]}={values[names[0]]}: with actor.lora the {key} is computed by the actor, with its "
                f"{names[0]}={policy[names[0]]}; leave it at ${{actor.{names[0]}}}, or set {key}.path to another model"
            )
