"""The runs that are recorded: each is a short command on the built-in task."""

from collections.abc import Iterable
from dataclasses import dataclass

INPUT = "<input>"  # in an override: the path of the run's input file
PROMPTS = "".join(f'{{"prompt": "reverse {number}="}}\n' for number in range(10, 95, 12))


@dataclass(frozen=True)
class Run:
    """One recorded run.

    Attributes:
        name: the name on the command line and in the table.
        overrides: the arguments after `-m rft.main`. `<run:NAME>` is replaced by the output folder of another run.
        ranks: number of processes.
        needs: the run whose folder it reads, which runs before it.
        within: starts in a copy of the folder of `needs`, uses the model there, and does not train.
        killed: it is killed after its first checkpoint, and the same command resumes it.
        files: the output files that are recorded, as patterns within the output folder.
        input: the text of its input file.
    """

    name: str
    overrides: tuple[str, ...]
    ranks: int = 1
    needs: str | None = None
    within: bool = False
    killed: bool = False
    files: tuple[str, ...] = ("trajectories/*.jsonl", "worst_tokens.jsonl", "result.json")
    input: str | None = None


# An untrained model matches the term `format` sometimes by chance, so that advantages are not zero.
SMALL = (
    "cache=null",
    "strategy.device=cpu",
    "data.train.count=64",
    "data.eval.heldout.count=16",
    "batch.prompts=8",
    "steps=4",
    "eval.every=2",
    "trajectories.every=2",
)
SCORED = ("reward/terms=[exact_match,format]", "reward.accuracy=format", "reward.terms.format.pattern='[0-9].*'")
REWARD = (*SCORED, "reward.terms.format.weight=1.0")
WARM = ("warmup.steps=6", "warmup.rows=16", "warmup.eval_every=3")
SAMPLED = (*SMALL, *REWARD, *WARM, "rollout.max_new_tokens=8", "actor.optimizer.lr=3e-3")
UNTRAINED = (*SMALL, *SCORED, *WARM, "rollout.max_new_tokens=8", "actor.optimizer.lr=3e-3")  # by the scores
GROUPS = (*SAMPLED, "algorithm.group_size=4")
MOVING = ("batch.minibatches=2", "batch.epochs=2")  # ratios move away from 1 within a step
GIVEN = (*SMALL, "data.train.length=[2,6]", "actor.optimizer.lr=3e-3")
LORA = ("actor/lora=lora", "actor.lora.rank=4", "algorithm/terms=[kl]")
# A large eps of AdamW: with a small one, gradients that consist only of rounding errors would change weights.
RANKS = (*SMALL, *REWARD, *WARM, "rollout.max_new_tokens=8", "algorithm.group_size=4", "actor.optimizer.eps=1e-4")
EXPERTS = ("actor.model_config.model_type=mixtral", "+actor.model_config.num_local_experts=4")
PROCESS_MODEL = (
    "reward/terms=[exact_match,format,process_model]",
    "reward.terms.process_model.path=<run:process_reward_model>/checkpoints/latest/actor",
)
TEACHER = "teacher.path=<run:sft_packed>/checkpoints/latest/actor"

