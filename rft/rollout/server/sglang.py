"""SGLang's server: token ids in and out, and weights from a folder or through a process group.

A sample follows its seed only where the server computes deterministically, which is for GPUs alone
(`engine_args.enable_deterministic_inference`); elsewhere the server draws as it likes, and no two samples are tied.
Left out: weights over CUDA IPC and tensors in messages, images.
"""

import contextlib
from pathlib import Path
from typing import Any, ClassVar

import torch

from rft.remote.http_client import LOOK_S, RequestRefused, ServerClient
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server.engine import ServersEngine
from rft.rollout.server.options import KEY
from rft.rollout.server.server_api import (
    LOCAL,
    Aborted,
    Call,
    Sampled,
    ServerApi,
    check_memory,
    check_type,
    flags,
    stamped,
)
from rft.rollout.server.weight_broadcast import Channel, Make, missing_tensors
from rft.rollout.server.weight_store import WeightVersion

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
NEW = "default"  # what a server is stamped with that was given nothing
LOADING = "loading"  # between two versions; it may be paused
UNSURE = "unsure"  # while it gives memory back, or takes it
ASLEEP, DOZING = "asleep", "dozing"  # paused; without the memory of
GIVEN_BACK = {ASLEEP: ("kv_cache", "weights"), DOZING: ("kv_cache",)}
TAKEN = frozenset(("model_path", "model", "host", "port", "api_key", "weight_version", *FIXED))


class SGLangServers(ServersEngine):
    """Samples with SGLang servers; see `ServersEngine`."""

    to_sleep: ClassVar = {"enable_memory_saver": True}

    @classmethod
    def check(cls, options: dict[str, Any], sampling: Sampling) -> None:
        """See `Engine.check`."""
        super().check(options, sampling)
        if options["servers"].deltas:
            raise ValueError(f"{KEY}.deltas=true: SGLang's servers take whole tensors; set it to false")

    @classmethod
    def check_here(cls, options: dict[str, Any]) -> None:
        """See `Engine.check_here`."""
        options["servers"].check_installed("sglang", "scripts/install_sglang_cpu.sh")

    @staticmethod
    def server_api(engine_args: dict[str, Any]) -> ServerApi:
        """See `ServableEngine.server_api`."""
        return SGLangApi(engine_args)


class SGLangApi:
    """What an SGLang server is told; see `ServerApi`.

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
        self._groups: dict[ServerClient, str] = {}

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

    async def healthy(self, peer: ServerClient) -> None:
        """Asks the scheduler. `/health` does so too, but takes a second: it is for a server that may be warming up."""
        await peer.get("/health" if await self._label(peer) == NEW else "/server_info")

    async def version(self, peer: ServerClient) -> int | None:
        """What `load` stamped last."""
        return stamped(await self._label(peer))

    async def join(self, peer: ServerClient, make: Make) -> Channel:
        """Ends the group before, and has all its workers join the new one."""
        about = await peer.get("/server_info")
        if (about["dp_size"], about["pp_size"]) != (1, 1):
            raise peer.bad_response(f"it has dp_size or pp_size above 1; set {KEY}.transport=folder")
        if before := self._groups.pop(peer, None):
            with contextlib.suppress(RequestRefused):  # it has been started anew, or left by itself
                await peer.post("/destroy_weights_update_group", {"group_name": before})
        channel = make([about["device"]] * about["tp_size"])
        meeting = channel.meeting
        told = {"master_address": meeting.address, "master_port": meeting.port, "group_name": meeting.name}
        told |= {"world_size": meeting.size, "rank_offset": 1, "backend": meeting.backend}
        self._groups[peer] = meeting.name
        await channel.join(peer.post("/init_weights_update_group", told))
        return channel

    async def sleep(self, peer: ServerClient) -> None:
        """It forgets its weights. What comes meanwhile waits."""
        about, label = await peer.get("/server_info"), await self._known(peer)
        check_memory(peer, about["device"], about["enable_memory_saver"], "--enable-memory-saver")
        if held := [part for part in GIVEN_BACK[ASLEEP] if part not in GIVEN_BACK.get(label, ())]:
            if label not in GIVEN_BACK:
                await self._stamp(peer, LOADING)
            await peer.post("/pause_generation", {"mode": "abort"})
            # Told while it still puts its last sample away, it would end.
            await peer.tell(f"/flush_cache?timeout={LOOK_S:g}")
            await self._memory(peer, "release", held, ASLEEP)

    async def _memory(self, peer: ServerClient, verb: str, parts: list[str], label: str) -> str:
        """Tells of memory, which must not be told twice: a server ends by that."""
        await self._stamp(peer, UNSURE)
        await peer.tell(f"/{verb}_memory_occupation", {"tags": parts})
        await self._stamp(peer, label)
        return label

    async def load(
        self, peer: ServerClient, weights: WeightVersion, before: WeightVersion | None, channel: Channel | None
    ) -> None:
        """Ends what runs, loads, forgets cached prefixes and stamps; what comes meanwhile waits.

        From a folder it is one message to a server that is awake, which leaves nothing half done. What comes through a
        channel is loaded bucket by bucket, and nothing that is sampled between two of them is stamped with a version.
        """
        if weights.dtype is not None:
            check_type(peer, weights.dtype, (await peer.get("/server_info"))["dtype"])
        label, version = await self._known(peer), str(weights.version)
        if label == ASLEEP:
            label = await self._memory(peer, "resume", ["weights"], DOZING)
        between = DOZING if label == DOZING else LOADING
        whole = channel is None and label not in (DOZING, LOADING)
        if channel is not None:
            await self._stamp(peer, between, abort=True)
            for bucket in missing_tensors(weights, before):
                names, dtypes, shapes = zip(*bucket.about(), strict=True)
                told = {"group_name": channel.meeting.name, "names": names, "dtypes": dtypes, "shapes": shapes}
                call = peer.post("/update_weights_from_distributed", told | {"abort_all_requests": True})
                await channel.send(bucket.tensors(), call)
        else:
            where = {"model_path": str(weights.folder), "load_format": "auto"}
            where |= {"weight_version": version if whole else between}
            ending = {"abort_all_requests": True, "flush_cache": True}
            answer = await peer.post("/update_weights_from_disk", where | ending)
            if answer["success"] is not True:
                raise peer.bad_response(f"it did not take the weights of {weights.folder}: {answer['message']}")
        if label == DOZING:
            label = await self._memory(peer, "resume", ["kv_cache"], LOADING)
        if label == LOADING:
            await peer.post("/continue_generation")
        if not whole:
            await self._stamp(peer, version)

    async def _label(self, peer: ServerClient) -> str:
        return str((await peer.get("/model_info"))["weight_version"])

    async def _known(self, peer: ServerClient) -> str:
        if (label := await self._label(peer)) == UNSURE:
            raise peer.bad_response("it gives memory back or takes it, and did not say that it is done: start it anew")
        return label

    async def _stamp(self, peer: ServerClient, label: str, abort: bool = False) -> None:
        await peer.post("/update_weight_version", {"new_version": label, "abort_all_requests": abort})
