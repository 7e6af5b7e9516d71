"""SGLang's server: token ids in and out, and weights from a folder.

A sample follows its seed only where the server computes deterministically, which is for GPUs alone
(`engine_args.enable_deterministic_inference`); elsewhere the server draws as it likes, and no two samples are tied.
Left out: weights over NCCL, CUDA IPC and tensors in messages, images.
"""

from pathlib import Path
from typing import Any

import torch

from rft.rollout.dialect import LOCAL, Aborted, Call, Dialect, Sampled, flags, stamped
from rft.rollout.engine import Sampling
from rft.rollout.peer import Peer
from rft.rollout.servers import ServersEngine

FIXED = {
    "load_format": "dummy",  # the weights of the run come in any case
    "log_level_http": "warning",
}
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "max_total_tokens": 16384,  # of keys and values; SGLang itself would take most of the machine's memory for them
}
TAKEN = frozenset(("model_path", "model", "host", "port", "api_key", "weight_version", *FIXED))


class SGLangServers(ServersEngine):
    """Samples with SGLang servers; see `ServersEngine`."""

    @staticmethod
    def check_here(options: dict[str, Any]) -> None:
        """See `Engine.check_here`."""
        options["servers"].check_installed("sglang", "scripts/install_sglang_cpu.sh")

    @staticmethod
    def dialect(engine_args: dict[str, Any]) -> Dialect:
        """See `Engine.dialect`."""
        return SGLangDialect(engine_args)


class SGLangDialect:
    """What an SGLang server is told; see `Dialect`.

    Args:
        engine_args: flags of a server of our own: `context_length: 2048` is `--context-length 2048`.

    Raises:
        ValueError: names one of the arguments that is not the yaml's to set.
    """

    rollout = "sglang"

    def __init__(self, engine_args: dict[str, Any]) -> None:
        if taken := sorted(TAKEN & engine_args.keys()):
            raise ValueError(f"rollout.engine_args.{taken[0]}: it is what the run itself decides; take it out")
        self._engine_args = engine_args

    def check(self, sampling: Sampling) -> None:
        """SGLang truncates what it draws from, but tells log-probabilities of the whole distribution."""
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "first_token": None}
        for name, value in off.items():
            if (given := vars(sampling)[name]) != value:
                raise ValueError(
                    f"rollout.{name}={given}: SGLang does not tell the log-probabilities of what it then draws from; "
                    f"set rollout{'/first_token=none' if value is None else f'.{name}={value}'} or rollout=hf"
                )

    def command(self, python: str, model: Path, port: int, host: str = LOCAL) -> tuple[list[str], dict[str, str]]:
        """A server with dummy weights that looks nothing up on the hub."""
        on_cpu = self._engine_args.get("device", "cuda" if torch.cuda.is_available() else "cpu") == "cpu"
        arguments = {"model_path": str(model), "host": host, "port": port, **FIXED}
        arguments |= (ON_CPU if on_cpu else {}) | self._engine_args
        # Nobody listens on the port for gRPC, but port + 10000, its default, may be none, and that ends the server.
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_GRPC_PORT": str(port - 1)}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {}
        return [python, "-m", "sglang.launch_server", *flags(arguments, off=None)], environment

    def request(self, prompt: list[int], seed: int, limit: int, ends: list[int], sampling: Sampling) -> Call:
        """Asks for token ids; text is made on the server only to find stop strings."""
        how = {
            "max_new_tokens": limit,
            "temperature": sampling.temperature,
            "sampling_seed": seed,
            "stop": sampling.stop,
            "stop_token_ids": ends,
        }
        return Call("/generate", {"input_ids": prompt, "sampling_params": how, "return_logprob": True})

    def parse(self, answer: Any) -> Sampled:
        """The one sample. Its version is None where the weights are none of ours."""
        about = answer["meta_info"]
        reason = about["finish_reason"]
        if reason["type"] == "abort":
            raise Aborted(reason["message"])
        logprobs, tokens, _ = (list(column) for column in zip(*about["output_token_logprobs"], strict=True))
        if tokens != answer["output_ids"]:
            raise ValueError("log-probabilities of other tokens")
        return Sampled(tokens, logprobs, reason["type"], stamped(about["weight_version"]))

    async def healthy(self, peer: Peer) -> None:
        """Asks the scheduler. `/health` does so too, but takes a second: it is for a server that may be warming up."""
        await peer.get("/health" if await self.version(peer) is None else "/server_info")

    async def version(self, peer: Peer) -> int | None:
        """What `load` stamped last."""
        return stamped((await peer.get("/model_info"))["weight_version"])

    async def load(self, peer: Peer, folder: Path, version: int) -> None:
        """In one message, which leaves nothing half done: ends what runs, loads, forgets cached prefixes and stamps.

        What comes meanwhile waits.
        """
        told = {"model_path": str(folder), "load_format": "auto", "abort_all_requests": True, "flush_cache": True}
        answer = await peer.post("/update_weights_from_disk", told | {"weight_version": str(version)})
        if answer["success"] is not True:
            raise peer.garbage(f"it did not take the weights of {folder}: {answer['message']}")