RUNS = (
    # The reward of the default: answers of two digits or three, which the warm-up teaches.
    Run(
        "default", (*SMALL, "data.train.length=[2,3]", "warmup.steps=60", "warmup.rows=32", "rollout.max_new_tokens=8")
    ),
    Run("ppo", ("algorithm=ppo", *GROUPS, *MOVING)),
    Run("vapo", ("algorithm=vapo", "algorithm.critic_warmup=1", *GROUPS, *MOVING)),
    Run("pf_ppo", ("algorithm=pf_ppo", *GROUPS, *MOVING)),
    Run("dapo", ("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", *GROUPS, *MOVING)),
    Run("prime", ("algorithm=prime", *GROUPS, "batch.minibatches=2")),
    # Few prompts, so that every prompt is drawn again and old counts are discounted.
    Run("spo", ("algorithm=spo", *SAMPLED, *MOVING, "data.train.count=24", "batch.prompts=16")),
    Run("spin", ("algorithm=spin", "algorithm.iteration=2", *UNTRAINED, "batch.minibatches=2")),
    Run("iterative_dpo", ("algorithm=iterative_dpo", "algorithm.iteration=2", *GROUPS, "batch.minibatches=2")),
    Run("online_dpo", ("algorithm=online_dpo", *GROUPS, "batch.minibatches=2")),
    Run("gvpo", ("algorithm=gvpo", *GROUPS, *MOVING)),
    Run("scale_rl", ("algorithm=scale_rl", *GROUPS, *MOVING)),
    Run("remax", ("algorithm=remax", *GROUPS)),
    Run(
        "reinforce_pp",
        (
            "algorithm=reinforce_pp",
            "algorithm/reward_kl=kl_adaptive",
            "algorithm.reward_kl.coef.horizon=50",
            *GROUPS,
            *MOVING,
        ),
    ),
    Run(
        "grpo_with_parts",
        (
            "algorithm=grpo",
            "algorithm/terms=[kl,entropy]",
            "algorithm/gradient_mask=high_entropy",
            "algorithm/correction=geo_rs_token_tis",
            "rollout.top_p=0.8",  # trainer and engine disagree, so that the correction has an effect
            "algorithm.correction.rules.geo_rs.low=0.808",
            "algorithm.correction.rules.geo_rs.high=1.2",
            "algorithm.correction.rules.token_tis.high=0.817",
            "actor.share_prefix=true",
            "actor.ema=0.9",
            "eval.samples=4",
            *GROUPS,
            *MOVING,
        ),
    ),
    # Correction against the current policy, in every mini-batch.
    Run(
        "reinforce_corrected",
        (
            "algorithm=reinforce",
            "algorithm/correction=token_tis",
            "algorithm.correction.anchor=rollout",
            "algorithm.correction.rules.token_tis.high=0.9",
            "rollout.top_p=0.8",
            *GROUPS,
            *MOVING,
        ),
    ),
    Run("lora", (*LORA, *GROUPS, "batch.minibatches=2")),
    Run("qlora", (*LORA, "actor.lora.quantize=nf4", *GROUPS, "batch.minibatches=2")),
    Run("sft_packed", ("algorithm=sft", *GIVEN, "actor.micro_batch_tokens=64", "steps=8")),
    Run("sft_padded", ("algorithm=sft", *GIVEN, "actor.micro_batch_tokens=64", "actor.packing=false")),
    Run("sft_all_tokens", ("algorithm=sft", *GIVEN, "data.train_on=all")),
    Run("pretrain", ("algorithm=pretrain", *GIVEN)),
    Run("dpo", ("algorithm=dpo", "reference.precompute=true", *GIVEN, *WARM, "batch.minibatches=2")),
    Run("kto", ("algorithm=kto", *GIVEN, *WARM, "batch.minibatches=2")),
    Run("reward_model", ("algorithm=reward_model", *GIVEN)),
    Run("process_reward_model", ("algorithm=process_reward_model", *GIVEN)),
    Run("gkd", ("algorithm=gkd", TEACHER, *SMALL, *SCORED, "rollout.max_new_tokens=8"), needs="sft_packed"),
    Run("on_policy_distill", ("algorithm=on_policy_distill", TEACHER, *SAMPLED, *MOVING), needs="sft_packed"),
    Run(
        "killed_and_resumed", ("algorithm/terms=[kl]", *GROUPS, *MOVING, "checkpoint.every=1", "steps=16"), killed=True
    ),
    Run(
        "generate",
        (
            *("mode=generate", "cache=null", "strategy.device=cpu", "data.train.length=[2,3]"),
            *(f"generate.input={INPUT}", "generate.samples=3", "generate.chunk=3"),
        ),
        needs="default",
        within=True,
        files=("completions.jsonl",),
        input=PROMPTS,
    ),
    Run(
        "evaluate",
        (
            *("mode=evaluate", "cache=null", "strategy.device=cpu", "data.train.length=[2,3]"),
            *("data.eval.heldout.count=16", "eval.samples=4", "eval.maj_k=[1,4]"),
        ),
        needs="default",
        within=True,
        files=("evaluation.json", "answers.jsonl"),
    ),
    Run("images", ("actor=tiny_vision", "data=shapes", *SMALL, *WARM, "algorithm.group_size=4", "batch.minibatches=2")),
    Run("process_rewards", (*GROUPS, *PROCESS_MODEL, "batch.minibatches=2"), needs="process_reward_model"),
    Run("offload", ("algorithm/terms=[kl]", "strategy.param_offload=all", *GROUPS, *MOVING)),
    Run(
        "replay",
        (
            *("mode=replay", "replay.step=64", "algorithm/loss=gspo", *SMALL, "data.train.length=[2,3]"),
            *("warmup.steps=60", "warmup.rows=32", "rollout.max_new_tokens=8"),
        ),
        needs="default",
        within=True,
        files=("replay/*/*.json", "replay/*/*.jsonl"),
    ),
    Run("grpo_two_ranks", ("algorithm/terms=[kl]", *RANKS, "batch.minibatches=2"), ranks=2),
    # Which texts are sampled together depends on time, and so does the rounding: on two ranks, for their tolerance.
    Run(
        "environment",
        (
            *("data=products", "environment=marked_calculator", "actor.tokenizer.alphabet='0123456789*=?'"),
            *(*SMALL, "warmup.steps=60", "algorithm.group_size=4", "actor.optimizer.eps=1e-4", *MOVING),
        ),
        ranks=2,
    ),
    Run("tensor_parallel", ("strategy.tensor_parallel=2", *RANKS, "batch.minibatches=2"), ranks=2),
    Run("expert_parallel", ("strategy.expert_parallel=2", *EXPERTS, *RANKS, "batch.minibatches=2"), ranks=2),
    Run("context_parallel", ("strategy.context_parallel=2", *RANKS, "batch.minibatches=2"), ranks=2),
)


def chosen(only: Iterable[str] = (), runs: Iterable[Run] = RUNS) -> list[Run]:
    """Returns the runs of these names (all if empty) and the runs that they need, each after the run that it needs.

    Raises:
        ValueError: a name is unknown.
    """
    known = {run.name: run for run in runs}
    wanted = list(only)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--only {','.join(unknown)}: no such run (known: {', '.join(known)})")
    kept: dict[str, Run] = {}

    def keep(name: str) -> None:
        if (needed := known[name].needs) is not None:
            keep(needed)
        kept.setdefault(name, known[name])

    for name in wanted or known:
        keep(name)
    return list(kept.values())
