"""Environments of `verifiers.v1`, version 0.4 of the package of Prime Intellect, an extra: a taskset and a harness."""

import os
import uuid
from typing import Any

from rft.data.rows.packages.verifiers_v1 import FIELD, load_environment


class VerifiersV1:
    """An agent: the harness of the environment plays a task and asks the policy, and the task gives the reward.

    Args:
        env: the config of the environment, as `verifiers.v1.resolve_env_config` takes it: `taskset`, and `agent` with
            the harness, its runtime and its limits.

    Raises:
        ValueError: the environment cannot be loaded.
    """

    def __init__(self, *, env: dict[str, Any]) -> None:
        load_environment(env)
        self._env = env

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        """Plays an episode; returns the sum of the rewards of the task.

        Args:
            data: a row of `VerifiersTasks`.

        Raises:
            RuntimeError: the episode ended with an error, such as that of a harness or of a function of rewards.
        """
        import verifiers.v1 as vf

        environment = load_environment(self._env)  # one object serves one episode at a time
        kind = type(environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(data[FIELD]), environment.config.taskset.task)
        variable = f"RFT_{uuid.uuid4().hex}"  # the client takes its key from the process environment alone
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            async with environment.serving():
                episode = await environment.run_episode(
                    task, vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
                )
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        return float(sum(trace.reward for trace in episode.traces))
