"""The interface of a weight transport, through which one server gets the weights of rank 0."""

from abc import ABC, abstractmethod

from rft.remote.http_client import ServerClient
from rft.rollout.server.weights.version import WeightVersion


class WeightTransport(ABC):
    """Brings weights to the workers of one server; `ServerApi.transport` chooses the class.

    The calls come in this order: `open`, any number of `load`, `close`. `close` also follows the first call that fails.

    Args:
        client: of the server.

    Attributes:
        client: as given.
        sent: bytes that have been sent to the workers.
    """

    def __init__(self, client: ServerClient) -> None:
        self.client = client
        self.sent = 0

    async def open(self) -> None:
        """Connects rank 0 with the workers.

        Raises:
            RequestFailed: they cannot be connected.
        """

    @abstractmethod
    async def load(self, weights: WeightVersion, before: WeightVersion | None) -> None:
        """Replaces the weights of the workers, which have memory for them.

        Args:
            before: what the server has in memory, None where that is unknown.

        Raises:
            RequestFailed: the weights have not arrived, or have not been loaded.
        """

    def close(self) -> None:
        """Leaves the workers."""
