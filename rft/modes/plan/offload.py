"""What each offload option that is not set would save: the plan of the run with this option."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rft.modes.plan.job import Forecast, PlanJob
from rft.modes.plan.memory_tracker import device_bytes, host_bytes


class Saving(NamedTuple):
    """What an offload option changes.

    Attributes:
        override: that sets it.
        peak: bytes of the device at the peak of the run with it.
        stage: in which it saves most.
        saved: bytes of the device that it saves in this stage.
        host: bytes of host memory that it adds to the most of any stage.
    """

    override: str
    peak: int
    stage: str
    saved: int
    host: int


def savings(job: PlanJob, config: dict[str, Any], launched: int, forecast: Forecast) -> Iterator[Saving]:
    """Plans the run with each option; one that the config does not allow is left out.

    Args:
        job: of the plan.
        config: of the plan, without the option.
        launched: number of processes of this launch.
        forecast: of the plan.
    """
    host = max(map(host_bytes, forecast.memory.values()))
    for name, value in job.strategy.options.unset_offloads():
        try:
            found = PlanJob({**config, "strategy": {**config["strategy"], name: value}}, launched).forecast()
        except ValueError:  # all else in the config is right
            continue
        saved = {
            stage: device_bytes(terms) - device_bytes(found.memory[stage]) for stage, terms in forecast.memory.items()
        }
        stage = max(saved, key=saved.__getitem__)
        added = max(map(host_bytes, found.memory.values())) - host
        yield Saving(f"strategy.{name}={str(value).lower()}", found.peak()[1], stage, saved[stage], added)
