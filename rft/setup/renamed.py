"""Renamed keys, groups and options, and options of verl, TRL and OpenRLHF: the error names the key of this package."""

import re
from collections.abc import Mapping
from typing import Any

KEYS = {
    "data.trains": "data.train_on",
    "after": "depends_on",
    "environment.tool_calls": "environment.tool_format",
    "environment.tool_calls.name": "environment.tool_format",
    "algorithm.resample_power": "algorithm.pick={name: resample, power: <number>}",
    "reward.terms.judge_server.address": "reward.terms.judge_server.addresses=[<address>]",
    **{
        f"reward.terms.{term}.tag": f"reward.terms.{term}.format=<hermes, list or another format>"
        for term in ("tool_call", "tool_call_valid")
    },
    **{
        f"reward.terms.judge_server.{option}": f"reward.terms.judge_server.call.{option}"
        for option in ("concurrency", "deadline_s", "tries")
    },
}
VALUES = {"resume": {True: "auto", False: "never"}}
GROUPS = {
    "rollout/sampling": "the keys of rollout itself, such as rollout.temperature",
    "rollout/engine/servers": "the keys of rollout.engine.servers",
    **{f"actor@{role}": f"the group {role}, as in {role}={role}" for role in ("reference", "critic", "prm")},
    "actor@teacher": "the group teacher, as in teacher=teacher_server",
}
OPTIONS = {
    "algorithm/source=partly_sampled": "algorithm/source=mixed",
    "algorithm/source=retiring": "algorithm/source=drop_solved",
    "algorithm/source=dynamic": "algorithm/source=dynamic_sampling",
    "algorithm/source=dynamic_middle": "algorithm/source=dynamic_sampling_medium",
    "rollout/first_token=hot": "rollout/first_token=high_temperature",
    **{f"actor={role}": f"{role}={role}, a group of its own" for role in ("reference", "critic", "prm", "teacher")},
    "actor=teacher_server": "teacher=teacher_server, a group of its own",
}

