"""Where servers are and how patient this run is with them: the options that all kinds of servers share."""

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any, Literal

KEY = "rollout.engine.servers"


@dataclass
class Servers:
    """What the fields mean stands beside them in the yaml."""

    addresses: list[str]
    count: int
    python: str | None
    dtype: Literal["bfloat16", "float16"] | None
    transport: Literal["folder", "group"]
    deltas: bool
    concurrency: int
    retries: int
    start_s: float
    sync_s: float
    answer_s: float
    poll_s: float

    def __post_init__(self) -> None:
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or "/" in address:
                raise ValueError(f"{KEY}.addresses: {address!r} is none; expected host:port, such as 10.0.0.7:8000")
        if (self.count > 0) == bool(self.addresses):
            raise ValueError(
                f"{KEY}.count={self.count}, addresses={self.addresses}: give the addresses of servers that run and "
                "count=0, or the number of servers to launch and addresses=[]"
            )
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError(f"{KEY}.addresses={self.addresses}: one of them comes twice")
        if self.concurrency < 1 or self.retries < 0:
            raise ValueError(
                f"{KEY}.concurrency={self.concurrency}, retries={self.retries}: set at least 1 request and 0 retries"
            )
        if self.deltas and self.transport != "group":
            raise ValueError(
                f"{KEY}.deltas=true: changed elements alone travel through a process group; set {KEY}.transport=group, "
                f"or {KEY}.deltas=false"
            )
        times = {name: vars(self)[name] for name in ("start_s", "sync_s", "answer_s", "poll_s")}
        if min(times.values()) <= 0:
            raise ValueError(f"{KEY}: {times}: these are seconds; set them above 0")

    def check_type(self, engine_args: dict[str, Any]) -> None:
        """Raises a ValueError where servers of our own would compute in another type than weights are rounded to."""
        if self.count and self.dtype is not None and engine_args.get("dtype") != self.dtype:
            raise ValueError(
                f"{KEY}.dtype={self.dtype}: the servers compute in rollout.engine_args.dtype="
                f"{engine_args.get('dtype')}; set both to the same, or {KEY}.dtype=null"
            )

    def check_installed(self, package: str, script: str) -> None:
        """Raises a ValueError where servers are to be started without the package that they are made of.

        Args:
            script: makes an environment with the package on a CPU.
        """
        if not self.count:
            return
        if self.python is None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{KEY}.python: {package} is not installed here; install it, name the interpreter that has it (on a "
                f"CPU {script} makes one), give {KEY}.addresses, or choose rollout=hf"
            )
        if self.python is not None and shutil.which(self.python) is None:
            raise ValueError(f"{KEY}.python={self.python}: there is no such program; give the path of an interpreter")
