"""States of runs and models: read from checkpoints, made whole, and loaded through files."""

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rft.actor.base import ColumnModel
from rft.train.checkpoint.manifest import write_manifest
from rft.train.checkpoint.saved_state import STRUCTURE, SavedState, structure_of
from rft.train.checkpoint.tree import join, split


def state(run: Path) -> dict[str, Any]:
    """The state of the latest checkpoint of a run."""
    saved = SavedState((run / "checkpoints" / "latest").resolve())
    return {key: saved[key] for key in saved}


def whole_state(model: ColumnModel) -> Any:
    """A copy of the state of a model, its tensors whole and on the CPU. A collective."""
    tree, tensors = split(model.state_dict())
    gathered = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)
        for name, tensor in tensors.items()
    }
    return join(tree, gathered)


def restore(model: ColumnModel, state: Any, left_out: tuple[str, ...] = ()) -> None:
    """Lets a model take over a whole state, which goes through files as that of a checkpoint does. A collective."""
    folder = model.world.decide(lambda: Path(mkdtemp()))
    if model.world.rank == 0:
        tree, tensors = split({"actors": {model.key: state}})
        (folder / "state.json").write_text(json.dumps(tree))
        save_file(tensors, folder / "model.safetensors")
        write_manifest(folder, {}, {"step": 0, "metric": None, STRUCTURE: structure_of(tree)})
    model.world.gather(None)  # a barrier
    model.load_state_dict(SavedState(folder).fill("actors", model.key, model.state_to_fill(), left_out))
