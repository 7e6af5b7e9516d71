"""vLLM's own server: token ids in and out, weights from a folder, through a process group or shared memory.

It uses vLLM's endpoints for reinforcement learning (`VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`). Prompts with media
are sent before their expansion, with the media; the response has the expanded prompt.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME

from rft.actor.loading.tensor_names import renamed
from rft.actor.lora.base import LoraWeights
from rft.batch.encoded import MediaFacts
from rft.remote.http_client import RequestRefused, ServerClient
from rft.remote.server_process import LOCAL
from rft.remote.server_requests import Call
from rft.rollout.engine.base import EngineCheckContext, EngineContext
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.vllm_checks import (
    LOGPROBS,
    MOST_BIASED,
    check_samples,
    check_sampling,
    check_speculation,
    sampling_params,
)
from rft.rollout.engine.vllm_cpu import cpu_arguments
from rft.rollout.engine.vllm_lora import KEYS, MERGE, check_adapters, room
from rft.rollout.engine.vllm_media import check_server, media_arguments
from rft.rollout.server.engine import ServersEngine, ServersOptions
from rft.rollout.server.options import KEY, Servers
from rft.rollout.server.prompt_logprobs import PROMPT_LOGPROBS, Text, TokenLogprobs
from rft.rollout.server.server_api import (
    Sampled,
    ServerApi,
    ServerPrompt,
    check_dtype,
    check_memory,
    flags,
    labelled_version,
    python_path,
)
from rft.rollout.server.weights.transport import WeightTransport
from rft.rollout.server.weights.version import WeightVersion
from rft.rollout.server.weights.vllm import RECEIVER, call_workers, choose_transport, has_receiver

# python -m: the `vllm` command of the CPU build looks for a package of another name and fails
MODULE = "vllm.entrypoints.openai.api_server"
SAMPLES = "/inference/v1/generate"
FIXED = {
    "load_format": "dummy",  # the run sends the weights
    "generation_config": "vllm",  # ignore sampling options in the model's generation config
    "logprobs_mode": LOGPROBS,
    "enable_scale_out": True,  # the endpoint with token ids in and out
    "disable_uvicorn_access_log": True,
    "worker_extension_cls": RECEIVER,  # receives weights through a process group
    "middleware": "rft_server_key.RequireKey",
}
ADAPTER = "rft-"  # prefix of the names of adapters
ASLEEP = "asleep"  # the label of the weights of a sleeping server
SEPARATOR = "+"  # in a label, between the version and the name of the adapter


class VLLMApi(ServerApi):
    """The interface of a vLLM server."""

    rollout = "vllm_server"
    reserved = frozenset(("model", "host", "port", "api_key", *FIXED))

    def __init__(
        self, engine_args: dict[str, Any], media: MediaFacts | None = None, forbidden: Sequence[int] = ()
    ) -> None:
        super().__init__(media_arguments(media) | engine_args, media, forbidden)
        check_speculation(engine_args)

    def check(self, sampling: Sampling) -> None:
        check_sampling(sampling)

    def command(
        self, python: str, model: Path, port: int, host: str = LOCAL, load_format: str = "dummy"
    ) -> tuple[list[str], dict[str, str]]:
        """Starts a server that does not access the hub."""
        arguments = {"model": str(model), "host": host, "port": port, **FIXED, **self._engine_args}
        arguments["load_format"] = load_format
        if (model / CONFIG_NAME).is_file() and not torch.cuda.is_available():
            arguments |= cpu_arguments(AutoConfig.from_pretrained(model, trust_remote_code=False), self._engine_args)
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = python_path()
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if "enable_lora" in self._engine_args else {}
        return [python, "-m", MODULE, *flags(arguments, off="no-")], environment

    def request(self, prompt: ServerPrompt, seed: int, limit: int, ends: list[int], sampling: Sampling) -> Call:
        """Requests token ids; the server decodes them only to find stop strings."""
        how = sampling_params(sampling, seed, limit, ends, self._forbidden)
        body: dict[str, Any] = {"token_ids": prompt.ids, "sampling_params": how}
        if prompt.media:
            parts = [{"type": f"{kind}_url", "url": url} for kind, urls in prompt.media.items() for url in urls]
            body |= {"content_parts": parts, "return_token_ids": True}
        return Call(SAMPLES, body)

    def parse(self, answer: Any) -> Sampled:
        """The only choice. A version is None also where the label names an adapter that was not applied."""
        [choice] = answer["choices"]
        tokens, versions = choice["token_ids"], list[int | None]()
        content = choice["logprobs"]["content"] if tokens else []
        for span in choice["weight_versions"] if tokens else []:
            if not len(versions) == span["start"] <= span["end"] <= len(tokens):
                raise ValueError("versions of other tokens")
            label, _, adapter = span["version"].partition(SEPARATOR)
            version = labelled_version(label) if not adapter or answer["model"] == adapter else None
            versions += [version] * (span["end"] - span["start"])
        if [entry["token_id"] for entry in content] != tokens:
            raise ValueError("log-probabilities of other tokens")
        logprobs = [entry["logprob"] for entry in content]
        return Sampled(tokens, logprobs, choice["finish_reason"], versions, answer.get("prompt_token_ids"))

    async def healthy(self, client: ServerClient) -> None:
        await client.get("/health")

    async def version(self, client: ServerClient) -> int | None:
        """The label that `load` set last; None also after an interrupted `load`, which leaves the server paused."""
        if (await client.get("/is_paused"))["is_paused"]:
            return None
        label, _, adapter = (await client.get("/weight_info"))["weight_version"].partition(SEPARATOR)
        return labelled_version(label) if not adapter or adapter in await self._adapters(client) else None

    async def hold(self, client: ServerClient) -> None:
        if await self.version(client) is None:
            await client.post("/pause?mode=abort")

    async def transport(self, client: ServerClient, options: Servers, device: torch.device) -> WeightTransport:
        return choose_transport(client, await self._config(client), options, device)

    async def sleep(self, client: ServerClient) -> None:
        """At level 2 the server discards its weights; requests wait until it is woken."""
        config = await self._config(client)
        prepared, device = config["model_config"]["enable_sleep_mode"], config["device_config"]["device"]
        check_memory(client, device, prepared, "--enable-sleep-mode")
        await client.post("/update_weight_version", {"new_version": ASLEEP})
        await client.post("/sleep?level=2")

    async def load(
        self, client: ServerClient, weights: WeightVersion, before: WeightVersion | None, transport: WeightTransport
    ) -> None:
        """Pauses, loads what the server lacks, drops cached prefixes, sets the label and resumes; new requests wait."""
        config = await self._config(client)
        model, label = config["model_config"], str(weights.version)
        check_samples(client, config)
        if self._media is not None:
            attending = await call_workers(client, "rft_attends_ahead") if has_receiver(config) else []
            check_server(client, config, attending)
        if weights.dtype is not None:
            check_dtype(client, weights.dtype, model["dtype"])
        if weights.adapter is not None and config["lora_config"] is None:
            raise client.bad_response(
                "it does not accept adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and "
                f"--max-lora-rank, or {MERGE}"
            )
        await self._check_scale_out(client)
        slept = (await client.get("/weight_info"))["weight_version"] == ASLEEP
        if slept:
            await client.post("/wake_up?tags=weights")
        # By default the server drops the keys and values of requests that it keeps, and computes them again.
        await client.post(f"/pause?mode={'keep' if self.recomputes else 'abort'}")
        if before is None or before.tensors is not weights.tensors:  # else they differ in their adapters at most
            await transport.load(weights, before)
        for name in await self._adapters(client) if config["lora_config"] is not None else ():
            await client.post_raw("/v1/unload_lora_adapter", {"lora_name": name})
        if weights.adapter is not None:
            folder = weights.adapter.folder
            await client.post_raw("/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
            label += SEPARATOR + folder.name
        reset = f"/reset_prefix_cache{'?reset_running_requests=true' if self.recomputes else ''}"
        if not (await client.post(reset))["success"]:
            raise client.bad_response("it did not drop cached prefixes of the weights before")
        if self._media is not None:
            await client.post("/reset_encoder_cache")  # embeddings of media by the weights before
        if slept:
            await client.post("/wake_up?tags=kv_cache")
        await client.post("/update_weight_version", {"new_version": label})
        await client.post("/resume")

    async def _check_scale_out(self, client: ServerClient) -> None:
        """Raises `RequestRefused` where the server lacks the endpoint for samples, which accepts only a POST."""
        try:
            await client.get(SAMPLES)
        except RequestRefused as error:
            if error.missing:
                raise

    async def _config(self, client: ServerClient) -> Any:
        """The options of the server."""
        return (await client.get("/server_info?config_format=json"))["vllm_config"]

    async def _adapters(self, client: ServerClient) -> list[str]:
        """Adapters of this program that the server has."""
        names = [model["id"] for model in (await client.get("/v1/models"))["data"]]
        return [name for name in names if name.startswith(ADAPTER)]


@dataclass(frozen=True, kw_only=True)
class VLLMServersOptions(ServersOptions):
    """Options of `VLLMServers`.

    Attributes:
        merge_lora: false: the base weights are written once, and every version after that sends the adapters alone.
    """

    merge_lora: bool

    def check(self, context: EngineCheckContext) -> None:
        VLLMApi(context.engine_args)  # checks the arguments
        super().check(context)
        if context.while_updating is not None:
            self._check_asynchronous(context)
        if not self.merge_lora:
            check_adapters(context.lora, None, context.media)
            if (way := self.servers.transport) != "folder":
                raise ValueError(
                    f"{KEY}.transport={way}: servers read adapters from a folder; set it to folder, or {MERGE}"
                )
            if self.servers.sleep:
                raise ValueError(
                    f"{KEY}.sleep=true: sleeping servers discard the base weights, which are sent once only; set it "
                    f"to false, or {MERGE}"
                )
            if taken := sorted(KEYS & context.engine_args.keys()):
                raise ValueError(f"rollout.engine_args.{taken[0]}: it follows from actor.lora; take it out, or {MERGE}")

    def _check_asynchronous(self, context: EngineCheckContext) -> None:
        """Refuses what requests that run during an update of the weights do not go with."""
        if not self.merge_lora:
            raise ValueError(
                f"rollout.staleness: an adapter is unloaded while requests still use it; {MERGE}, or set "
                "rollout.staleness=0"
            )
        if context.media and context.while_updating == "abort":
            raise ValueError(
                "rollout.while_updating=abort: an answer to media cannot be continued as a prompt; set it to recompute"
            )

    def check_here(self) -> None:
        self.servers.check_installed("vllm", "scripts/install_vllm_cpu.sh")


class VLLMServers(ServersEngine):
    """Samples with vLLM servers; see `ServersEngine`."""

    Options = VLLMServersOptions
    facts = replace(ServersEngine.facts, most_forbidden=MOST_BIASED, concurrent=True)
    server_api = VLLMApi
    sleep_arguments: ClassVar = {"enable_sleep_mode": True}

    def __init__(self, options: VLLMServersOptions, context: EngineContext) -> None:
        self._lora = None if options.merge_lora else context.lora
        self._base_version: int | None = None
        if self._lora is not None:
            context = replace(context, engine_args=context.engine_args | room(self._lora))
        super().__init__(options, context)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """With `merge_lora=false` it sends the adapters of `LoraWeights` under a new name, and changed base weights."""
        if self._lora is None or not isinstance(tensors, LoraWeights):
            super().update_weights(version, tensors)
            self._base_version, self._request_fields = None, {}
            return
        store = self._weight_store
        base = store.kept
        if base is None or tensors.base_version != self._base_version:
            base = store.write(version, renamed(tensors.base(), self._names))
        alone = {name: tensor.cpu() for name, tensor in tensors.alone() if self.context.world.rank == 0}
        name: str = self.context.world.decide(lambda: f"{ADAPTER}{uuid.uuid4().hex}")
        self._commit(store.adapt(base, version, name, lambda folder: tensors.adapters.save(alone, folder)))
        self._request_fields, self._base_version = {"model": name}, tensors.base_version


@PROMPT_LOGPROBS.register("vllm")
@dataclass
class VLLMPromptLogprobs:
    """vLLM's server: `prompt_logprobs` of its completions, which do not use cached prefixes."""

    context: int
    context_flag: ClassVar = "--max-model-len"
    count_flag: ClassVar[str | None] = "--max-logprobs"

    def call(self, text: Text, count: int) -> Call:
        """The response covers every token of the text."""
        body = {"prompt": text.tokens, "prompt_logprobs": count, "max_tokens": 1, "temperature": 1.0}
        return Call("/v1/completions", body)

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """At a position there are the most likely tokens, ranks from 1 on, and the text's own token with any rank."""
        [choice] = answer["choices"]
        own, top = [], []
        pairs = zip(text.tokens, choice["prompt_logprobs"], strict=True)
        for token, others in list(pairs)[text.first :]:
            own.append(others[str(token)]["logprob"])
            ranks = {entry["rank"]: (int(name), entry["logprob"]) for name, entry in others.items()}
            top.append([ranks[rank] for rank in range(1, count + 1)])
        return TokenLogprobs.of(own, top, count)

    def detokenized(self, answer: Any) -> str:
        """vLLM returns the text as `prompt`."""
        return str(answer["prompt"])
