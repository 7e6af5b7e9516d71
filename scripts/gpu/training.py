"""Training runs: GRPO, a killed run, dtypes, float8, attentions, kernels, compiled blocks, offloading, and the plan."""

import signal
import time
from functools import partial
from importlib.util import find_spec

from gpu.checks import Check, FailedError, Found, Setting
from gpu.jobs import compare, figure, last_error, log_of, measured, reference, rows_of, run_job, sft, start_job

ATTENTIONS = ("flash", "varlen", "flex", "sdpa")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # of float8
OFFLOADS = {
    "param": "strategy.param_offload=all",
    "optimizer": "strategy.optimizer_offload=true",
    "activation": "strategy.activation_offload=true",
}
PLAN_ERROR = 0.15  # of the measured peak
FEW = ("warmup.steps=4", "steps=2", "eval.every=0")
LEARNED = 0.5  # accuracy of the default run, whose README has 0.82 and more
GAP = 0.05  # mean difference of log-probabilities of engine and trainer in bfloat16, in nats


def checks() -> list[Check]:
    """The checks of this file."""
    bf16, fp16 = ("strategy=bf16",), ("strategy.dtype=float16",)
    beside = "training in {}, beside float32"
    found = [
        Check("grpo", "GRPO of the built-in task learns, in bfloat16 with CUDA graphs", grpo, rank=50, seconds=75),
        Check("resume", "a killed and resumed run equals an uninterrupted one to the bit", resume, 51, seconds=75),
        Check("bf16", beside.format("bfloat16"), partial(trains, bf16, 2e-2, 1e-1), 70, 40),
        Check("fp16", beside.format("float16"), partial(trains, fp16, 1e-2, 5e-2), 71, 25, cuda=True),
        Check("plan", "measured peak memory, beside mode=plan", plan, rank=72, seconds=60, cuda=True),
        Check(
            "liger",
            "the kernels of liger, beside float32",
            partial(trains, ("actor.liger=true",), 1e-3, 1e-2),
            rank=74,
            seconds=40,
            cuda=True,
            package="liger_kernel",
        ),
        Check(
            "compile",
            "compiled blocks, beside float32",
            partial(trains, ("strategy.compile=true",), 1e-3, 1e-2),
            rank=79,
            seconds=90,
            cuda=True,
        ),
    ]
    for name in ATTENTIONS:
        run = partial(trains, (*bf16, f"strategy.attention={name}"), 2e-2, 1e-1)
        title = "packed rows in bfloat16, beside float32"
        package = flash_package() if name == "flash" else None
        found.append(Check(f"attention:{name}", title, run, 80, 40, cuda=True, package=package))
    for recipe in RECIPES:
        run = partial(trains, (*bf16, f"strategy.fp8={recipe}"), 2e-2, 1e-1)
        title = "float8 layers in bfloat16, beside float32"
        found.append(Check(f"fp8:{recipe}", title, run, 82, 40, cuda=True, package="torchao"))
    for name, option in OFFLOADS.items():
        title = f"{option}, beside none"
        found.append(Check(f"offload:{name}", title, partial(offload, option), rank=81, seconds=40, cuda=True))
    return found


def flash_package() -> str:
    """The module of FlashAttention 3, or else that of 2."""
    return "flash_attn_interface" if find_spec("flash_attn_interface") else "flash_attn"


def grpo(setting: Setting) -> Found:
    """The default run in bfloat16; on a CPU its first steps, without graphs."""
    on_gpu = ["rollout.engine.cuda_graphs=true"]
    rows = run_job(setting.folder, ["strategy=bf16", *(FEW if setting.cpu else on_gpu)])
    accuracy, seconds = rows[-1]["eval/heldout/accuracy"], rows[-1]["time/elapsed_s"]
    gap = max(row["rollout/logprob_gap"] for row in rows if "rollout/logprob_gap" in row)
    if not gap < GAP:
        raise FailedError(f"log-probabilities of engine and trainer differ by {gap:.3f}, more than {GAP}")
    if not setting.cpu and accuracy < LEARNED:
        raise FailedError(f"accuracy {accuracy:.2f} at the end, less than {LEARNED}")
    numbers = {"seconds": seconds, "steps": rows[-1]["step"], "accuracy": accuracy, "logprob_gap": gap}
    took = f"{rows[-1]['step']} steps in {seconds:.0f} s, accuracy {accuracy:.2f}"
    return Found(f"{took}, log-probabilities of engine and trainer differ by {gap:.1e}", numbers)


