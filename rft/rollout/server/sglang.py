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

from rft.actor.forward.logits import FORBIDDEN
from rft.batch.encoded import MediaFacts, as_encoded
from rft.remote.http_client import PROBE_S, RequestRefused, ServerClient
from rft.remote.requests import Call
from rft.remote.server_process import LOCAL
from rft.rollout.engine.base import Completion, EngineCheckContext, OnCompletion, Request
from rft.rollout.engine.expanded import check_expanded
from rft.rollout.engine.sampling import Sampling
from rft.rollout.server.engine import ServersEngine, ServersOptions
from rft.rollout.server.options import KEY
from rft.rollout.server.prompt_logprobs import PROMPT_LOGPROBS, Text, TokenLogprobs
from rft.rollout.server.remote.rft_receiver import TOKEN_GROUP, group_token
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
from rft.rollout.server.weights.broadcast import BroadcastGroup, MakeGroup
from rft.rollout.server.weights.buckets import missing_tensors
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
# Labels of a server's weights that are not a version:
ALL_TOKENS = -1  # SGLang's top_k without a bound
NEW = "default"  # SGLang's own, before the first update
LOADING = "loading"  # between two versions; the server may be paused
UNSURE = "unsure"  # while the server releases or allocates memory
ASLEEP, WEIGHTS_ONLY = "asleep", "dozing"  # paused; without the memory of
RELEASED = {ASLEEP: ("kv_cache", "weights"), WEIGHTS_ONLY: ("kv_cache",)}
RESERVED = frozenset(("model_path", "model", "host", "port", "api_key", "weight_version", *FIXED))


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
    sleep_arguments: ClassVar = {"enable_memory_saver": True}

    @staticmethod
    def server_api(
        engine_args: dict[str, Any], media: MediaFacts | None = None, forbidden: Sequence[int] = ()
    ) -> ServerApi:
        return SGLangApi(engine_args, forbidden)

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """See `ServersEngine.generate`. SGLang decodes a prompt with media and encodes the text again.

        Raises:
            OtherPrompt: the text of a prompt with media has other tokens, as where it quotes a placeholder.
        """
        tokenizer = self.context.tokenizer
        for number, request in enumerate(requests):
            if (raw := as_encoded(request.prompt).raw) is not None:
                again = tokenizer(tokenizer.decode(raw.ids), add_special_tokens=False).input_ids
                check_expanded(number, raw.ids, again, tokenizer)
        return super().generate(requests, sampling, on_completion)