# The end of a key or flag of verl, TRL, OpenRLHF or LightRFT: what sets it here. docs/elsewhere.md has the differences.
ELSEWHERE = {
    # models
    ".model.path": "actor.path",
    ".model_name_or_path": "actor.path",
    ".pretrain": "actor.path",
    ".reward_pretrain": "reward/terms=[model]",
    ".critic_pretrain": "critic.path",
    ".lora_rank": "actor/lora=lora actor.lora.rank",
    ".lora_r": "actor/lora=lora actor.lora.rank",
    ".lora_alpha": "actor/lora=lora actor.lora.alpha",
    ".lora_adapter_path": "actor/lora=lora actor.path",
    ".gradient_checkpointing": "strategy.activation_checkpointing",
    ".enable_gradient_checkpointing": "strategy.activation_checkpointing",
    ".param_offload": "strategy.param_offload",
    ".offload_policy": "strategy.param_offload=all",
    ".optimizer_offload": "strategy.optimizer_offload",
    ".adam_offload": "strategy.optimizer_offload",
    ".enable_activation_offload": "strategy.activation_offload",
    ".activation_offloading": "strategy.activation_offload",
    ".attn_implementation": "strategy.attention",
    ".use_remove_padding": "actor.packing",
    ".packing_samples": "actor.packing",
    ".use_liger": "actor.liger",
    ".use_liger_kernel": "actor.liger",
    ".tensor_model_parallel_size": "strategy.tensor_parallel",
    ".ds_tensor_parallel_size": "strategy.tensor_parallel",
    ".expert_model_parallel_size": "strategy.expert_parallel",
    ".context_parallel_size": "strategy.context_parallel",
    ".bf16": "strategy.dtype",
    ".rollout.dtype": "rollout.engine_args.dtype",
    ".zero_stage": "strategy",
    # data
    ".train_files": "data=verl data.train.path",
    ".val_files": "data=verl data.eval.heldout.path",
    ".prompt_data": "data=openrlhf data.train.path",
    ".dataset_name": "data=hub data.path",
    ".dataset": "data=openrlhf data.train.path",
    ".input_key": "data.train.columns.prompt",
    ".prompt_key": "data.train.columns.prompt",
    ".label_key": "data.train.columns.answer",
    ".max_length": "data.max_tokens",
    ".max_len": "data.max_tokens",
    ".truncation_mode": "data.overlong",
    ".max_prompt_length": "data.max_prompt_tokens",
    ".prompt_max_len": "data.max_prompt_tokens",
    ".max_response_length": "rollout.max_new_tokens",
    ".max_completion_length": "rollout.max_new_tokens",
    ".generate_max_len": "rollout.max_new_tokens",
    ".max_assistant_turns": "environment.max_turns",
    ".max_tool_calling_iterations": "environment.max_turns",
    ".tool_config_path": "environment=verl environment.classes.verl.tools",
    ".interaction_config_path": "environment=verl_interaction environment.classes.verl.interactions",
    ".multi_turn.format": "environment.tool_format",
    ".tool_call_parser": "environment.tool_format",
    ".agent_func_path": "environment=openrlhf environment.classes.openrlhf.path",
    ".filter_overlong_prompts": "data.truncation=drop",
    ".apply_chat_template": "data.template=chat",
    ".data.shuffle": "data.shuffle",
    ".shuffle_dataset": "data.shuffle",
    # sampling
    ".rollout.n": "algorithm.group_size",
    ".temperature": "rollout.temperature",
    ".engine_type": "rollout",
    ".num_generations": "algorithm.group_size",
    ".n_samples_per_prompt": "algorithm.group_size",
    ".gpu_memory_utilization": "rollout.engine_args.gpu_memory_utilization",
    # steps
    ".learning_rate": "actor.optimizer.lr",
    ".actor_learning_rate": "actor.optimizer.lr",
    ".critic_learning_rate": "critic.optimizer.lr",
    ".optim.lr": "actor.optimizer.lr",
    ".data.train_batch_size": "batch.prompts",
    ".train_batch_size": "batch.minibatches",
    ".rollout_batch_size": "batch.prompts",
    ".ppo_mini_batch_size": "batch.minibatches",
    ".per_device_train_batch_size": "batch.prompts",
    ".micro_train_batch_size": "actor.micro_batch_tokens",
    ".gradient_accumulation_steps": "actor.micro_batch_tokens",
    ".ppo_micro_batch_size_per_gpu": "actor.micro_batch_tokens",
    ".ppo_epochs": "batch.epochs",
    ".num_iterations": "batch.epochs",
    ".max_epochs": "batch.epochs",
    ".total_epochs": "steps=null epochs",
    ".num_train_epochs": "steps=null epochs",
    ".num_episodes": "steps=null epochs",
    ".max_steps": "steps",
    ".total_training_steps": "steps",
    # algorithm
    ".adv_estimator": "algorithm",
    ".advantage_estimator": "algorithm",
    ".loss_type": "algorithm",
    ".loss_mode": "algorithm/loss",
    ".loss_agg_mode": "algorithm/aggregation",
    ".clip_ratio": "algorithm.loss.clip_low=... algorithm.loss.clip_high",
    ".epsilon": "algorithm.loss.clip_low=... algorithm.loss.clip_high",
    ".eps_clip": "algorithm.loss.clip_low=... algorithm.loss.clip_high",
    ".clip_ratio_low": "algorithm.loss.clip_low",
    ".clip_ratio_high": "algorithm.loss.clip_high",
    ".epsilon_high": "algorithm.loss.clip_high",
    ".beta": '"algorithm/terms=[kl]" algorithm.terms.kl.coef',
    ".use_kl_loss": '"algorithm/terms=[kl]"',
    ".kl_loss_coef": '"algorithm/terms=[kl]" algorithm.terms.kl.coef',
    ".kl_coef": "algorithm/reward_kl=kl algorithm.reward_kl.coef",
    ".init_kl_coef": "algorithm/reward_kl=kl algorithm.reward_kl.coef",
    ".kl_estimator": '"algorithm/terms=[kl]" algorithm.terms.kl.estimator',
    ".high_entropy_token_ratio": "algorithm/gradient_mask=high_entropy algorithm.gradient_mask.rho",
    ".scale_rewards": "algorithm.advantage.scale",
    ".advantage_clip": "algorithm.advantage_clip",
    ".dynamic_filtering": "algorithm/source=dynamic_sampling",
    ".dynamic_filtering_reward_range": "algorithm/source=dynamic_sampling_medium algorithm.source.redraw.between",
    ".entropy_coeff": '"algorithm/terms=[entropy]" algorithm.terms.entropy.coef',
    # rewards
    ".custom_reward_function.path": "reward=function reward.terms.function.function",
    ".sandbox_fusion.url": '"reward/terms=[code_server]" reward.accuracy=code_server reward.terms.code_server.address',
    ".reward_funcs": "reward=function reward.terms.function.function",
    ".remote_rm_url": '"reward/terms=[remote]" reward.terms.remote.addresses',
    ".reward_weights": "reward.terms.exact_match.weight",
    ".normalize_reward": "reward.terms.model.normalize",
    ".ref_reward_offload": "reward.offload=cpu",
    ".overlong_buffer": '"algorithm/shaping=[overlong]"',
    ".overlong_buffer_len": '"algorithm/shaping=[overlong]" algorithm.shaping.overlong.buffer',
    ".overlong_buffer_penalty_factor": '"algorithm/shaping=[overlong]" algorithm.shaping.overlong.factor',
    ".overlong_penalty_factor": '"algorithm/shaping=[overlong]" algorithm.shaping.overlong.factor',
    ".reward_clip": '"algorithm/shaping=[clip_scores]" algorithm.shaping.clip_scores.high',
    ".reward_clip_range": '"algorithm/shaping=[clip_scores]" algorithm.shaping.clip_scores.high',
    ".reward_running_norm": '"algorithm/shaping=[running_norm]" algorithm.shaping.running_norm.center=false',
    ".reward_running_norm_minus_mean": '"algorithm/shaping=[running_norm]"',
    ".stop_properly_penalty_coef": '"algorithm/shaping=[truncated]" algorithm.shaping.truncated.factor',
    # the run
    ".default_local_dir": "output_dir",
    ".save_path": "output_dir",
    ".save_freq": "checkpoint.every",
    ".save_steps": "checkpoint.every",
    ".test_freq": "eval.every",
    ".eval_steps": "eval.every",
    ".resume_mode": "resume",
    ".resume_from_checkpoint": "resume",
    ".resume_from_path": "resume",
    ".report_to": "logger",
    ".use_wandb": "logger=wandb",
    ".experiment_name": "name",
    ".n_gpus_per_node": "torchrun --nproc-per-node",
    ".nnodes": "torchrun --nnodes",
}


