"""vLLM's own server: token ids in and out, and weights from a folder or through a process group.

Its endpoints for reinforcement learning are used as they are (`VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`).
Left out: weights over CUDA IPC, images.
"""

import os
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rft.actor.lora.adapters import LoraWeights
from rft.remote.http_client import ServerClient
from rft.remote.requests import SampleBatch
from rft.rollout.engine.base import EngineContext, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.vllm_checks import check_sampling, check_speculation
from rft.rollout.engine.vllm_lora import KEYS, MERGE, check_adapters, room
from rft.rollout.server import remote
from rft.rollout.server.engine import ServersEngine, Written
from rft.rollout.server.options import KEY, Servers
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

# python -m, for the `vllm` command of the CPU build asks for a package of another name and fails
MODULE = "vllm.entrypoints.openai.api_server"
REMOTE = str(Path(remote.__file__).parent)
RECEIVER = "rft_receiver.Receiver"
FIXED = {
    "load_format": "dummy",  # the weights of the run come in any case
    "generation_config": "vllm",  # no sampling options of the model's own
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,  # the endpoint that takes and gives token ids
    "disable_uvicorn_access_log": True,
    "worker_extension_cls": RECEIVER,  # for weights that come through a process group
}
OURS = "rft-"  # begins the names of adapters
ASLEEP = "asleep"  # what a server is stamped with while it sleeps
BESIDE = "+"  # in what a server is stamped with, between the version and the name of the adapter
TAKEN = frozenset(("model", "host", "port", "api_key", *FIXED))


