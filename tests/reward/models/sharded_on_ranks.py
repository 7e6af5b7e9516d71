"""Scores of sharded reward models on any number of ranks: what test_offload_sharded.py runs under torchrun.

torchrun --nproc-per-node 2 sharded_on_ranks.py folder
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from rft.batch.scores import Scores
from rft.distributed import World, start
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.remote.watchdog import Watchdog
from rft.reward.compose import WeightedSum
from rft.strategy.fsdp2 import FSDP2
from rft.strategy.gather import to_local
from tests.families import family
from tests.helpers import strategy_options
from tests.reward.models import test_base_media, test_judge, test_process_model, test_scalar
from tests.reward.reward_of import reward_of

NODES = {"scalar": test_scalar.node, "steps": test_process_model.node, "judge": test_judge.node}
PROMPTS = ("1+1", "2", "1+2+3+4", "9+9", "7", "8+8+8")
RESPONSES = ["1+2", "12", "10", "", "5+5+5", "2"]
ROWS = [{"prompt": prompt, "answer": "12"} for prompt in PROMPTS]
SHARES = {  # rows of each rank
    "even": [[0, 2, 4], [1, 3, 5]],
    "uneven": [[0, 1, 2, 3, 5], [4]],
    "empty": [[0, 1, 2, 3, 4, 5], []],
    "nothing": [[], []],
}
CAPS = (1, 16, 10**6)  # values of micro_batch_tokens


def sharded(world: World, terms: dict[str, Any], shard: bool = True, **strategy: Any) -> WeightedSum:
    """A reward of these terms, placed as a run places it."""
    reward = reward_of(terms, next(iter(terms)), shard=shard)
    options = strategy_options(device="cpu", **strategy)
    reward.check()
    reward.place(world.device)
    reward.shard_models(world, lambda *how: FSDP2(options.scoring_options(*how), world))
    return reward


def nodes(folder: Path, **changes: Any) -> dict[str, Any]:
    return {name: node(folder / name, **changes) for name, node in NODES.items()}


def score(world: World, reward: WeightedSum, share: list[int]) -> dict[str, torch.Tensor]:
    """The terms of all rows in order, on every rank; NaN where no rank has a row.

    Args:
        share: rows of this rank.
    """
    found = reward.score([RESPONSES[row] for row in share], [ROWS[row] for row in share])
    columns = {name: torch.zeros(len(ROWS)) for name in found.terms}
    for name, values in found.terms.items():
        columns[name][share] = values
    return {name: world.all_sum(column) for name, column in columns.items()}


def peak(world: World, folder: Path, shard: bool) -> dict[str, int]:
    """Counted bytes of this rank for a large model: of the parameters it keeps, and the most that tensors have."""
    reward = sharded(world, {"large": test_scalar.node(folder / "large", micro_batch_tokens=16)}, shard)
    tracker = MemoryTracker()
    with tracker.watch(), tracker.stage("first"):
        score(world, reward, SHARES["even"][world.rank])
    with tracker.watch(), tracker.stage("second"):
        score(world, reward, SHARES["even"][world.rank])
    with reward.terms["large"]._model.loaded() as model:  # type: ignore[attr-defined]
        parameters = list(model.parameters())
    kept = sum(to_local(one).nbytes for one in parameters)
    peaks = {name: sum(terms.values()) for name, terms in tracker.peaks().items()}
    return {"kept": kept, **peaks}


def without_prompt(world: World, folder: Path) -> dict[str, Any]:
    """Rank 1 cannot encode a row; then all ranks score again."""
    reward = sharded(world, nodes(folder, call={"failed": "drop_row"}))
    rows = [{"prompt": None, "answer": ""}] if world.rank == 1 else ROWS[:2]
    first: Scores = reward.score(RESPONSES[: len(rows)], rows)
    terms = {name: values.tolist() for name, values in first.terms.items()}
    return {"first": terms, "unscored": first.unscored, "second": score(world, reward, SHARES["uneven"][world.rank])}


def broken_forward(world: World, folder: Path) -> str:
    """The error of this rank where a forward of rank 1 fails, although its rows are to be dropped."""
    reward = sharded(world, {"scalar": test_scalar.node(folder / "scalar", call={"failed": "drop_row"})})
    if world.rank == 1:
        reward.terms["scalar"]._pad = 10**6  # type: ignore[attr-defined]  # no such token: the embedding fails
    try:
        with Watchdog(world, 60.0, 60.0, str):
            score(world, reward, SHARES["even"][world.rank])
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def scores(world: World, folder: Path) -> dict[tuple[int, str], Any]:
    found = {}
    for cap in CAPS:
        reward = sharded(world, nodes(folder, micro_batch_tokens=cap))
        for name, share in SHARES.items():
            found[cap, name] = score(world, reward, share[world.rank])
    return found


def with_media(world: World, folder: Path) -> list[float]:
    """Scores of three rows by a model that takes media; only the rows of rank 0 have some."""
    reward = sharded(world, {"media": test_scalar.node(folder / "media", template="chat", micro_batch_tokens=16)})
    rows, found = test_base_media.rows(family("qwen2_5_vl")), torch.zeros(3)
    share = [[0, 2], [1]][world.rank]
    responses = [test_base_media.RESPONSES[row] for row in share]
    found[share] = reward.score(responses, [rows[row] for row in share]).terms["media"]
    summed: list[float] = world.all_sum(found).tolist()
    return summed


def main() -> None:
    torch.set_num_threads(1)
    world, folder = start("cpu"), Path(sys.argv[1])
    results = {
        "scores": scores(world, folder),
        "peaks": {shard: world.gather(peak(world, folder, shard)) for shard in (True, False)},
        "media": with_media(world, folder),
        "without prompt": world.gather(without_prompt(world, folder)),
    }
    if world.rank == 0:
        torch.save(results, folder / "results.pt")
    (folder / f"failure{world.rank}").write_text(broken_forward(world, folder))
    os._exit(0)  # rank 0 loses its connection to rank 1, which has ended


if __name__ == "__main__":
    main()
