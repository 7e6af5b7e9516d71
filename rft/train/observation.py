"""What a run keeps of some of its steps for people: sampled texts, and profiles with the time of each operation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch.profiler import profile

from rft.batch.columns import fields
from rft.batch.row_fields import EPISODE, EPISODE_FIELD, UNSCORED, UNSCORED_FIELD
from rft.batch.scores import number_or_none
from rft.distributed import World
from rft.errors import surviving
from rft.evaluation.base import term_scores
from rft.logger.log import RunLog
from rft.ranges import NonNegativeInt, PositiveInt
from rft.reward.route import SOURCE

KEPT = {SOURCE: SOURCE, EPISODE_FIELD: EPISODE, UNSCORED_FIELD: UNSCORED}  # fields of a row, by their names in a line
SLOWEST = 40  # rows of the table


@dataclass
class Trajectories:
    """Sampled texts that are kept: of every n-th step, this many rows of each set."""

    every: PositiveInt
    rows: NonNegativeInt


def sampled_texts(batch: TensorDict, rows: int) -> list[dict[str, Any]]:
    """The first rows of a sampled batch as people read them; nothing where the texts were given."""
    if "scores" not in batch.keys():
        return []
    return [
        {"set": "train", "prompt": row["prompt"], "response": row["text"], "score": number_or_none(float(score))}
        | term_scores({name: float(value) for name, value in terms.items()})
        | {name: row[field] for field, name in KEPT.items() if field in row}
        for row, score, terms in zip(fields(batch[:rows]), batch["scores"][:rows], batch["terms"][:rows], strict=True)
    ]


class Profiler:
    """Traces the configured steps on every rank; the stages of a step (`Metrics.timer`) are labels of the trace.

    Args:
        steps: their numbers, counted as in `metrics.jsonl`.
        folder: of the run; the files go to `profile/` in it.
        world: the processes.
        log: gets the paths of the files.
    """

    def __init__(self, steps: Sequence[int], folder: Path, world: World, log: RunLog) -> None:
        self._steps = frozenset(steps)
        self._folder = folder / "profile"
        self._world = world
        self._log = log

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces the block if this step is configured: the CPU, and CUDA if it is available."""
        if number not in self._steps:
            yield
            return
        with profile() as trace:
            yield
        with surviving(f"profile.steps=[{number}]", self._log.warning):
            self._folder.mkdir(exist_ok=True)
            name = f"step_{number:08d}_rank_{self._world.rank}"
            clock = "self_cuda_time_total" if self._world.device.type == "cuda" else "self_cpu_time_total"
            (self._folder / f"{name}.txt").write_text(trace.key_averages().table(clock, SLOWEST))
            trace.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            self._log.message(f"profile of step {number}: {self._folder / name}.txt, and .json.gz for ui.perfetto.dev")
