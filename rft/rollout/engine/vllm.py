"""Sampling with vLLM in this process: every rank runs an engine of its own beside its trainer, on the same device.

With `engine_args.tensor_parallel_size` as many ranks run one engine together, and each gets what it asked for.
Left out: several modalities.
"""

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rft.actor.lora.adapters import LoraWeights
from rft.actor.packing.cost import head_size
from rft.distributed import World
from rft.rollout.engine.base import Completion, EngineContext, EngineFacts, Request
from rft.rollout.engine.model_folder import write_model_folder
from rft.rollout.engine.sampling import Sampling
from rft.rollout.engine.texts import completions, end_tokens
from rft.rollout.engine.vllm_checks import check_sampling, check_speculation
from rft.rollout.engine.vllm_lora import KEYS, check_adapters, refused, replace_adapter, room
from rft.rollout.server.servable import ServableEngine
from rft.rollout.server.server_api import ServerApi

FIXED = frozenset(("model", "load_format", "generation_config", "logprobs_mode", "distributed_executor_backend"))


@contextlib.contextmanager
def shared_memory_of(world: World) -> Iterator[None]:
    """Within it the memory that the ranks of an engine share on a CPU is made under a name of this run, which is taken
    away at the end: whoever has the memory keeps it.

    vLLM's own name is the same for all runs, and stays when a run is over: the next one could not begin.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    run, theirs = world.decide(lambda: uuid.uuid4().hex), _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda group: "-".join([run, group.unique_name, *map(str, group.ranks)])
    )
    try:
        yield
        world.gather(None)
    finally:
        _CPUSHMDistributed.make_group_name = theirs
        for file in Path("/dev/shm").glob(f"{run}-*"):
            file.unlink(missing_ok=True)


class VLLMEngine(ServableEngine):
    """Samples with vLLM in this process.

    Args:
        context: of the run; its `engine_args` go to vLLM as they are.
        sleep_level: what the engine gives back while the trainer works: 1 keys, values and weights (these go to the
            CPU), 2 the same and forgets the weights, 0 nothing; null is 2 where vLLM can sleep, 1 there with
            adapters that are not merged, and else 0.
        merge_lora: false: the weights beside the policy's adapters are taken once, and then adapters alone.

    Raises:
        ValueError: vllm is not installed, or cannot do what is asked for; names the key.
    """

    facts = EngineFacts(takes_arguments=True)

    def __init__(
        self,
        context: EngineContext,
        sleep_level: Literal[0, 1, 2] | None,
        merge_lora: bool,
    ) -> None:
        world, model, tokenizer = context.world, context.model, context.tokenizer
        # The engine's loop runs in this process, so that weights are handed over as tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import vllm
        from vllm.platforms import current_platform

        can_sleep = current_platform.is_sleep_mode_available()
        if sleep_level and not can_sleep:
            raise ValueError(f"rollout.engine.sleep_level={sleep_level}: vLLM cannot sleep on this device; set null")
        self.sleep_level = sleep_level if sleep_level is not None else int(can_sleep) * (2 if merge_lora else 1)
        self.tokenizer = tokenizer
        self.version = 0
        self.base_version: int | None = None
        self.adapter: Any = None  # that requests name
        self._merge = merge_lora
        self._world = world
        self._folder = context.folder / "adapter"
        self.ends = end_tokens(model, tokenizer)
        self._params = vllm.SamplingParams
        self._prompt = vllm.TokensPrompt
        if current_platform.is_cpu():
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            sizes, size = CPUAttentionBackend.get_supported_head_sizes(), head_size(model.config.get_text_config())
            if size not in sizes:
                raise ValueError(
                    f"actor.model_config.head_dim={size}: on a CPU vLLM has attention for {', '.join(map(str, sizes))}"
                )
        model_folder = context.folder / "engine"
        world.decide(lambda: write_model_folder(model, tokenizer, model_folder))
        fixed: dict[str, Any] = {
            "model": str(model_folder),
            "load_format": "dummy",
            "generation_config": "vllm",  # no sampling options of the model's own
            "logprobs_mode": "processed_logprobs",
            "distributed_executor_backend": "uni" if world.size == 1 else "external_launcher",
        }
        if not merge_lora:
            assert context.lora is not None, "`check` has refused it"
            fixed |= room(context.lora)
        sharing = shared_memory_of(world) if current_platform.is_cpu() else contextlib.nullcontext()
        try:
            with sharing, torch.random.fork_rng():  # vLLM seeds the whole process
                self._llm = vllm.LLM(**fixed, enable_sleep_mode=self.sleep_level > 0, **context.engine_args)
        except TypeError as error:
            raise ValueError(f"rollout.engine_args: vLLM refuses them: {error}") from error
        except ValueError as error:
            if "LoRA" not in str(error):
                raise
            raise refused(error) from error
        self._engine = self._llm.llm_engine
        self._group: dist.ProcessGroup | None = None
        if self._llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
            from vllm.distributed import get_tp_group

            self._group = get_tp_group().cpu_group

    @classmethod
    def check(cls, options: dict[str, Any], sampling: Sampling) -> None:
        """See `Engine.check`."""
        if taken := sorted((FIXED | KEYS) & options["engine_args"].keys()):
            raise ValueError(f"rollout.engine_args.{taken[0]}: it is what the run itself decides; take it out")
        check_speculation(options["engine_args"])
        check_sampling(sampling)
        if not options["merge_lora"]:
            check_adapters(options["lora"], options["sleep_level"])

    @classmethod
    def check_here(cls, options: dict[str, Any]) -> None:
        """See `Engine.check_here`."""
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "rollout.engine: vllm is not installed; install it with `pip install 'rft[vllm]'`, on a CPU with "
                "scripts/install_vllm_cpu.sh, or choose rollout=hf"
            )

    @staticmethod
    def server_api(engine_args: dict[str, Any]) -> ServerApi:
        """What mode=serve starts."""
        from rft.rollout.server.vllm import VLLMApi

        return VLLMApi(engine_args)

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the tensors into vLLM's layers and forgets the keys and values of the old ones.

        With `merge_lora=false` of `LoraWeights` the adapters, and the rest where it is not what came before.

        Raises:
            ValueError: vLLM does not take the adapters.
        """
        apart = tensors if isinstance(tensors, LoraWeights) and not self._merge else None
        if apart is None or apart.base_version != self.base_version:
            whole = iter(tensors) if apart is None else apart.base()
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": whole})
            self.base_version = None if apart is None else apart.base_version
            self.adapter = None
        if apart is not None:
            self.adapter = replace_adapter(self._engine, apart, self.adapter, self._world, self._folder)
        assert self._llm.reset_prefix_cache(), "requests were running while the weights changed"
        self.version = version

    def generate(
        self, requests: list[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Samples every request; see `Engine.generate`."""
        mine = [
            (request.prompt, self._how(sampling, seed, request.limit(sample, sampling)))
            for request in requests
            for sample, seed in enumerate(request.seeds)
        ]
        before, everyones = self._everyones(mine)
        for number, (prompt, how) in enumerate(everyones):
            self._engine.add_request(str(number), self._prompt(prompt_token_ids=prompt), how, lora_request=self.adapter)
        places = range(before, before + len(mine))
        drawn: dict[int, tuple[list[int], list[float]]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished and int(output.request_id) in places:
                    [answer] = output.outputs
                    ids = list(answer.token_ids)
                    said = [of[token].logprob for of, token in zip(answer.logprobs, ids, strict=True)]
                    drawn[int(output.request_id)] = (ids, said)
                    if progress is not None:
                        progress(len(drawn))
        tokens, logprobs = [drawn[place][0] for place in places], [drawn[place][1] for place in places]
        versions = [[self.version] * len(row) for row in tokens]
        found = iter(completions(self.tokenizer, self.ends, sampling.stop, tokens, logprobs, versions))
        return [[next(found) for _ in request.seeds] for request in requests]

    def _everyones(self, mine: list[Any]) -> tuple[int, list[Any]]:
        """What all ranks of one engine ask for, since they take the same steps, after how much of it comes mine."""
        if self._group is None:
            return 0, mine
        asked: list[list[Any]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(asked, mine, self._group)
        return sum(map(len, asked[: dist.get_rank(self._group)])), [row for theirs in asked for row in theirs]

    def _how(self, sampling: Sampling, seed: int, limit: int) -> Any:
        return self._params(
            max_tokens=limit,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop=sampling.stop,
            stop_token_ids=self.ends,
            logprobs=0,  # of the sampled token alone
            detokenize=bool(sampling.stop),
        )

    def sleep(self) -> None:
        """Gives back what `sleep_level` says."""
        if self.sleep_level:
            self._llm.sleep(self.sleep_level)

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Takes memory for one part again."""
        if self.sleep_level:
            self._llm.wake_up([part])

    def close(self) -> None:
        """Ends the engine, and leaves the process group to whom it belongs: vLLM's own way out would end that too."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        client = self._engine.engine_core
        client._finalizer.detach()
        client.engine_core.model_executor.shutdown()
        client.engine_core.scheduler.shutdown()
        destroy_model_parallel()
        del self._engine, self._llm