class SGLangApi:
    """The interface of an SGLang server; see `ServerApi`.

    Args:
        engine_args: flags of a server that the run starts: `context_length: 2048` is `--context-length 2048`.
        forbidden: ids that are never sampled.

    Raises:
        ValueError: the run itself sets one of the arguments; names it.
    """

    rollout = "sglang"

    def __init__(self, engine_args: dict[str, Any], forbidden: Sequence[int] = ()) -> None:
        if reserved := sorted(RESERVED & engine_args.keys()):
            raise ValueError(f"rollout.engine_args.{reserved[0]}: the run itself sets this argument; take it out")
        self._forbidden = dict.fromkeys(forbidden, FORBIDDEN)
        self._engine_args = engine_args
        self._groups: dict[ServerClient, str] = {}
        self._started: set[tuple[str, int]] = set()  # host and port of servers that `command` starts

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
        self._started.add((host, port))
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
        return Sampled(
            tokens, logprobs, reason["type"], labelled_version(about["weight_version"]), answer.get("prompt_token_ids")
        )

    async def healthy(self, client: ServerClient) -> None:
        """`/server_info` is quick and asks the scheduler too; `/health` takes a second and works during the warm-up."""
        await client.get("/health" if await self._label(client) == NEW else "/server_info")

    async def version(self, client: ServerClient) -> int | None:
        """The label that `load` set last."""
        return labelled_version(await self._label(client))

    async def hold(self, client: ServerClient) -> None:
        """See `ServerApi.hold`. The label makes `load` end the pause."""
        if await self._label(client) == NEW:
            await self._set_label(client, LOADING)
            await client.post("/pause_generation", {"mode": "abort"})

    async def join(self, client: ServerClient, make: MakeGroup) -> BroadcastGroup:
        """Destroys the previous group, and lets all workers join the new one.

        Workers of servers that the run has started check the token of the group; see `rft_sglang_plugin`.
        """
        about = await client.get("/server_info")
        if (about["dp_size"], about["pp_size"]) != (1, 1):
            raise client.bad_response(f"it has dp_size or pp_size above 1; set {KEY}.transport=folder")
        if before := self._groups.pop(client, None):
            with contextlib.suppress(RequestRefused):  # the server was restarted, or has left the group
                await client.post("/destroy_weights_update_group", {"group_name": before})
        group = make([about["device"]] * about["tp_size"])
        checked = (client.host, client.port) in self._started and client.key is not None
        if client.key is not None and checked:
            name = f"{TOKEN_GROUP}{group.rendezvous.name}"
            group.rendezvous = replace(group.rendezvous, name=name, token=group_token(name, client.key))
        place = group.rendezvous
        body = {"master_address": place.address, "master_port": place.port, "group_name": place.name}
        body |= {"world_size": place.size, "rank_offset": 1, "backend": place.backend}
        self._groups[client] = place.name
        await group.join(client.post("/init_weights_update_group", body), group.check_token if checked else None)
        return group

    async def sleep(self, client: ServerClient) -> None:
        """The server discards its weights; requests wait until it is woken."""
        about, label = await client.get("/server_info"), await self._known_label(client)
        check_memory(client, about["device"], about["enable_memory_saver"], "--enable-memory-saver")
        if held := [part for part in RELEASED[ASLEEP] if part not in RELEASED.get(label, ())]:
            if label not in RELEASED:
                await self._set_label(client, LOADING)
            await client.post("/pause_generation", {"mode": "abort"})
            # The server ends if it is asked to release memory while it still finishes a sample.
            await client.post_raw(f"/flush_cache?timeout={PROBE_S:g}")
            await self._memory(client, "release", held, ASLEEP)

    async def _memory(self, client: ServerClient, verb: str, parts: list[str], label: str) -> str:
        """Releases or resumes memory. The server ends if it gets this request twice, so the label records each one."""
        await self._set_label(client, UNSURE)
        await client.post_raw(f"/{verb}_memory_occupation", {"tags": parts})
        await self._set_label(client, label)
        return label

    async def load(
        self, client: ServerClient, weights: WeightVersion, before: WeightVersion | None, group: BroadcastGroup | None
    ) -> None:
        """Aborts running requests, loads, drops cached prefixes and sets the label; new requests wait.

        From a folder this is one atomic request to a server that is awake. Through a group the weights are loaded
        bucket by bucket, and samples between two of them carry a label that is not a version.
        """
        if weights.dtype is not None:
            check_dtype(client, weights.dtype, (await client.get("/server_info"))["dtype"])
        label, version = await self._known_label(client), str(weights.version)
        if label == ASLEEP:
            label = await self._memory(client, "resume", ["weights"], WEIGHTS_ONLY)
        between = WEIGHTS_ONLY if label == WEIGHTS_ONLY else LOADING
        whole = group is None and label not in (WEIGHTS_ONLY, LOADING)
        if group is not None:
            await self._set_label(client, between, abort=True)
            for bucket in missing_tensors(weights, before):
                names, dtypes, shapes = zip(*bucket.about(), strict=True)
                body = {"group_name": group.rendezvous.name, "names": names, "dtypes": dtypes, "shapes": shapes}
                call = client.post("/update_weights_from_distributed", body | {"abort_all_requests": True})
                await group.send(bucket.tensors(), call)
        else:
            where = {"model_path": str(weights.folder), "load_format": "auto"}
            where |= {"weight_version": version if whole else between}
            ending = {"abort_all_requests": True, "flush_cache": True}
            answer = await client.post("/update_weights_from_disk", where | ending)
            if answer["success"] is not True:
                raise client.bad_response(f"it did not load the weights of {weights.folder}: {answer['message']}")
        if label == WEIGHTS_ONLY:
            label = await self._memory(client, "resume", ["kv_cache"], LOADING)
        if label == LOADING:
            await client.post("/continue_generation")
        if not whole:
            await self._set_label(client, version)

    async def _label(self, client: ServerClient) -> str:
        return str((await client.get("/model_info"))["weight_version"])

    async def _known_label(self, client: ServerClient) -> str:
        if (label := await self._label(client)) == UNSURE:
            raise client.bad_response("it released or allocated memory and did not confirm it: restart it")
        return label

    async def _set_label(self, client: ServerClient, label: str, abort: bool = False) -> None:
        await client.post("/update_weight_version", {"new_version": label, "abort_all_requests": abort})


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