def elsewhere(key: str) -> str | None:
    """What sets the option of another project here; None for an unknown one.

    Args:
        key: a key of another project (`actor_rollout_ref.rollout.n`), or a flag without dashes.
    """
    dotted = "." + key.replace("-", "_")
    return next((ours for end, ours in ELSEWHERE.items() if dotted.endswith(end)), None)


def renamed_key(key: str) -> str | None:
    """The message for an old key, or for one below it; None for any other."""
    for old, new in KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return f"{key}: {old} is called {new} now"
    return None


def renamed_group(group: str) -> str | None:
    """The message for a group that is gone; None for any other.

    Args:
        group: as the command line writes it, with its package ("actor@teacher") where it has one.
    """
    return f"{group}: this group was removed; use {GROUPS[group]}" if group in GROUPS else None


def renamed_option(group: str, option: str) -> str | None:
    """The message for an old option of a group; None for any other."""
    chosen = f"{group}={option}"
    if group == "algorithm/correction" and (found := re.fullmatch(r"bypass_(\w+)", option)):
        return f"{chosen} is algorithm/correction={found[1]} algorithm.correction.anchor=rollout now"
    return f"{chosen} is called {OPTIONS[chosen]} now" if chosen in OPTIONS else None


def renamed_keys(config: Mapping[str, Any]) -> list[str]:
    """The message for every old key, and for every old value of a root key, in a resolved config."""
    found = []
    for old in KEYS:
        node: Any = config
        for name in old.split("."):
            node = node[name] if isinstance(node, Mapping) and name in node else None
        if node is not None:
            found.append(f"{old}: it is called {KEYS[old]} now")
    for key, values in VALUES.items():
        if isinstance(value := config.get(key), bool):
            found.append(f"{key}={str(value).lower()} is {key}={values[value]} now")
    return found
