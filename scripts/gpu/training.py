"""Training by parts: the task, dtypes, float8, attentions, kernels, compiled blocks, offloading, and the plan."""

from functools import partial
from typing import get_args

from gpu.checks import Check, FailedError, Found, Setting
from gpu.jobs import compare, figure, measured, reference, run_job, sft
from rft.actor.packing.kernels.choose import KERNELS
from rft.strategy.attention import FLASH_PACKAGES, flash_package
from rft.strategy.fp8 import Fp8

OFFLOADS = {
    "param": "strategy.param_offload=all",
    "optimizer": "strategy.optimizer_offload=true",
    "activation": "strategy.activation_offload=true",
}
PLAN_ERROR = 0.15  # of the measured peak
LEARNED = 0.5  # accuracy of the default run, whose README has 0.82 and more
GAP = 0.05  # mean difference of log-probabilities of engine and trainer in bfloat16, in nats


def checks() -> list[Check]:
    """The checks of this file."""
    bf16, fp16 = ("strategy=bf16",), ("strategy.dtype=float16",)
    found = [
        Check("task", "the built-in task from end to end", task, rank=1, seconds=300),
        Check("bf16", "training in bfloat16, beside float32", partial(trains, bf16, 2e-2, 1e-1), 2, 150),
        Check("fp16", "training in float16, beside float32", partial(trains, fp16, 1e-2, 5e-2), 3, 150, cuda=True),
        Check("rollout", "sampling with new weights in bfloat16", rollout, rank=4, seconds=150),
        Check("plan", "measured peak memory, beside mode=plan", plan, rank=40, seconds=180, cuda=True),
        Check(
            "liger",
            "the kernels of liger, beside float32",
            partial(trains, ("actor.liger=true",), 1e-3, 1e-2),
            rank=41,
            seconds=150,
            cuda=True,
            package="liger_kernel",
        ),
        Check(
            "compile",
            "compiled blocks, beside float32",
            partial(trains, ("strategy.compile=true",), 1e-3, 1e-2),
            rank=42,
            seconds=240,
            cuda=True,
        ),
    ]
    for name in KERNELS:
        run = partial(trains, (*bf16, f"strategy.attention={name}"), 2e-2, 1e-1)
        title = "packed rows in bfloat16, beside float32"
        package = flash_package() or FLASH_PACKAGES[-1] if name == "flash" else None
        found.append(Check(f"attention:{name}", title, run, 10, 150, cuda=True, package=package))
    for recipe in get_args(Fp8):
        run = partial(trains, (*bf16, f"strategy.fp8={recipe}"), 2e-2, 1e-1)
        title = "float8 layers in bfloat16, beside float32"
        found.append(Check(f"fp8:{recipe}", title, run, 44, 150, cuda=True, package="torchao"))
    for name, option in OFFLOADS.items():
        title = f"{option}, beside none"
        found.append(Check(f"offload:{name}", title, partial(offload, option), rank=43, seconds=150, cuda=True))
    return found


def task(setting: Setting) -> Found:
    """The default run; on a CPU its first steps."""
    rows = run_job(setting.folder, ["warmup.steps=4", "steps=2", "eval.every=0"] if setting.cpu else [])
    accuracy, seconds = rows[-1]["eval/heldout/accuracy"], rows[-1]["time/elapsed_s"]
    if not setting.cpu and accuracy < LEARNED:
        raise FailedError(f"accuracy {accuracy:.2f} at the end, less than {LEARNED}")
    steps = rows[-1]["step"]
    return Found(f"{steps} steps in {seconds:.0f} s, accuracy {accuracy:.2f}", {"seconds": seconds, "steps": steps})


def trains(overrides: tuple[str, ...], loss: float, gradient: float, setting: Setting) -> Found:
    """Supervised training with these options, whose losses must be those of float32 without them."""
    options = sft("tiny" if setting.cpu else "small")
    expected = reference(setting, "float32", options)
    numbers = compare(run_job(setting.folder, [*options, *overrides]), expected, loss, gradient)
    return Found(figure(numbers), numbers)


def rollout(setting: Setting) -> Found:
    """Steps of GRPO in bfloat16: log-probabilities of the engine, beside those of the trainer."""
    rows = run_job(setting.folder, ["strategy=bf16", "warmup.steps=4", "steps=3", "eval.every=0"])
    gap = max(row["rollout/logprob_gap"] for row in rows if "rollout/logprob_gap" in row)
    if not gap < GAP:
        raise FailedError(f"log-probabilities of engine and trainer differ by {gap:.3f}, more than {GAP}")
    return Found(f"log-probabilities of engine and trainer differ by {gap:.1e}", {"logprob_gap": gap})


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
    from gpu.compose import compose_config
    from rft.modes.plan.largest import memory_by_stage
    from rft.modes.plan.memory_tracker import device_bytes

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
