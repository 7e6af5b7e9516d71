"""Profiles single steps: the time of each operation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from rft.distributed import World
from rft.errors import surviving
from rft.logger.log import RunLog

SLOWEST = 40  # rows of the table


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
