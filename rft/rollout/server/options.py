"""Where servers are and how patient this run is with them: the options that all kinds of servers share."""

import importlib.util
import shutil
from dataclasses import dataclass
from typing import Any, Literal

KEY = "rollout.engine.servers"


@dataclass
class RetryPolicy:
    """How much one process asks of a server at once, and how long it waits; what the fields mean stands in the yaml."""

    concurrency: int
    retries: int
    start_s: float
    answer_s: float
    poll_s: float

    def check(self, key: str) -> None:
        """Raises a ValueError where nothing could be asked, or waited for; names the key."""
        if self.concurrency < 1 or self.retries < 0:
            raise ValueError(
                f"{key}.concurrency={self.concurrency}, retries={self.retries}: set at least 1 request and 0 retries"
            )
        times = {name: value for name, value in vars(self).items() if name.endswith("_s")}
        if min(times.values()) <= 0:
            raise ValueError(f"{key}: {times}: these are seconds; set them above 0")


def check_addresses(addresses: list[str], key: str) -> None:
    """Raises a ValueError where one of them is none, or comes twice; names the key."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in address:
            raise ValueError(f"{key}.addresses: {address!r} is none; expected host:port, such as 10.0.0.7:8000")
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"{key}.addresses={addresses}: one of them comes twice")


@dataclass
class Servers(RetryPolicy):
    """What the fields mean stands beside them in the yaml."""

    addresses: list[str]
    count: int
    python: str | None
    dtype: Literal["bfloat16", "float16"] | None
    transport: Literal["folder", "group"]
    deltas: bool
    sleep: bool
    sync_s: float

    def __post_init__(self) -> None:
        check_addresses(self.addresses, KEY)
        if (self.count > 0) == bool(self.addresses):
            raise ValueError(
                f"{KEY}.count={self.count}, addresses={self.addresses}: give the addresses of servers that run and "
                "count=0, or the number of servers to launch and addresses=[]"
            )
        self.check(KEY)
        if self.deltas and self.transport != "group":
            raise ValueError(
                f"{KEY}.deltas=true: changed elements alone travel through a process group; set {KEY}.transport=group, "
                f"or {KEY}.deltas=false"
            )
        if self.deltas and self.sleep:
            raise ValueError(
                f"{KEY}.deltas=true: a server that has slept is given all of its weights; set {KEY}.sleep=false, or "
                f"{KEY}.deltas=false"
            )

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