def resume(setting: Setting) -> Found:
    """Two runs side by side, of which one is killed behind its first checkpoint and started again."""
    options = [*FEW, "steps=12", "checkpoint.every=2", "strategy=bf16", "strategy.deterministic=true"]
    whole = start_job(setting.folder / "whole", options)
    killed = start_job(setting.folder / "killed", options)
    checkpoint = setting.folder / "killed" / "run" / "checkpoints" / "latest"
    while killed.poll() is None and not checkpoint.exists():
        time.sleep(0.02)
    killed.kill()
    if killed.wait() != -signal.SIGKILL or not checkpoint.exists():
        whole.kill()
        raise FailedError(f"the run ended before it was killed: {last_error(log_of(setting.folder / 'killed'))}")
    stopped = checkpoint.resolve().name
    rows = run_job(setting.folder / "killed", [*options, "resume=auto"])
    if whole.wait():
        raise FailedError(last_error(log_of(setting.folder / "whole")))
    for one, other in zip(rows, rows_of(setting.folder / "whole"), strict=True):
        for name in {*one} | {*other}:
            timed = name.startswith(("time/", "throughput/", "memory/"))
            if not timed and one.get(name) != other.get(name):
                raise FailedError(f"step {one['step']}: {name} is {one.get(name)} and not {other.get(name)}")
    return Found(f"killed behind {stopped}: all numbers of {len(rows)} steps are equal", {"steps": len(rows)})


def trains(overrides: tuple[str, ...], loss: float, gradient: float, setting: Setting) -> Found:
    """Supervised training with these options, whose losses must be those of float32 without them."""
    options = sft("tiny" if setting.cpu else "small")
    expected = reference(setting, "float32", options)
    numbers = compare(run_job(setting.folder, [*options, *overrides]), expected, loss, gradient)
    return Found(figure(numbers), numbers)


def offload(option: str, setting: Setting) -> Found:
    """Training with a part in CPU memory: the same losses, less memory of the device."""
    options = [*sft("medium"), "strategy=bf16"]
    expected = reference(setting, "medium", options)
    numbers = compare(run_job(setting.folder, [*options, option]), expected, 1e-3, 1e-2)
    without = measured(expected)["memory_gib"]
    if not numbers["memory_gib"] < without:
        raise FailedError(f"{numbers['memory_gib']:.2f} GiB, not less than {without:.2f} without it")
    return Found(f"{figure(numbers)} ({without:.2f} without)", numbers | {"memory_gib_without": without})


def plan(setting: Setting) -> Found:
    """The peak of a run on the device, beside the plan of the same command line."""
    from gpu.jobs import compose_config
    from rft.modes.plan.memory_tracker import device_bytes
    from rft.modes.train import memory_by_stage

    options = [*sft("medium"), "strategy=bf16"]
    rows = reference(setting, "medium", options)
    stages = memory_by_stage(compose_config([*options, "strategy.device=cuda"]), 1)
    if stages is None:
        raise FailedError("the plan could not be made")
    planned = max(device_bytes(terms) for terms in stages.values()) / 2**30
    real = measured(rows)["memory_gib"]
    numbers = {"planned_gib": planned, "measured_gib": real}
    if abs(planned / real - 1) > PLAN_ERROR:
        raise FailedError(f"planned {planned:.2f} GiB, measured {real:.2f} GiB")
    return Found(f"planned {planned:.2f} GiB, measured {real:.2f} GiB ({planned / real - 1:+.1%})", numbers)
