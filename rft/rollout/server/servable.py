"""Engines whose kind of model server `mode=serve` can start."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from rft.batch.encoded import MediaFacts
from rft.rollout.engine.base import Engine
from rft.rollout.server.server_api import ServerApi


class ServableEngine(Engine):
    """An engine for which there are servers of the same kind: its facts state `servers`."""

    @staticmethod
    @abstractmethod
    def server_api(
        engine_args: dict[str, Any], media: MediaFacts | None = None, forbidden: Sequence[int] = ()
    ) -> ServerApi:
        """How such a server is started and called.

        Args:
            engine_args: `rollout.engine_args`, the flags of the servers that are started.
            media: of the policy's processor; None for a model of text.
            forbidden: ids that the servers never sample; see `forbidden_tokens`.
        """
