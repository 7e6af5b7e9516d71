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
        "rft/remote/server_requests.py",
        "rft/remote/json_values.py",
        "rft/remote/process_supervisor.py",
        "rft/remote/server_process.py",
        "rft/modes/serve",
    ),
    "CUDA graphs": ("rft/rollout/engine/decoding/cuda_graphs.py",),
    "HTTP": ("rft/remote/http_client.py", "rft/remote/http_server.py"),
    "split models": ("rft/strategy/parallel", "rft/actor/packing/sequence_shard.py"),
    "kernels": (
        "rft/actor/packing/kernels/device_test.py",
        "rft/actor/packing/kernels/flex.py",
        "rft/actor/packing/kernels/rows.py",
        "rft/actor/packing/recurrent.py",
        "rft/actor/forward/liger.py",
    ),
    "optimizers beside AdamW": ("rft/actor/optim/adamw_8bit.py", "rft/actor/optim/muon.py"),
    "average of the weights": ("rft/actor/optim/ema.py",),
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
    "offloads, float8 and checkpointing": ("rft/strategy/offload", "rft/strategy/fp8.py", "rft/strategy/blocks.py"),
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
    "strict JSON": ("rft/data/strict_json.py",),
    "rows of files": (
        "rft/data/encode/stream_limits.py",
        "rft/data/rows/files.py",
        "rft/data/rows/schemas.py",
        "rft/data/rows/sources.py",
        "rft/data/rows/stream.py",
        "rft/data/rows/text_files.py",
    ),
    "rows of scored answers": ("rft/data/rows/scored.py",),
    "rows of mixtures": ("rft/data/rows/mixture.py",),
    "rows of a split": ("rft/data/rows/split.py",),
    "rows of judges": ("rft/data/rows/judge_data.py",),
    "preferences": ("rft/data/given/pairs.py", "rft/evaluation/preference.py"),
    "labelled steps": ("rft/data/given/steps.py", "rft/evaluation/process.py"),
    "loss of held-out texts": ("rft/evaluation/loss.py",),
    "several answers to held-out prompts": ("rft/evaluation/estimators.py",),
    "canary tasks": ("rft/evaluation/canary.py",),
    "tool calls": ("rft/data/tool_calls", "rft/reward/rules/tool_calls.py", "rft/rollout/kept_marks.py"),
    "rules": ("rft/reward/rules/*.py", "rft/reward/rules/*/"),
    "reward functions of a file": ("rft/reward/function.py",),
    "rewards by data source": ("rft/reward/source_routes.py",),
    "reward terms that wait": ("rft/reward/async_runners.py",),
    "worker processes of rewards": ("rft/reward/workers.py",),
    "worker processes": ("rft/worker/child_process.py", "rft/worker/worker.py"),
    "event loop": ("rft/remote/event_loop.py",),
    "sandbox": ("rft/reward/sandbox",),
    "reward models": ("rft/reward/models", "rft/reward/services/judge_server.py"),
    "reward services": (
        "rft/reward/services",
        "rft/reward/serving",
        "rft/remote/call_pool.py",
        "rft/modes/serve",
    ),
    "asynchronous rollout": ("rft/rollout/schedule",),
    "forced stop": ("rft/rollout/interruption.py",),
    "dynamic sampling": ("rft/rollout/source/dynamic_sampling.py",),
    "sources of self-play, mixed batches and curricula": (
        "rft/rollout/source/curriculum.py",
        "rft/rollout/source/mixed.py",
        "rft/rollout/source/self_play.py",
    ),
    "chat templates": ("rft/data/encode/masks.py", "rft/data/encode/templates.py"),
    "images, sounds and video": ("rft/data/encode/media", "rft/data/encode/processors.py"),
    "tasks of images and sounds": ("rft/data/encode/tasks",),
    "advantages": (
        "rft/algorithm/advantage/baselines.py",
        "rft/algorithm/advantage/objectives.py",
        "rft/algorithm/advantage/returns.py",
        "rft/algorithm/advantage/tracker.py",
        "rft/algorithm/advantage/turns.py",
    ),
    "trajectories of several rows": ("rft/algorithm/joined_trajectories.py",),
    "policy losses and gradient masks": (
        "rft/algorithm/loss/clip_variants.py",
        "rft/algorithm/loss/sequence.py",
        "rft/algorithm/loss/soft.py",
        "rft/algorithm/order_statistics.py",
        "rft/algorithm/token_weights/gradient_mask.py",
    ),
    "losses of preferences, rewards and teachers": (
        "rft/algorithm/loss/distillation.py",
        "rft/algorithm/loss/preference.py",
        "rft/algorithm/loss/reward_model.py",
    ),
    "terms of losses": ("rft/algorithm/loss/terms.py",),
    "corrections": ("rft/algorithm/token_weights/correction.py",),
    "shapings and selections": ("rft/algorithm/scores/selections.py", "rft/algorithm/scores/shaping.py"),
    "stored weights": ("rft/setup/stored_weights.py",),
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
# The parts that a part imports: where one of these is taken out, it is taken out, too.
NEEDS: dict[str, tuple[str, ...]] = {
    "LoRA": ("average of the weights",),
    "builtin environments": ("rows of files",),
    "canary tasks": ("images, sounds and video", "rows of files"),
    "chat templates": ("strict JSON",),
    "environments": (
        "chat templates",
        "event loop",
        "strict JSON",
        "tool calls",
        "worker processes",
    ),
    "gateway": ("HTTP",),
    "mode=chat": ("models of modes",),
    "mode=evaluate": (
        "images, sounds and video",
        "models of modes",
        "rows of files",
        "several answers to held-out prompts",
    ),
    "mode=generate": ("images, sounds and video", "models of modes", "rows of files"),
    "mode=plan": ("precomputed reference",),
    "mode=serve": ("HTTP", "models of modes"),
    "mode=verify": ("models of modes",),
    "reward models": (
        "images, sounds and video",
        "models that score",
        "models with media",
        "rows of judges",
        "rules",
    ),
    "reward services": ("HTTP", "reward functions of a file", "reward terms that wait", "strict JSON"),
    "reward terms that wait": ("event loop",),
    "rows of files": ("images, sounds and video", "strict JSON"),
    "rows of judges": ("preferences",),
    "rows of packages": ("rows of files", "worker processes"),
    "rows of scored answers": ("rows of files",),
    "rules": ("strict JSON",),
    "sandbox": ("HTTP", "reward functions of a file", "worker processes", "worker processes of rewards"),
    "tool calls": ("strict JSON",),
    "vLLM and servers": ("HTTP", "event loop", "images, sounds and video"),
    "worker processes of rewards": ("reward terms that wait", "worker processes"),
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
