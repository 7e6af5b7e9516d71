"""SGLang's server: token ids in and out, weights from a folder or through a process group.

A sample depends on its seed alone only where the server computes deterministically, which SGLang does on GPUs
(`engine_args.enable_deterministic_inference`); elsewhere the server draws with its own seeds.
Not supported: weights through shared memory, whose handles SGLang takes as pickles only, or in messages; media that a
processor pads, whose padding SGLang 0.5.15 computes.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from rft.batch.encoded import MediaFacts, as_encoded
from rft.remote.http_client import PROBE_S, RequestRefused, ServerClient
from rft.remote.server_process import LOCAL
from rft.remote.server_requests import Call
from rft.rollout.engine.base import Completion, EngineCheckContext, OnCompletion, Request
from rft.rollout.engine.expanded import check_expanded
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server.engine import ServersEngine, ServersOptions
from rft.rollout.server.options import KEY, Servers
from rft.rollout.server.prompt_logprobs import PROMPT_LOGPROBS, Text, TokenLogprobs
from rft.rollout.server.server_api import (
    Aborted,
    Sampled,
    ServerApi,
    ServerPrompt,
    check_dtype,
    check_memory,
    flags,
    labelled_version,
    python_path,
)
from rft.rollout.server.weights.sglang import PAUSED, Label, SGLangFolder, SGLangGroup, read_label, set_label
from rft.rollout.server.weights.transport import WeightTransport
from rft.rollout.server.weights.version import WeightVersion

FIXED = {
    "load_format": "dummy",  # the run sends the weights
    "log_level_http": "warning",
}
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "max_total_tokens": 16384,  # of keys and values; by default SGLang allocates most of the machine's memory for them
}
ALL_TOKENS = -1  # SGLang's top_k without a bound
# The memory that a server with a label does not have
RELEASED: dict[str, tuple[str, ...]] = {Label.ASLEEP: ("kv_cache", "weights"), Label.WEIGHTS_ONLY: ("kv_cache",)}


class SGLangApi(ServerApi):
    """The interface of an SGLang server."""

    rollout = "sglang"
    reserved = frozenset(("model_path", "model", "host", "port", "api_key", "weight_version", *FIXED))

    def __init__(
        self, engine_args: dict[str, Any], media: MediaFacts | None = None, forbidden: Sequence[int] = ()
    ) -> None:
        super().__init__(engine_args, media, forbidden)
        self._groups: dict[ServerClient, str] = {}

    def check(self, sampling: Sampling) -> None:
        if sampling.first_token is not None:
            raise ValueError("first_token: SGLang draws all tokens alike; set rollout/first_token=none or rollout=hf")
        if sampling.top_k > 0 and sampling.top_p < 1:
            raise ValueError(
                f"top_p={sampling.top_p} with top_k={sampling.top_k}: SGLang takes the mass of top-p from the whole "
                "distribution, not from that of top-k; set one of the two, or choose rollout=hf"
            )

    def unknown_logprobs(self, sampling: Sampling) -> str:
        """SGLang draws from the truncated distribution, but reports log-probabilities of the whole one."""
        for name, off in {"top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
            if (given := vars(sampling)[name]) != off:
                return (
                    f"{name}={given}: SGLang reports log-probabilities of another distribution then; set {name}={off} "
                    "or rollout=hf"
                )
        return ""

    def command(
        self, python: str, model: Path, port: int, host: str = LOCAL, load_format: str = "dummy"
    ) -> tuple[list[str], dict[str, str]]:
        """Starts a server that does not access the hub."""
        on_cpu = self._engine_args.get("device", "cuda" if torch.cuda.is_available() else "cpu") == "cpu"
        arguments = {"model_path": str(model), "host": host, "port": port, **FIXED, "load_format": load_format}
        arguments |= (ON_CPU if on_cpu else {}) | self._engine_args
        # Nothing uses the gRPC port. Its default, port + 10000, may exceed 65535, at which the server fails.
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_GRPC_PORT": str(port - 1), "PYTHONPATH": python_path()}
        environment |= {"SGLANG_USE_CPU_ENGINE": "1"} if on_cpu else {}
        return [python, "-m", "rft_sglang", *flags(arguments, off=None)], environment

    def request(self, prompt: ServerPrompt, seed: int, limit: int, ends: list[int], sampling: Sampling) -> Call:
        """Requests token ids; the server decodes them only to find stop strings."""
        how = {
            "max_new_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or ALL_TOKENS,
            "min_p": sampling.min_p,
            "sampling_seed": seed,
            "stop": sampling.stop,
            "stop_token_ids": ends,
        }
        body: dict[str, Any] = {"input_ids": prompt.ids, "sampling_params": how, "return_logprob": True}
        if self._forbidden:
            how["logit_bias"] = self._forbidden
        if prompt.media:
            body |= {f"{kind}_data": urls for kind, urls in prompt.media.items()} | {"return_prompt_token_ids": True}
        return Call("/generate", body)

    def parse(self, answer: Any) -> Sampled:
        """The only sample in the response."""
        about = answer["meta_info"]
        reason = about["finish_reason"]
        if reason["type"] == "abort":
            raise Aborted(reason["message"])
        logprobs, tokens, _ = (list(column) for column in zip(*about["output_token_logprobs"], strict=True))
        if tokens != answer["output_ids"]:
            raise ValueError("log-probabilities of other tokens")
        versions = [labelled_version(about["weight_version"])] * len(tokens)
        return Sampled(tokens, logprobs, reason["type"], versions, answer.get("prompt_token_ids"))

    async def healthy(self, client: ServerClient) -> None:
        """`/server_info` is quick and asks the scheduler too; `/health` takes a second and works during the warm-up."""
        await client.get("/health" if await read_label(client) == Label.NEW else "/server_info")

    async def version(self, client: ServerClient) -> int | None:
        """The label that `load` set last."""
        return labelled_version(await read_label(client))

    async def hold(self, client: ServerClient) -> None:
        """Sets the label, too, which makes `load` end the pause."""
        if await read_label(client) == Label.NEW:
            await set_label(client, Label.LOADING)
            await client.post("/pause_generation", {"mode": "abort"})

    async def transport(self, client: ServerClient, options: Servers, device: torch.device) -> WeightTransport:
        """Of a process group it also destroys the previous one.

        Workers of servers that the run has started check the token of the group; see `rft_sglang_plugin`.
        """
        if options.transport == "folder":
            return SGLangFolder(client)
        about = await client.get("/server_info")
        if (about["dp_size"], about["pp_size"]) != (1, 1):
            raise client.bad_response(f"it has dp_size or pp_size above 1; set {KEY}.transport=folder")
        if before := self._groups.pop(client, None):
            with contextlib.suppress(RequestRefused):  # the server was restarted, or has left the group
                await client.post("/destroy_weights_update_group", {"group_name": before})
        devices = [about["device"]] * about["tp_size"]
        group = SGLangGroup(client, devices, device, options.sync_s, checked=options.count > 0)
        self._groups[client] = group.rendezvous.name
        return group

    async def sleep(self, client: ServerClient) -> None:
        """The server discards its weights; requests wait until it is woken."""
        about, label = await client.get("/server_info"), await self._known_label(client)
        check_memory(client, about["device"], about["enable_memory_saver"], "--enable-memory-saver")
        if held := [part for part in RELEASED[Label.ASLEEP] if part not in RELEASED.get(label, ())]:
            if label not in RELEASED:
                await set_label(client, Label.LOADING)
            await client.post("/pause_generation", {"mode": "abort"})
            # The server ends if it is asked to release memory while it still finishes a sample.
            await client.post_raw(f"/flush_cache?timeout={PROBE_S:g}")
            await self._memory(client, "release", held, Label.ASLEEP)

    async def _memory(self, client: ServerClient, verb: str, parts: list[str], label: str) -> str:
        """Releases or resumes memory. The server ends if it gets this request twice, so the label records each one."""
        await set_label(client, Label.UNSURE)
        await client.post_raw(f"/{verb}_memory_occupation", {"tags": parts})
        await set_label(client, label)
        return label

    async def load(
        self, client: ServerClient, weights: WeightVersion, before: WeightVersion | None, transport: WeightTransport
    ) -> None:
        """Aborts running requests, loads, drops cached prefixes and sets the label; new requests wait."""
        if weights.dtype is not None:
            check_dtype(client, weights.dtype, (await client.get("/server_info"))["dtype"])
        label = await self._known_label(client)
        paused = label in PAUSED
        if label == Label.ASLEEP:
            await self._memory(client, "resume", ["weights"], Label.WEIGHTS_ONLY)
        await transport.load(weights, before)
        label = await read_label(client)
        if label == Label.WEIGHTS_ONLY:
            label = await self._memory(client, "resume", ["kv_cache"], Label.LOADING)
        if paused:
            await client.post("/continue_generation")
        if label == Label.LOADING:  # else the request that loaded the weights has set the version
            await set_label(client, str(weights.version))

    async def _known_label(self, client: ServerClient) -> str:
        if (label := await read_label(client)) == Label.UNSURE:
            raise client.bad_response("it released or allocated memory and did not confirm it: restart it")
        return label


class SGLangOptions(ServersOptions):
    """Options of `SGLangServers`."""

    def check(self, context: EngineCheckContext) -> None:
        SGLangApi(context.engine_args)  # checks the arguments
        super().check(context)
        if self.servers.deltas:
            raise ValueError(f"{KEY}.deltas=true: SGLang's servers receive whole tensors only; set it to false")
        if self.servers.transport == "ipc":
            raise ValueError(
                f"{KEY}.transport=ipc: SGLang takes handles of shared memory as pickles only, which the run does not "
                "send; set it to folder or group"
            )

    def check_here(self) -> None:
        self.servers.check_installed("sglang", "scripts/install_sglang_cpu.sh")


class SGLangServers(ServersEngine):
    """Samples with SGLang servers; see `ServersEngine`."""

    Options = SGLangOptions
    facts = replace(ServersEngine.facts, masks_padding=False)
    server_api = SGLangApi
    sleep_arguments: ClassVar = {"enable_memory_saver": True}

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """SGLang decodes a prompt with media and encodes the text again.

        Raises:
            OtherPrompt: the text of a prompt with media has other tokens, as where it quotes a placeholder.
        """
        tokenizer = self.context.tokenizer
        for number, request in enumerate(requests):
            if (raw := as_encoded(request.prompt).raw) is not None:
                again = tokenizer(tokenizer.decode(raw.ids), add_special_tokens=False).input_ids
                check_expanded(number, raw.ids, again, tokenizer)
        return super().generate(requests, sampling, on_completion)


@PROMPT_LOGPROBS.register("sglang")
@dataclass
class SGLangPromptLogprobs:
    """SGLang's server: the log-probabilities of the input that its own endpoint gives."""

    context: int
    context_flag: ClassVar = "--context-length"
    count_flag: ClassVar[str | None] = None

    def call(self, text: Text, count: int) -> Call:
        """The response starts one token before `text.first`, so that the server may use a cached prefix."""
        how = {"return_logprob": True, "logprob_start_len": text.first - 1, "top_logprobs_num": count}
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        return Call("/generate", {"input_ids": text.tokens, "sampling_params": sampling, **how})

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """The first entry, in front of `text.first`, is empty. Ids are not compared: SGLang reports 0 for the last."""
        about = answer["meta_info"]
        own = [number for number, *_ in about["input_token_logprobs"][1:]]
        if len(own) != len(text.tokens) - text.first:
            raise ValueError(f"log-probabilities of {len(own)} tokens, not of {len(text.tokens) - text.first}")
        top = about["input_top_logprobs"][1:] if count else [[]] * len(own)
        return TokenLogprobs.of(own, [[(name, number) for number, name, *_ in others] for others in top], count)

    def detokenized(self, answer: Any) -> str:
        """SGLang returns the text as `text`."""
        return str(answer["text"])
