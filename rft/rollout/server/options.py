"""The options that all kinds of servers share: addresses or the number to start, weight transport, retry policy."""

import importlib.util
import os
import secrets
import shutil
import socket
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from rft.conditions import ReadIf
from rft.ranges import Range, Seconds
from rft.remote.http_client import key_named
from rft.remote.retry import ServerPolicy
from rft.rollout.server.remote.rft_receiver import own_address
from rft.strategy.base import DTYPES

KEY = "rollout.engine.servers"


def check_addresses(addresses: list[str], key: str) -> None:
    """Raises a ValueError that names the key where an entry is not host:port or is repeated."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in address:
            raise ValueError(
                f"{key}.addresses: {address!r} is not an address; expected host:port, such as 10.0.0.7:8000"
            )
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"{key}.addresses={addresses}: an address is repeated; name each server once")


def is_local(address: str) -> bool:
    """True if an address, host:port, is of this machine."""
    host, _, port = address.rpartition(":")
    try:
        resolved = socket.gethostbyname(host)
        return own_address(resolved, int(port)) == resolved
    except OSError:  # an unknown host, or no way to it
        return False


@dataclass(frozen=True)
class Servers(ServerPolicy):
    """The yaml node `rollout.engine.servers`, which documents the fields."""

    addresses: list[str]
    count: Annotated[int, Range(low=0, high=1024)]
    python: Annotated[str | None, ReadIf("count")]
    token: Annotated[str | None, ReadIf("addresses")]
    dtype: Literal["bfloat16", "float16"] | None
    transport: Literal["folder", "group", "ipc"]
    deltas: bool
    sleep: bool
    sync_s: Seconds

    def __post_init__(self) -> None:
        check_addresses(self.addresses, KEY)
        if (self.count > 0) == bool(self.addresses):
            raise ValueError(
                f"{KEY}.count={self.count}, addresses={self.addresses}: give the addresses of running servers and "
                "count=0, or the number of servers to launch and addresses=[]"
            )
        if self.deltas and self.transport != "group":
            raise ValueError(
                f"{KEY}.deltas=true: only transport=group sends changed elements; set {KEY}.transport=group, "
                f"or {KEY}.deltas=false"
            )
        if self.deltas and self.sleep:
            raise ValueError(
                f"{KEY}.deltas=true: a server that has slept needs all of its weights; set {KEY}.sleep=false, or "
                f"{KEY}.deltas=false"
            )

    def key(self) -> str | None:
        """The key of the servers: a random one of servers that the run starts, else the one that `token` names."""
        return secrets.token_urlsafe(32) if self.count else key_named(self.token, KEY)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """`dtype` as torch knows it."""
        return None if self.dtype is None else DTYPES[self.dtype]

    def check_dtype(self, engine_args: dict[str, Any]) -> None:
        """Raises a ValueError where servers that the run starts would not compute in the dtype of the weights."""
        if self.count and self.dtype is not None and engine_args.get("dtype") != self.dtype:
            raise ValueError(
                f"{KEY}.dtype={self.dtype}: the servers compute in rollout.engine_args.dtype="
                f"{engine_args.get('dtype')}; set both to the same, or {KEY}.dtype=null"
            )

    def _check_local(self) -> None:
        if distant := [address for address in self.addresses if not is_local(address)]:
            raise ValueError(
                f"{KEY}.transport=ipc: {', '.join(distant)} is not on the machine of rank 0, and only processes of one "
                f"machine share memory; set {KEY}.transport=group"
            )

    def check_installed(self, package: str, script: str) -> None:
        """Raises a ValueError where the run starts servers and their package or interpreter is missing, or uses running
        ones and the variable with their key is missing, or they are on other machines and cannot share memory.

        Args:
            package: what servers of this kind need.
            script: makes an environment with the package on a CPU.
        """
        if not self.count:
            key_named(self.token, KEY)
            if self.transport == "ipc" and os.environ.get("RANK", "0") == "0":  # other ranks share no memory
                self._check_local()
            return
        if self.python is None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{KEY}.python: {package} is not installed here; install it, set the path of an interpreter that "
                f"has it (on a CPU {script} makes one), give {KEY}.addresses, or choose rollout=hf"
            )
        if self.python is not None and shutil.which(self.python) is None:
            raise ValueError(f"{KEY}.python={self.python}: there is no such program; give the path of an interpreter")
