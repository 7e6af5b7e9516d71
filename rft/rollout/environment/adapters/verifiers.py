"""Environments of the package `verifiers` (Prime Intellect), an extra: those of `verifiers.load_environment`."""

import threading
from typing import Any

from rft.data.rows.packages.verifiers import load_environment

OF_THE_POLICY = ("EmptyModelResponseError", "InvalidModelResponseError")  # errors that the rubric scores


class Verifiers:
    """An agent: the environment's own rollout asks the policy, and its rubric gives the reward.

    Args:
        id: the name of the environment, as `verifiers.load_environment` takes it.
        args: arguments of its `load_environment`.

    Raises:
        ValueError: the environment cannot be loaded, or this is not the main thread, which alone can set signal
            handlers, as an environment does.
    """

    def __init__(self, *, id: str, args: dict[str, Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("an environment of verifiers needs a process of its own; set environment.workers=process")
        self._environment = load_environment(id, args)

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        """Plays an episode; returns the reward of the rubric.

        Args:
            data: a row of the environment, or of other data with the fields that its rubric reads.

        Raises:
            RuntimeError: the rollout ended with an error that is not the policy's, such as that of a sandbox.
        """
        from openai import AsyncOpenAI

        # Requests wait as long as the run samples. One sent again would be a second dialogue.
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0) as client:
            row = {"example_id": 0, **data}
            # Without state_columns a function named "reward" replaces the reward by its own value.
            found = await self._environment.run_rollout(row, _gateway(client), "policy", {}, state_columns=["reward"])
        if found["error"] is not None and found["error"]["error"] not in OF_THE_POLICY:
            raise RuntimeError(found["error"]["error_chain_str"])
        return float(found["reward"])


def _gateway(client: Any) -> Any:
    """The client for verifiers. A request beyond `environment.max_turns` ends the rollout as a prompt that is too long
    does: the rubric scores the answers so far."""
    from openai import BadRequestError
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.errors import OverlongPromptError

    class Gateway(OpenAIChatCompletionsClient):
        async def get_native_response(self, *arguments: Any, **options: Any) -> Any:
            try:
                return await super().get_native_response(*arguments, **options)
            except BadRequestError as error:
                if error.code == "max_turns":
                    raise OverlongPromptError from error
                raise

    return Gateway(client)
