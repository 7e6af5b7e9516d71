"""LoRA (2106.09685) through peft: the weights of a model stay as they are, small matrices beside its layers train.

A layer of weight W (out, in) computes with W + scale * B A, where A is (rank, in), B (out, rank) and zero at first,
and scale is alpha / rank, or alpha / sqrt(rank) for rsLoRA (2312.03732). Left out: dropout, which no actor has, and
adapters on the head, whose weight the log-probabilities are computed with directly.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from copy import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rft.actor.forward.backbone import language_part
from rft.actor.init import meta_model
from rft.actor.loading.stand_ins import stand_ins, zeros
from rft.actor.lora.base import Adapters, Lora
from rft.actor.lora.nf4 import PackedLinear, quantize
from rft.actor.lora.stored import PREFIX, WEIGHTS, StoredAdapter

NAME = "default"  # what peft calls an adapter that is given no name
PEFT_NAMES = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}


def check(lora: Lora, key: str, path: str | None, trains: bool) -> None:
    """Looks at the options alone.

    Args:
        key, path: of the actor.
        trains: it has an optimizer.

    Raises:
        ValueError: names the key and the cure.
    """
    packages = {"peft": "actor/lora=lora"} | (
        {} if lora.quantize is None else {"bitsandbytes": f"{key}.lora.quantize=nf4"}
    )
    for package, option in packages.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f'{option} needs {package}: pip install "rft[lora]"')
    if not trains:
        raise ValueError(f"{key}.lora: the {key} never trains; set {key}.lora=null")
    if not lora.targets:
        raise ValueError(f"{key}.lora.targets=[] is no layer; set {key}.lora.targets=all-linear")
    if lora.quantize is not None and key != "actor":
        raise ValueError(
            f"{key}.lora.quantize={lora.quantize}: packed weights cannot take over those of the actor; set "
            f"{key}.lora.quantize=null"
        )
    if lora.export == "adapter" and key != "actor":
        raise ValueError(
            f"{key}.lora.export=adapter: checkpoints hold the model of the actor alone; set {key}.lora.export=merged"
        )
    if lora.export == "adapter" and path is None:
        raise ValueError(
            f"{key}.lora.export=adapter: an adapter is of use beside the model that it was trained on, and without "
            f"{key}.path none will be left; set {key}.lora.export=merged"
        )


def find(lora: Lora, config: PretrainedConfig, continued: StoredAdapter | None, key: str) -> None:
    """Looks for the layers in a model without weights; see `layers`.

    Args:
        continued: the adapter that trains on; None for a new one.

    Raises:
        ValueError: that adapter has other options or layers.
    """
    names = layers(lora, meta_model(config), key)
    if continued is None:
        return
    if varied := [name for name in ("rank_pattern", "alpha_pattern") if continued.options.get(name)]:
        raise ValueError(
            f"{key}.path: the adapter has a {varied[0]}, with which none trains on; merge it with "
            "scripts/convert.py merge"
        )
    options = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora}
    stored = {option: continued.options.get(name, False) for option, name in PEFT_NAMES.items()}
    for option in options:
        if options[option] != stored[option]:
            raise ValueError(
                f"{key}.lora.{option}={options[option]}: the adapter of {key}.path has {stored[option]}; set "
                f"{key}.lora.{option}={str(stored[option]).lower()}, or merge it with scripts/convert.py merge"
            )
    if differing := sorted(continued.layers.keys() ^ set(names)):
        which = "lacks" if differing[0] in names else "has"
        raise ValueError(
            f"{key}.lora.targets={lora.targets}: the adapter of {key}.path {which} {differing[0]}; set "
            f"{key}.lora.targets to its layers, or merge it with scripts/convert.py merge"
        )


def layers(lora: Lora, model: PreTrainedModel, key: str) -> list[str]:
    """The names of the layers that get adapters.

    Raises:
        ValueError: a pattern takes in no linear layer of the model, or its head; a layer cannot be quantized.
    """
    names, head = linear_layers(model)
    if lora.quantize is not None and any(isinstance(model.get_submodule(name), Conv1D) for name in names):
        raise ValueError(
            f"{key}.lora.quantize={lora.quantize}: {type(model).__name__} keeps its weights transposed (Conv1D), "
            f"which cannot be packed; set {key}.lora.quantize=null"
        )
    if lora.targets == "all-linear":
        return names
    chosen = set()
    for pattern in lora.targets:
        matching = {name for name in (*names, *head) if fnmatchcase(f".{name}", f"*.{pattern}")}
        if not matching:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(f"{key}.lora.targets: {pattern!r} is no linear layer of the model (there are: {ends})")
        if matching & set(head):
            raise ValueError(
                f"{key}.lora.targets: {pattern!r} takes in the head, whose weight the log-probabilities are "
                "computed with directly: an adapter would not be seen; name other layers, or set all-linear"
            )
        chosen |= matching
    return [name for name in names if name in chosen]


def add(
    lora: Lora, model: PreTrainedModel, path: str | None, key: str, seed: int, dtype: torch.dtype, device: torch.device
) -> "PeftAdapters":
    """Puts adapters into the model, in place, and freezes everything else.

    Args:
        path: where the model came from, for the adapter's own folder.
        key: the actor's place in the yaml.
        seed: of A.
        dtype, device: what and where the model is going to compute.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets, (names, _) = layers(lora, model, key), linear_layers(model)
    # later checkpoints move links such as `latest`; a hub name stays as it is
    without_links = str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=targets,
        fan_in_fan_out=isinstance(model.get_submodule(targets[0]), Conv1D),
        base_model_name_or_path=without_links,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), stand_ins(model, zeros):  # peft draws no adapter on the meta device
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)
    if lora.quantize is not None:
        quantize(model, [f"{name}.base_layer" if name in targets else name for name in names], dtype, device)
    return PeftAdapters(model, config, lora.export == "adapter")


