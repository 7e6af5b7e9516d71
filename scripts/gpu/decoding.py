"""Sampling by rollout=hf with CUDA graphs beside sampling without: the same tokens, and the time of a token."""

from functools import partial
from typing import Any

from gpu.checks import Check, FailedError, Found, Setting
from gpu.jobs import SHAPES
from gpu.machine import fastest
from gpu.updates import VOCABULARY, save_tokenizer, shared_policy

ROWS = (8, 64, 256)
WAYS = {  # tokens of an answer on a GPU, attention of cuDNN, graphs
    "plain": (32, False, False),
    "cudnn": (32, True, False),
    "graphs": (256, False, True),
}
TOKENS = {True: 8, False: 64}  # of an answer that is compared, or of any on a CPU
TRUNCATED: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 50, "top_p": 0.9},
    {"top_p": 0.9},  # its draw is not in the graph
)
DIFFERENCE = 1e-3  # of log-probabilities in float32, in nats
SAME = 0.9  # of the answers have the same tokens; a draw near a bound may fall to either side


def checks() -> list[Check]:
    """The checks of this file."""
    found = [Check("graphs:same", "tokens with CUDA graphs and without, float32", compare, rank=33, seconds=15)]
    for rank, rows in enumerate(ROWS, start=30):
        title = f"time of a token with CUDA graphs and without, {rows} rows, Qwen2.5-1.5B's shape, bfloat16"
        found.append(Check(f"decode:{rows}", title, partial(measure, rows), rank, 14, cuda=rows > 8))
    return found


def compare(setting: Setting) -> Found:
    """Answers of several lengths, each time with other weights and another truncation."""
    import torch

    shape = SHAPES["small"] | {"model_type": "qwen3"}
    same, largest, answers = 0, 0.0, 0
    plain, graphs = (engine_of(shape, torch.float32, setting, cuda_graphs) for cuda_graphs in (False, True))
    for version, truncation in enumerate(TRUNCATED, start=1):
        with_weights([plain, graphs], version)
        most = TOKENS[setting.cpu]
        found, expected = (generate(engine, 8, most, varied=True, **truncation) for engine in (graphs, plain))
        for one, other in zip(found, expected, strict=True):
            equal = [a == b for a, b in zip(one.tokens, other.tokens, strict=False)]
            common = [*equal, False].index(False)
            pairs = zip(one.logprobs[:common], other.logprobs[:common], strict=True)
            largest = max([largest, *(abs(a - b) for a, b in pairs)])
            same, answers = same + (one.tokens == other.tokens), answers + 1
    if not largest <= DIFFERENCE or same < SAME * answers:
        raise FailedError(f"{same} of {answers} answers are the same, log-probabilities differ by {largest:.1e}")
    numbers = {"same": same / answers, "difference": largest}
    return Found(f"{same} of {answers} answers are the same, log-probabilities differ by {largest:.1e}", numbers)


def measure(rows: int, setting: Setting) -> Found:
    """Milliseconds of a token of the policy that `updates` trains, prefill and recording included."""
    import torch

    from rft.rollout.engine.base import EngineContext
    from rft.rollout.engine.hf import HFEngine, HFOptions

    policy = shared_policy(setting)
    of_run = {"folder": setting.folder, "engine_args": {}, "lora": None, "dtype": policy.strategy.dtype}
    numbers: dict[str, Any] = {"rows": rows}
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for name, (tokens, cudnn, cuda_graphs) in WAYS.items():
        most = TOKENS[True] if setting.cpu else tokens
        context = EngineContext(policy.world, policy.actor.plain_model(), policy.tokenizer, **of_run)
        engine = HFEngine(HFOptions(max_rows=256, dtype=None, cuda_graphs=cuda_graphs), context)
        engine.update_weights(1, policy.actor.weights(engine.gather_options))
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        try:
            seconds = fastest(partial(generate, engine, rows, most, varied=False), setting, repeats=1)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
        numbers[f"{name}_ms"] = 1e3 * seconds / most
        engine.sleep()
    numbers["tokens_per_s"] = 1e3 * rows / numbers["graphs_ms"]
    parts = [f"{name} {numbers[f'{name}_ms']:.2f}" for name in WAYS]
    return Found(f"ms a token: {', '.join(parts)}; {numbers['tokens_per_s']:,.0f} tokens/s with graphs", numbers)


def engine_of(shape: dict[str, Any], dtype: Any, setting: Setting, cuda_graphs: bool) -> Any:
    """The engine of rollout=hf, without weights; on a CPU it computes the static steps without a graph."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rft.data.encode.tokenizer import pretrained
    from rft.distributed import start
    from rft.rollout.engine.base import EngineContext
    from rft.rollout.engine.hf import HFEngine, HFOptions

    words = 512 if setting.cpu else VOCABULARY
    save_tokenizer(setting.folder / "tokenizer", words)
    tokenizer = pretrained(path=str(setting.folder / "tokenizer"))
    config = AutoConfig.for_model(**shape, vocab_size=words, eos_token_id=None, pad_token_id=0, bos_token_id=None)
    world = start("cpu" if setting.cpu else "cuda")
    with world.device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    context = EngineContext(world, model, tokenizer, setting.folder, {}, None, dtype)
    return HFEngine(HFOptions(max_rows=256, dtype=None, cuda_graphs=cuda_graphs), context)


def with_weights(engines: list[Any], version: int) -> None:
    """The same drawn weights for all engines, others for each version."""
    import torch

    shared = engines[0].model
    draw = torch.Generator(shared.device).manual_seed(version)
    drawn = {
        name: (parameter.dim() == 1) + torch.randn(parameter.shape, generator=draw, device=shared.device) * 0.05
        for name, parameter in shared.named_parameters()
    }
    for engine in engines:
        engine.sleep()
        engine.update_weights(version, drawn.items())


def generate(engine: Any, rows: int, most: int, varied: bool, top_k: int = 0, top_p: float = 1.0) -> list[Any]:
    """A completion of at most so many tokens for each prompt; `varied`: of several lengths, and four for each."""
    from rft.rollout.engine.base import Request
    from rft.rollout.engine.sampling import Sampling

    sampling = Sampling(most, temperature=1.0, top_p=top_p, top_k=top_k, min_p=0.0, stop=[], first_token=None)
    limits = [most, most // 2, most // 4, 2] if varied else [most]
    lengths = [17 * row % 64 + 1 if varied else 64 for row in range(rows)]
    seeds = [[len(limits) * row + sample for sample in range(len(limits))] for row in range(rows)]
    requests = [Request(list(range(5, 5 + length)), own, limits) for length, own in zip(lengths, seeds, strict=True)]
    return [completion for group in engine.generate(requests, sampling) for completion in group]
