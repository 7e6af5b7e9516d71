"""The parts of the package, and their files."""

from pathlib import Path

# What a yaml chooses, by `_target_`, by name or by an option, and can be taken out: the rest imports, composes and
# trains without it.
# A part has its files and those that are built on it, so a file may be of several parts; a folder has all below it.
PARTS = {
    "vLLM and servers": (
        "rft/rollout/engine/vllm*.py",
        "rft/rollout/engine/expanded.py",
        "rft/rollout/engine/model_folder.py",
        "rft/rollout/server",
        "rft/remote/load_balancer.py",
        "rft/remote/json_values.py",
        "rft/remote/process_supervisor.py",
        "rft/remote/server_process.py",
        "rft/modes/serve",
    ),
    "HTTP": ("rft/remote/http_client.py", "rft/remote/http_server.py"),
    "split models": ("rft/strategy/parallel", "rft/actor/packing/sequence_shard.py"),
    "kernels of attention": (
        "rft/actor/packing/kernels/device_test.py",
        "rft/actor/packing/kernels/flex.py",
        "rft/actor/packing/kernels/rows.py",
    ),
    "optimizers beside AdamW": ("rft/actor/optim/adamw_8bit.py", "rft/actor/optim/muon.py"),
    "average of the weights": ("rft/actor/optim/ema.py",),
    "Liger": ("rft/actor/forward/liger.py",),
    "linear attention": ("rft/actor/packing/recurrent.py",),
    "patterns of parameters": ("rft/actor/patterns.py",),
    "models with media": ("rft/actor/forward/media.py", "rft/report/media.py"),
    "models that score": ("rft/actor/scorers.py",),
    "balance of experts": ("rft/actor/forward/routers.py",),
    "updates that are skipped": ("rft/train/skipped.py",),
    "several ranks": ("rft/remote/watchdog.py",),
    "LoRA": (
        "rft/actor/lora/adapters.py",
        "rft/actor/lora/nf4.py",
        "rft/actor/lora/reference.py",
        "rft/actor/lora/stored.py",
    ),
    "precomputed reference": ("rft/actor/reference.py", "rft/train/precompute.py"),
    "GGUF": ("rft/actor/loading/gguf.py", "rft/actor/loading/gguf_facts.py"),
    "offloads": ("rft/strategy/offload",),
    "float8": ("rft/strategy/fp8.py",),
    "activation checkpointing": ("rft/strategy/blocks.py",),
    "environments": ("rft/rollout/environment", "rft/report/dialogue.py"),
    "comparison of runs": ("rft/report/comparison.py", "rft/report/seeds.py"),
    "adapters of environments": ("rft/rollout/environment/adapters",),
    "builtin environments": ("rft/rollout/environment/builtin",),
    "gateway": ("rft/rollout/environment/gateway",),
    "rows of packages": (
        "rft/data/rows/packages",
        "rft/reward/rules/reasoning_gym.py",
        "rft/rollout/environment/adapters/verifiers*.py",
    ),
    "rules": ("rft/reward/rules/*.py", "rft/reward/rules/*/"),
    "sandbox": ("rft/reward/sandbox",),
    "reward models": ("rft/reward/models", "rft/reward/services/judge_server.py"),
    "reward services": (
        "rft/reward/services",
        "rft/reward/serving",
        "rft/remote/call_pool.py",
        "rft/modes/serve",
    ),
    "sources of self-play, mixed batches and curricula": (
        "rft/rollout/source/curriculum.py",
        "rft/rollout/source/mixed.py",
        "rft/rollout/source/self_play.py",
    ),
    "tasks of images and sounds": ("rft/data/encode/tasks",),
    "loggers of services": (
        "rft/logger/service.py",
        "rft/logger/mlflow.py",
        "rft/logger/swanlab.py",
        "rft/logger/tensorboard.py",
        "rft/logger/trackio.py",
        "rft/logger/wandb.py",
    ),
    "models of modes": ("rft/modes/model.py",),
    "mode=chat": ("rft/modes/chat.py",),
    "mode=doctor": ("rft/modes/doctor",),
    "mode=evaluate": ("rft/modes/evaluate.py", "rft/evaluation/given.py", "rft/evaluation/responses.py"),
    "mode=generate": ("rft/modes/generate.py",),
    "mode=inspect": ("rft/modes/inspect.py",),
    "mode=plan": ("rft/modes/plan",),
    "mode=replay": ("rft/modes/replay",),
    "mode=serve": ("rft/modes/serve",),
    "mode=verify": ("rft/modes/verify*.py", "rft/algorithm/certificate", "rft/reward/certificate"),
}
# The parts that a part imports: where one of these is taken out, it is, too.
NEEDS: dict[str, tuple[str, ...]] = {
    "reward models": ("models that score", "models with media"),
    "LoRA": ("average of the weights",),
    "mode=plan": ("precomputed reference",),
    "vLLM and servers": ("HTTP",),
    "gateway": ("HTTP",),
    "sandbox": ("HTTP",),
    "reward services": ("HTTP",),
    "mode=chat": ("models of modes",),
    "mode=evaluate": ("models of modes",),
    "mode=generate": ("models of modes",),
    "mode=serve": ("models of modes", "HTTP"),
    "mode=verify": ("models of modes",),
}
# In the folder of a part, and of none: what the default run chooses, and options that every config has.
OF_EVERY_RUN = (
    "rft/reward/rules/__init__.py",  # registers the rules that are there
    "rft/reward/rules/text.py",  # the rule exact_match
    "rft/reward/sandbox/options.py",  # the node reward.call.sandbox
)


def files_of_parts(root: Path) -> dict[str, set[Path]]:
    """The Python files of each part."""
    kept = {root / name for name in OF_EVERY_RUN}
    found = {}
    for part, patterns in PARTS.items():
        places = [place for pattern in patterns for place in root.glob(pattern)]
        files = [[place] if place.is_file() else place.rglob("*.py") for place in places]
        found[part] = {file for some in files for file in some} - kept
    return found