def adapter_names(lora: Lora, model: PreTrainedModel, key: str) -> list[str]:
    """The names of A and B in a model with adapters; arguments and errors as of `layers`."""
    return [f"{layer}.{name}.{NAME}.weight" for layer in layers(lora, model, key) for name in ("lora_A", "lora_B")]


class PeftAdapters(Adapters):
    """Adapters that peft has put into a model.

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
        modules = dict(model.named_modules())
        self.layers = {name: layer for name, layer in modules.items() if isinstance(layer, LoraLayer)}
        self.packed = {
            name.removesuffix(".base_layer"): layer
            for name, layer in modules.items()
            if isinstance(layer, PackedLinear)
        }

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights of a model without adapters that computes the same, one at a time, spread as they are.

        A collective.
        """
        for name, tensor in self.base():
            yield name, self.merge(name, tensor)

    @torch.no_grad()
    def merge(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of `base` with what its adapter adds, if it has one. A collective."""
        layer, _, part = name.rpartition(".")
        adapted = part == "weight" and layer in self.layers
        return tensor + _delta(self.layers[layer], tensor) if adapted else tensor

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that the adapters are to be merged into. What is packed is not, then. A collective."""
        for name, tensor in self.frozen():
            layer, _, part = name.rpartition(".")
            packed = part == "weight" and layer in self.packed
            yield name, self.packed[layer].gathered(tensor) if packed else tensor

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """The weights beside the adapters, by the names that they have in a model without."""
        for name, tensor in self.model.state_dict().items():
            if not _is_adapter(name):
                yield name.replace(".base_layer.", "."), tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of A and B, spread as they are."""
        return ((name, tensor) for name, tensor in self.model.state_dict().items() if _is_adapter(name))

    @torch.no_grad()
    def start_from(self, stored: StoredAdapter) -> None:
        """Takes over a stored adapter of the same layers; before the model is sharded."""
        for name, layer in self.layers.items():
            down, up = stored.layers[name]
            layer.lora_A[NAME].weight.copy_(down)
            layer.lora_B[NAME].weight.copy_(up)

    def reset(self) -> None:
        """Makes the model compute as it would without adapters."""
        for layer in self.layers.values():
            nn.init.zeros_(layer.lora_B[NAME].weight)

    def save(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the whole `tensors` as a folder that `peft.PeftModel.from_pretrained` loads."""
        config = copy(self.config)
        config.target_modules = sorted(config.target_modules)  # peft keeps a set, whose order differs by process
        config.save_pretrained(folder)
        peft_tensors = {f"{PREFIX}{name.replace(f'.{NAME}.', '.')}": tensor for name, tensor in tensors.items()}
        save_file(peft_tensors, folder / WEIGHTS)


def _delta(layer: Any, weight: Tensor) -> Tensor:
    """What an adapter adds to the weight (out, in) of its layer, spread as the weight is. A collective."""
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    if not isinstance(weight, DTensor) or a.device_mesh == b.device_mesh:
        delta: Tensor = layer.get_delta_weight(NAME)
        return delta
    # tensor parallelism splits one of the two; the rows of B are those of this rank's part of the weight
    rows = [Replicate() if placement.is_shard(0) else placement for placement in a.placements]
    local = layer.scaling[NAME] * b.to_local() @ a.redistribute(placements=rows).to_local()
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def linear_layers(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """The names of all linear layers but the head, without those of towers of media; and that of the head, if any."""
    towers = {*model.base_model.modules()} - {*language_part(model).modules(), model.get_output_embeddings()}
    modules = {name: module for name, module in model.named_modules() if module not in towers}
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
    head = [name for name, module in linear.items() if module is model.get_output_embeddings()]
    return [name for name in linear if name not in head], head


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
