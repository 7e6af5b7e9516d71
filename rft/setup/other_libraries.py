"""Options of verl, TRL, OpenRLHF and LightRFT, and what sets them here."""

# An option of this project, and the ends of the keys or flags of verl, TRL, OpenRLHF and LightRFT that it replaces; the
# first that fits counts. docs/elsewhere.md has the differences.
ELSEWHERE = {
    # models
    "actor.path": (".model.path", ".model_name_or_path", ".pretrain"),
    "reward/terms=[model]": (".reward_pretrain",),
    "critic.path": (".critic_pretrain",),
    "actor/lora=lora actor.lora.rank": (".lora_rank", ".lora_r"),
    "actor/lora=lora actor.lora.alpha": (".lora_alpha",),
    "actor/lora=lora actor.path": (".lora_adapter_path",),
    "strategy.activation_checkpointing": (".gradient_checkpointing", ".enable_gradient_checkpointing"),
    "strategy.param_offload": (".param_offload",),
    "strategy.param_offload=all": (".offload_policy",),
    "strategy.optimizer_offload": (".optimizer_offload", ".adam_offload"),
    "strategy.activation_offload": (".enable_activation_offload", ".activation_offloading"),
    "strategy.attention": (".attn_implementation",),
    "actor.packing": (".use_remove_padding", ".packing_samples"),
    "actor.liger": (".use_liger", ".use_liger_kernel"),
    "strategy.tensor_parallel": (".tensor_model_parallel_size", ".ds_tensor_parallel_size"),
    "strategy.expert_parallel": (".expert_model_parallel_size",),
    "strategy.context_parallel": (".context_parallel_size",),
    "strategy.dtype": (".bf16",),
    "rollout.engine_args.dtype": (".rollout.dtype",),
    "strategy": (".zero_stage",),
    # data
    "data=verl data.train.path": (".train_files",),
    "data=verl data.eval.heldout.path": (".val_files",),
    "data=openrlhf data.train.path": (".prompt_data", ".dataset"),
    "data=hub data.path": (".dataset_name",),
    "data.train.columns.prompt": (".input_key", ".prompt_key"),
    "data.train.columns.answer": (".label_key",),
    "data.max_tokens": (".max_length", ".max_len"),
    "data.overlong": (".truncation_mode",),
    "data.max_prompt_tokens": (".max_prompt_length", ".prompt_max_len"),
    "rollout.max_new_tokens": (".max_response_length", ".max_completion_length", ".generate_max_len"),
    "environment.max_turns": (".max_assistant_turns", ".max_tool_calling_iterations"),
    "environment=verl environment.classes.verl.tools": (".tool_config_path",),
    "environment=verl_interaction environment.classes.verl.interactions": (".interaction_config_path",),
    "environment.tool_format": (".multi_turn.format", ".tool_call_parser"),
    "environment=openrlhf environment.classes.openrlhf.path": (".agent_func_path",),
    "data.truncation=drop": (".filter_overlong_prompts",),
    "data.template=chat": (".apply_chat_template",),
    "data.shuffle": (".data.shuffle", ".shuffle_dataset"),
    # sampling
    "algorithm.group_size": (".rollout.n", ".num_generations", ".n_samples_per_prompt"),
    "rollout.temperature": (".temperature",),
    "rollout": (".engine_type",),
    "rollout.staleness": (
        ".staleness_threshold",
        ".max_staleness",
        ".async_enable",
        ".async_train",
        ".async_queue_size",
    ),
    "rollout.engine_args.gpu_memory_utilization": (".gpu_memory_utilization",),
    # steps
    "actor.optimizer.lr": (".learning_rate", ".actor_learning_rate", ".optim.lr"),
    "critic.optimizer.lr": (".critic_learning_rate",),
    "batch.prompts": (".data.train_batch_size", ".rollout_batch_size", ".per_device_train_batch_size"),
    "batch.minibatches": (".train_batch_size", ".ppo_mini_batch_size"),
    "actor.micro_batch_tokens": (
        ".micro_train_batch_size",
        ".gradient_accumulation_steps",
        ".ppo_micro_batch_size_per_gpu",
    ),
    "batch.epochs": (".ppo_epochs", ".num_iterations", ".max_epochs"),
    "steps=null epochs": (".total_epochs", ".num_train_epochs", ".num_episodes"),
    "steps": (".max_steps", ".total_training_steps"),
    # algorithm
    "algorithm": (".adv_estimator", ".advantage_estimator", ".loss_type"),
    "algorithm/loss": (".loss_mode",),
    "algorithm/aggregation": (".loss_agg_mode",),
    "algorithm.loss.clip_low=... algorithm.loss.clip_high": (".clip_ratio", ".epsilon", ".eps_clip"),
    "algorithm.loss.clip_low": (".clip_ratio_low",),
    "algorithm.loss.clip_high": (".clip_ratio_high", ".epsilon_high"),
    '"algorithm/terms=[kl]" algorithm.terms.kl.coef': (".beta", ".kl_loss_coef"),
    '"algorithm/terms=[kl]"': (".use_kl_loss",),
    "algorithm/reward_kl=kl algorithm.reward_kl.coef": (".kl_coef", ".init_kl_coef"),
    '"algorithm/terms=[kl]" algorithm.terms.kl.estimator': (".kl_estimator",),
    "algorithm/gradient_mask=high_entropy algorithm.gradient_mask.rho": (".high_entropy_token_ratio",),
    "algorithm.advantage.scale": (".scale_rewards",),
    "algorithm.advantage_clip": (".advantage_clip",),
    "algorithm/source=dynamic_sampling": (".dynamic_filtering",),
    "algorithm/source=dynamic_sampling_medium algorithm.source.redraw.between": (".dynamic_filtering_reward_range",),
    '"algorithm/terms=[entropy]" algorithm.terms.entropy.coef': (".entropy_coeff",),
    # rewards
    "reward=function reward.terms.function.function": (".custom_reward_function.path", ".reward_funcs"),
    '"reward/terms=[code_server]" reward.accuracy=code_server reward.terms.code_server.address': (
        ".sandbox_fusion.url",
    ),
    '"reward/terms=[remote]" reward.terms.remote.addresses': (".remote_rm_url",),
    "reward.terms.exact_match.weight": (".reward_weights",),
    "reward.terms.model.normalize": (".normalize_reward",),
    "reward.offload=cpu": (".ref_reward_offload",),
    '"algorithm/shaping=[overlong]"': (".overlong_buffer",),
    '"algorithm/shaping=[overlong]" algorithm.shaping.overlong.buffer': (".overlong_buffer_len",),
    '"algorithm/shaping=[overlong]" algorithm.shaping.overlong.factor': (
        ".overlong_buffer_penalty_factor",
        ".overlong_penalty_factor",
    ),
    '"algorithm/shaping=[clip_scores]" algorithm.shaping.clip_scores.high': (".reward_clip", ".reward_clip_range"),
    '"algorithm/shaping=[running_norm]" algorithm.shaping.running_norm.center=false': (".reward_running_norm",),
    '"algorithm/shaping=[running_norm]"': (".reward_running_norm_minus_mean",),
    '"algorithm/shaping=[truncated]" algorithm.shaping.truncated.factor': (".stop_properly_penalty_coef",),
    # the run
    "output_dir": (".default_local_dir", ".save_path"),
    "checkpoint.every": (".save_freq", ".save_steps"),
    "eval.every": (".test_freq", ".eval_steps"),
    "resume": (".resume_mode", ".resume_from_checkpoint", ".resume_from_path"),
    "logger": (".report_to",),
    "logger=wandb": (".use_wandb",),
    "name": (".experiment_name",),
    "torchrun --nproc-per-node": (".n_gpus_per_node",),
    "torchrun --nnodes": (".nnodes",),
}


def elsewhere(key: str) -> str | None:
    """What sets the option of another project here; None for an unknown one.

    Args:
        key: a key of another project (`actor_rollout_ref.rollout.n`), or a flag without dashes.
    """
    dotted = "." + key.replace("-", "_")
    return next((ours for ours, ends in ELSEWHERE.items() if dotted.endswith(ends)), None)
