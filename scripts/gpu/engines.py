"""Inference engines on the device of the trainer: they sleep while it trains, and wake with new weights."""

from functools import partial

from gpu.checks import Check, FailedError, Found, Setting
from gpu.jobs import run_job

GAP = 0.1  # mean difference of log-probabilities, in nats; bfloat16, other kernels
SLEEP = "rollout.engine.servers.sleep=true"
ENGINES = {  # name: title, package, overrides
    "vllm": ("vLLM in the process of the trainer", "vllm", ("rollout=vllm",)),
    "vllm_server": ("a vLLM server", "vllm", ("rollout=vllm_server", SLEEP)),
    "sglang": ("an SGLang server", "sglang", ("rollout=sglang", SLEEP)),
}


def checks() -> list[Check]:
    """The checks of this file."""
    return [
        Check(f"engine:{name}", f"sleep and wake: {title}", partial(run, overrides), 90, 130, True, package)
        for name, (title, package, overrides) in ENGINES.items()
    ]


def run(overrides: tuple[str, ...], setting: Setting) -> Found:
    """Steps of GRPO, in each of which the engine sleeps; its log-probabilities must be those of the trainer."""
    options = ["strategy=bf16", "warmup.steps=4", "steps=3", "eval.every=0", *overrides]
    rows = [row for row in run_job(setting.folder, options) if "rollout/logprob_gap" in row]
    gaps = [row["rollout/logprob_gap"] for row in rows]
    numbers = {"logprob_gap": max(gaps), "refresh_s": rows[-1]["time/refresh_s"]}
    if not max(gaps) < GAP:
        raise FailedError(f"log-probabilities of engine and trainer differ by {max(gaps):.3f}, more than {GAP}")
    times = f"new weights in {numbers['refresh_s']:.2f} s"
    return Found(f"{len(gaps)} steps, log-probabilities differ by {max(gaps):.1e}, {times}", numbers)
