"""Makes of a checkpoint of a run, written by any number of ranks, the folder that the run would export.

The export itself writes the folder, and so the two are equal. Weights are read from the shards a part of the model at a
time. Those that do not train are in no checkpoint: they are read from `actor.path`, or drawn from the seed.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rft.actor.init import load_with_head, read_config
from rft.actor.loading.deferred_init import Drawing
from rft.actor.loading.export import add_to_config, exported
from rft.actor.loading.paths import with_folders
from rft.actor.loading.stored import StoredWeights, find_files, open_tensors
from rft.actor.loading.tensor_names import outer_prefix
from rft.actor.lora.adapters import PeftAdapters, add, check
from rft.actor.lora.base import Lora, find_adapter, model_path
from rft.actor.model import add_end_tokens, empty_like, loaded_dtype, write_export
from rft.actor.options import ActorOptions
from rft.algorithm.roles import POLICY
from rft.data.encode.base import MediaProcessor
from rft.data.encode.encoder import Encoder
from rft.registry import Target
from rft.setup.classes import actor_of, processor_of, strategy_of
from rft.strategy.base import AUTO, DTYPES
from rft.train.checkpoint.manifest import damage, read_manifest
from rft.train.checkpoint.saved_state import SavedState
from rft.train.checkpoint.shards import file_numbers, load_tensors
from rft.train.checkpoint.tree import join, places

CPU = torch.device("cpu")
# What a policy may name, by the place of its `_target_`. No other class of rft is in the list: some run code of files
# that their options name, as the terms of a reward do.
TARGETS = {
    "actor._target_": {"rft.actor.actor.Actor"},
    "actor.tokenizer._target_": {
        f"rft.data.encode.tokenizer.{name}" for name in ("bpe", "characters", "characters_and_tokens", "pretrained")
    },
    "actor.processor._target_": {
        f"rft.data.encode.processors.{name}" for name in ("mel_frames", "patches", "pretrained")
    },
    "strategy._target_": {"rft.strategy.fsdp2.FSDP2"},
}


@dataclass(frozen=True)
class SavedPolicy:
    """The policy of a checkpoint.

    Attributes:
        folder: of the checkpoint.
        nodes: the weights in `state.json`, by their names in the model.
        config_entries: see `Evaluator.config_entries`.
        options: of `actor`.
        tokenizer: of the run, with its chat template.
        ends: the tokens that answers were trained to end with.
        processor: of the run; None for a model of text.
        seed: of the run.
        dtype: of weights beside adapters.
        export_dtype: in which the run exports; None: that of the files that the weights were loaded from.
    """

    folder: Path
    nodes: Mapping[str, Any]
    config_entries: Mapping[str, float]
    options: ActorOptions
    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...]
    processor: MediaProcessor | None
    seed: int
    dtype: torch.dtype
    export_dtype: torch.dtype | None

    def write(self, out: Path, dtype: torch.dtype | None) -> None:
        """Writes the policy as the run would export it.

        Args:
            dtype: see `TrainableModel.save_model`.

        Raises:
            ValueError: the model of `actor.path` cannot be read.
        """
        path, lora = self.options.path, self.options.lora
        if lora is not None:
            check(lora, POLICY, path, trains=True)
            path = None if path is None else model_path(path)
        config = read_config(path, self.options.model_config, len(self.tokenizer), POLICY)
        continued = None if self.options.path is None else find_adapter(self.options.path)
        dtype = dtype or loaded_dtype(path, config, lora, continued)
        drawing = Drawing()
        model = self._model(path, config, drawing)
        adapters = None if lora is None else self._adapters(lora, model, path)
        if adapters is not None and adapters.exported_alone:
            weights = adapters.tensors()
        else:
            weights = self._weights(model, path, drawing, adapters)
        add_end_tokens(model, self.ends)
        save_processor = None if self.processor is None else self.processor.save
        head = self.options.head
        write_export(weights, out, model, adapters, self.tokenizer, head, save_processor, self.ends, dtype)
        if self.config_entries:
            add_to_config(self.config_entries, out)

    def _model(self, path: str | None, config: PretrainedConfig, drawing: Drawing) -> PreTrainedModel:
        """The model; weights that `_unsaved` can read or draw are on the meta device."""
        head, pad = self.options.head, self.tokenizer.pad_token_id
        model = load_with_head(path, config, self.seed, pad, head, POLICY, drawing)
        backbone: PreTrainedModel = model.base_model
        return backbone if head == "value" else model

    def _adapters(self, lora: Lora, model: PreTrainedModel, path: str | None) -> PeftAdapters:
        """The adapters of the checkpoint, in a copy of the model without weights."""
        outline = empty_like(model, CPU).to("meta")
        adapters = add(lora, outline, path, POLICY, self.seed, self.dtype, CPU)
        saved = self._load(name for name, _ in adapters.tensors())
        for name, tensor in adapters.tensors():
            tensor.copy_(saved[name])
        return adapters

    def _weights(
        self, model: PreTrainedModel, path: str | None, drawing: Drawing, adapters: PeftAdapters | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `exported`, in its order."""
        own = model.state_dict(keep_vars=True)
        saved = {id(own[name]): name for name in self.nodes if name in own}  # tied weights are saved once
        numbers = file_numbers(exported(model), 1)
        with _unsaved(model, path, drawing) as read:
            for _, names in groupby(numbers, numbers.__getitem__):
                part = {name: saved.get(id(own[name])) for name in names}
                loaded = self._load(stored for stored in part.values() if stored is not None)
                for name, stored in part.items():
                    if stored is not None:
                        yield name, loaded.pop(stored)
                    elif adapters is None:
                        yield name, read(name)
                    else:
                        yield name, adapters.merge(name, self._computed(adapters, name, read(name)))

    def _load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors of the checkpoint."""
        nodes = {name: self.nodes[name] for name in names}
        tensors = dict(places(nodes))
        load_tensors(tensors, self.folder)
        loaded: dict[str, Tensor] = join(nodes, tensors)
        return loaded

    def _computed(self, adapters: PeftAdapters, name: str, weight: Tensor) -> Tensor:
        """A weight beside the adapters with the numbers that the run computes with."""
        layer, _, part = name.rpartition(".")
        if part == "weight" and layer in adapters.packed:
            packed = adapters.packed[layer]
            return packed.gathered(packed.pack(weight))
        return weight.to(self.dtype)


def read_policy(folder: Path, average: bool) -> SavedPolicy:
    """Reads what a checkpoint says of its policy. No weights are read.

    Args:
        folder: of the checkpoint.
        average: the average of the weights stands in their place.

    Raises:
        ValueError: it is no whole checkpoint, names a class that is not in `TARGETS`, or does not have what is asked
            for.
    """
    folder = folder.resolve()
    if (problem := damage(folder)) is not None:
        raise ValueError(
            f"{folder} is no whole checkpoint: {problem}; name a folder checkpoints/step_<number> of a run"
        )
    whole = read_manifest(folder)["config"]
    texts = {key: whole["data"][key] for key in ("template", "template_arguments")}
    nodes = OmegaConf.create({key: whole[key] for key in ("actor", "strategy", "seed", "cache")} | {"data": texts})
    config: Any = OmegaConf.to_container(nodes, resolve=True)  # variables of the environment
    for key, name in _targets(config):
        if name not in TARGETS.get(key, ()):
            raise ValueError(
                f"{folder} has {key}={name}: a checkpoint may come from an untrusted source, so only the classes that "
                "a policy needs are made here, and no python file of a model runs; resume the run with "
                "checkpoint.export_every=1"
            )
    config = with_folders(config, lambda line: sys.stderr.write(f"{line}\n"))
    tokenizer = Target(config["actor"].pop("tokenizer"), "actor.tokenizer").build()
    processor = processor_of(config["actor"])
    actor, strategy = actor_of(config["actor"], POLICY), strategy_of(config["strategy"])
    encoder = Encoder(tokenizer, config["data"]["template"], None, arguments=config["data"]["template_arguments"] or {})
    state = SavedState(folder)
    with state.reading():
        saved = state.nodes("actors")[POLICY]
        weights: dict[str, Any] = saved["network"]
        assert saved["as_loaded"], "a policy takes over the weights of no other model"
    if average:
        if "average" not in saved:
            raise ValueError(f"{folder} has no average of the weights (actor.ema=null); leave out --average")
        weights |= saved["average"]["weights"] if saved["average"]["updates"] else {}
    return SavedPolicy(
        folder=folder,
        nodes={name.removeprefix("model."): node for name, node in weights.items()},
        config_entries={} if average else state["config_entries"],
        options=actor.options,
        tokenizer=tokenizer,
        ends=encoder.ends,
        processor=None if processor is None else processor.build(tokenizer=tokenizer),
        seed=config["seed"],
        dtype=DTYPES[strategy.options.compute_dtype()],
        export_dtype=DTYPES.get(whole["checkpoint"].get("export_dtype", AUTO)),  # older runs have no such key
    )


def _targets(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """What can run code, also inside other nodes: each `_target_` and its class, and `trust_remote_code` where true."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if isinstance(node, dict):
        for name, part in node.items():
            inner = f"{key}.{name}" if key else str(name)
            if name == "_target_" or (name == "trust_remote_code" and part):
                yield inner, str(part)
            else:
                yield from _targets(part, inner)


@contextmanager
def _unsaved(model: PreTrainedModel, path: str | None, drawing: Drawing) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads or draws a weight as the run has loaded it, in float32.

    Args:
        model: has the weights that are not on the meta device.
        path, drawing: that were given to `load_with_head`; they have the others.
    """
    own, adapter = model.state_dict(keep_vars=True), None if path is None else find_adapter(path)
    files = [] if path is None else find_files(model_path(path), model.config)
    with open_tensors(files) as tensors:
        inside = outer_prefix(model)
        drawn = {name.removeprefix(inside): tensor for name, tensor in drawing.items()}
        stored = StoredWeights(model, tensors) if files else None
        names = list(drawn if stored is None else stored.shapes)

        def read(name: str) -> Tensor:
            weight = own[name]
            if not weight.is_meta:
                return weight.detach()
            tied = next(other for other in names if other in own and own[other] is weight)
            tensor = drawn[tied] if stored is None else stored[tied]
            if adapter is not None:
                [(_, tensor)] = adapter.merged(model, [(name, tensor)])
            region = tuple(slice(0, size) for size in weight.shape)
            return tensor[region].float()

        yield read
