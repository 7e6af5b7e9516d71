"""LoRA (2106.09685) through peft: the weights of a model stay as they are, small matrices beside its layers train.

A layer of weight W (out, in) computes with W + scale * B A, where A is (rank, in), B (out, rank) and zero at first, and
scale is alpha / rank, or alpha / sqrt(rank) for rsLoRA (2312.03732). Left out: dropout, which no actor has, and adapters
on the head, whose weight the log-probabilities are computed with directly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

NAME = "default"  # what peft calls an adapter that is given no name


@dataclass
class Lora:
    """Options of the adapters of an actor.

    Attributes:
        rank: of A and B.
        alpha: the product is scaled by alpha / rank.
        rslora: by alpha / sqrt(rank) instead.
        targets: `all-linear` (every linear layer but the head), or patterns of the last parts of their names: `q_proj`,
            `layers.0.*`.
        export: what a checkpoint's `actor/` holds: a model with the adapters `merged` in, or the `adapter` alone, as
            peft loads it beside the model of actor.path.
    """

    rank: int
    alpha: float
    rslora: bool
    targets: Literal["all-linear"] | list[str]
    export: Literal["merged", "adapter"]

    def check(self, shape: PretrainedConfig, key: str) -> None:
        """Looks for the layers in a model without weights; see `layers`."""
        with torch.device("meta"):
            self.layers(AutoModelForCausalLM.from_config(shape), key)

    def layers(self, model: PreTrainedModel, key: str) -> list[str]:
        """The names of the layers that get adapters.

        Raises:
            ValueError: a pattern takes in no linear layer of the model, or its head.
        """
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        head = model.get_output_embeddings()
        if self.targets == "all-linear":
            return [name for name, module in linear.items() if module is not head]
        chosen = set()
        for pattern in self.targets:
            found = {name for name in linear if fnmatchcase(f".{name}", f"*.{pattern}")}
            if not found:
                ends = ", ".join(
                    sorted({name.rpartition(".")[2] for name, module in linear.items() if module is not head})
                )
                raise ValueError(f"{key}.lora.targets: {pattern!r} is no linear layer of the model (there are: {ends})")
            if any(linear[name] is head for name in found):
                raise ValueError(
                    f"{key}.lora.targets: {pattern!r} takes in the head, whose weight the log-probabilities are computed "
                    "with directly: an adapter would not be seen; name other layers, or set all-linear"
                )
            chosen |= found
        return [name for name in linear if name in chosen]

    def add(self, model: PreTrainedModel, path: str | None, key: str, seed: int) -> "Adapters":
        """Puts adapters into the model, in place, and freezes everything else.

        Args:
            path: where the model came from, for the adapter's own folder.
            key: the actor's place in the yaml.
            seed: of A.
        """
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=self.rslora,
            target_modules=self.layers(model, key),
            base_model_name_or_path=path,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, NAME)
        return Adapters(model, config, self.export == "adapter")


class Adapters:
    """The adapters of a model.

    Args:
        model: which holds them; it may be sharded after this object is made.
        config: peft's.
        exported_alone: see `Lora.export`.
    """

    def __init__(self, model: nn.Module, config: Any, exported_alone: bool) -> None:
        from peft.tuners.lora import LoraLayer

        self.model = model
        self.config = config
        self.exported_alone = exported_alone
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights of the model as it would be without adapters, one at a time, spread as they are."""
        for name, tensor in self.frozen():
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and module in self.layers:
                tensor = tensor + self.layers[module].get_delta_weight(NAME)
            yield name, tensor

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The weights beside the adapters, by the names that they have in a model without."""
        for name, tensor in self.model.state_dict().items():
            if not _is_adapter(name):
                yield name.replace(".base_layer.", "."), tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of A and B, spread as they are."""
        return ((name, tensor) for name, tensor in self.model.state_dict().items() if _is_adapter(name))

    def reset(self) -> None:
        """Makes the model compute as it would without adapters."""
        for layer in self.layers.values():
            nn.init.zeros_(layer.lora_B[NAME].weight)

    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the whole `tensors` as a folder that `peft.PeftModel.from_pretrained` loads."""
        self.config.save_pretrained(folder)
        theirs = {f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor for name, tensor in tensors.items()}
        save_file(theirs, folder / "adapter_model.safetensors")


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