class VLLMServers(ServersEngine):
    """Samples with vLLM servers; see `ServersEngine`.

    Args:
        merge_lora: false: the weights beside the policy's adapters are written once, and then adapters alone.
    """

    to_sleep: ClassVar = {"enable_sleep_mode": True}

    def __init__(
        self,
        context: EngineContext,
        servers: Servers,
        merge_lora: bool,
    ) -> None:
        self._apart = None if merge_lora else context.lora
        self._base_version: int | None = None
        self._adapter: str | None = None  # that requests name
        if self._apart is not None:
            context = replace(context, engine_args=context.engine_args | room(self._apart))
        super().__init__(context, servers)

    @classmethod
    def check(cls, options: dict[str, Any], sampling: Sampling) -> None:
        """See `Engine.check`."""
        super().check(options, sampling)
        if not options["merge_lora"]:
            check_adapters(options["lora"], None)
            if (way := options["servers"].transport) != "folder":
                raise ValueError(
                    f"{KEY}.transport={way}: adapters are read from a folder; set it to folder, or {MERGE}"
                )
            if options["servers"].sleep:
                raise ValueError(
                    f"{KEY}.sleep=true: servers forget the weights beside the adapters, which come once; set it to "
                    f"false, or {MERGE}"
                )
            if taken := sorted(KEYS & options["engine_args"].keys()):
                raise ValueError(f"rollout.engine_args.{taken[0]}: it follows from actor.lora; take it out, or {MERGE}")

    @classmethod
    def check_here(cls, options: dict[str, Any]) -> None:
        """See `Engine.check_here`."""
        options["servers"].check_installed("vllm", "scripts/install_vllm_cpu.sh")

    @staticmethod
    def server_api(engine_args: dict[str, Any]) -> ServerApi:
        """See `ServableEngine.server_api`."""
        return VLLMApi(engine_args)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `ServersEngine`. With `merge_lora=false` of `LoraWeights` the adapters, under a name that none have
        had, and the rest where it is not what came before."""
        if self._apart is None or not isinstance(tensors, LoraWeights):
            super().update_weights(version, tensors)
            self._base_version = self._adapter = None
            return
        if tensors.base_version != self._base_version:
            base = self._write(version, tensors.base())
        else:
            base = self._weight_store.kept if self._world.rank == 0 else None
        alone = {name: tensor.cpu() for name, tensor in tensors.alone() if self._world.rank == 0}

        def commit(weights: Written) -> str:
            name = f"{OURS}{uuid.uuid4().hex}"
            if isinstance(weights, WeightVersion):
                weights = self._weight_store.adapt(weights, version, name, lambda to: tensors.adapters.save(alone, to))
            self._commit(weights)
            return name

        self._adapter = self._world.decide(lambda: commit(base))
        self.version, self._base_version = version, tensors.base_version

    def _draws(self, request: Request, sampling: Sampling) -> list[SampleBatch]:
        named = {} if self._adapter is None else {"model": self._adapter}
        draws = super()._draws(request, sampling)
        return [replace(draw, told=Call(draw.told.path, draw.told.body | named)) for draw in draws]


class VLLMApi:
    """What a vLLM server is told; see `ServerApi`.

    Args:
        engine_args: flags of a server of our own: `max_model_len: 2048` is `--max-model-len 2048`.

    Raises:
        ValueError: names one that is not the yaml's to set.
    """

    rollout = "vllm_server"

    def __init__(self, engine_args: dict[str, Any]) -> None:
        if taken := sorted(TAKEN & engine_args.keys()):
            raise ValueError(f"rollout.engine_args.{taken[0]}: it is what the run itself decides; take it out")
        check_speculation(engine_args)
        self._engine_args = engine_args

    def check(self, sampling: Sampling) -> None:
        """See `check_sampling`."""
        check_sampling(sampling)

    def command(self, python: str, model: Path, port: int, host: str = LOCAL) -> tuple[list[str], dict[str, str]]:
        """A server with dummy weights that looks nothing up on the hub."""
        arguments = {"model": str(model), "host": host, "port": port, **FIXED, **self._engine_args}
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (REMOTE, os.environ.get("PYTHONPATH"))))
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if "enable_lora" in self._engine_args else {}
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
        """The one choice. Its version is None where the weights are none of ours, or without the adapter of theirs."""
        [choice] = answer["choices"]
        if choice["finish_reason"] == "abort":
            raise Aborted("the sample was aborted")
        tokens, content = choice["token_ids"], choice["logprobs"]["content"]
        [span] = choice["weight_versions"]
        if (span["start"], span["end"]) != (0, len(tokens)) or [entry["token_id"] for entry in content] != tokens:
            raise ValueError("log-probabilities or versions of other tokens")
        label, _, adapter = span["version"].partition(BESIDE)
        version = stamped(label) if not adapter or answer["model"] == adapter else None
        return Sampled(tokens, [entry["logprob"] for entry in content], choice["finish_reason"], version)

    async def healthy(self, peer: ServerClient) -> None:
        """Its own word."""
        await peer.get("/health")

    async def version(self, peer: ServerClient) -> int | None:
        """What `load` stamped last; None also where a load did not come to its end, which leaves the server paused."""
        if (await peer.get("/is_paused"))["is_paused"]:
            return None
        label, _, adapter = (await peer.get("/weight_info"))["weight_version"].partition(BESIDE)
        return stamped(label) if not adapter or adapter in await self._adapters(peer) else None

    async def join(self, peer: ServerClient, make: Make) -> Channel:
        """Asks its workers, which must have been started with `Receiver`."""
        config = await self._config(peer)
        workers = config["parallel_config"]
        if RECEIVER.rpartition(".")[0] not in workers["worker_extension_cls"]:
            raise peer.bad_response(
                f"its workers join no process group: start it with --worker-extension-cls {RECEIVER} and "
                f"PYTHONPATH={REMOTE}, or by mode=serve, or set {KEY}.transport=folder"
            )
        if workers["data_parallel_size"] != 1:
            raise peer.bad_response(f"it has data_parallel_size above 1; set {KEY}.transport=folder")
        channel = make([config["device_config"]["device"]] * workers["world_size"])
        told = vars(channel.meeting) | {"timeout_s": channel.timeout_s}
        await channel.join(self._workers(peer, "rft_join", kwargs=told))
        return channel

    async def sleep(self, peer: ServerClient) -> None:
        """At level 2: it forgets its weights. What comes meanwhile waits."""
        config = await self._config(peer)
        prepared, device = config["model_config"]["enable_sleep_mode"], config["device_config"]["device"]
        check_memory(peer, device, prepared, "--enable-sleep-mode")
        await peer.post("/update_weight_version", {"new_version": ASLEEP})
        await peer.post("/sleep?level=2")

    async def load(
        self, peer: ServerClient, weights: WeightVersion, before: WeightVersion | None, channel: Channel | None
    ) -> None:
        """Pauses, loads what it has not, forgets cached prefixes, stamps and resumes. What comes meanwhile waits."""
        config = await self._config(peer)
        model, label = config["model_config"], str(weights.version)
        if model["logprobs_mode"] != FIXED["logprobs_mode"]:
            raise peer.bad_response(
                f"start it with --logprobs-mode {FIXED['logprobs_mode']}, not {model['logprobs_mode']}"
            )
        if config["speculative_config"] is not None:
            raise peer.bad_response("it speculates, and tells log-probabilities of something else: start it without")
        if weights.dtype is not None:
            check_type(peer, weights.dtype, model["dtype"])
        if weights.adapter is not None and config["lora_config"] is None:
            raise peer.bad_response(
                "it takes no adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and "
                f"--max-lora-rank, or {MERGE}"
            )
        slept = (await peer.get("/weight_info"))["weight_version"] == ASLEEP
        if slept:
            await peer.post("/wake_up?tags=weights")
        await peer.post("/pause?mode=abort")
        if before is None or not before.holds(weights):
            await self._reload(peer, weights, before, channel)
        for name in await self._adapters(peer) if config["lora_config"] is not None else ():
            await peer.tell("/v1/unload_lora_adapter", {"lora_name": name})
        if weights.adapter is not None:
            folder = weights.adapter.folder
            await peer.tell("/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
            label += BESIDE + folder.name
        if not (await peer.post("/reset_prefix_cache"))["success"]:
            raise peer.bad_response("it keeps prefixes of the weights before")
        if slept:
            await peer.post("/wake_up?tags=kv_cache")
        await peer.post("/update_weight_version", {"new_version": label})
        await peer.post("/resume")

    async def _config(self, peer: ServerClient) -> Any:
        """How it was started."""
        return (await peer.get("/server_info?config_format=json"))["vllm_config"]

    async def _reload(
        self, peer: ServerClient, weights: WeightVersion, before: WeightVersion | None, channel: Channel | None
    ) -> None:
        if channel is None:
            # vLLM reads no files into a model that it started with dummy weights, unless it is told of another format.
            await self._workers(peer, "update_config", args=[{"load_config": {"load_format": "safetensors"}}])
            await self._workers(peer, "reload_weights", kwargs={"weights_path": str(weights.folder)})
        elif buckets := missing_tensors(weights, before):
            told = {"backend": channel.meeting.backend, "timeout_s": channel.timeout_s}
            told |= {"buckets": [bucket.about() for bucket in buckets], "deltas": channel.copies is not None}
            travels = (part for bucket in buckets for part in bucket.messages(before, channel.copies, channel.device))
            await channel.send(travels, self._workers(peer, "rft_receive", kwargs=told))
            channel.copied(buckets)

    async def _adapters(self, peer: ServerClient) -> list[str]:
        """Those of ours that it has."""
        names = [model["id"] for model in (await peer.get("/v1/models"))["data"]]
        return [name for name in names if name.startswith(OURS)]

    async def _workers(self, peer: ServerClient, method: str, **arguments: Any) -> None:
        await peer.post("/collective_rpc", {"method": method, **arguments})
