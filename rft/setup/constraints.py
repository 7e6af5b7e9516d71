"""What can be said against a config before a model is loaded. Every function raises a ValueError with key and cure."""

import tempfile
from operator import attrgetter
from typing import Any

from transformers import CONFIG_MAPPING, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from rft.actor.init import CLASSIFIERS
from rft.actor.lora.adapters import Lora
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.algorithm.roles import ROLES
from rft.batch.columns import check_columns
from rft.data.base import SourceFacts
from rft.data.rows.mixture import Mixture
from rft.errors import Checks
from rft.registry import Target, did_you_mean
from rft.setup.schema import Rollout, Run

COUNTS = (
    "steps",
    "batch.prompts",
    "batch.minibatches",
    "batch.epochs",
    "algorithm.group_size",
    "rollout.max_new_tokens",
    "trajectories.every",
)


def check_numbers(run: Run, algorithm: Algorithm) -> None:
    """Numbers that no signature can check alone."""
    check = Checks()
    for key in COUNTS:
        with check():
            if (number := attrgetter(key)(run)) < 1:
                raise ValueError(f"{key}={number}: set it to 1 or more")
    with check():
        if run.rollout.temperature <= 0 or (run.eval.samples and run.eval.temperature <= 0):
            key = "rollout.temperature" if run.rollout.temperature <= 0 else "eval.temperature"
            raise ValueError(f"{key}: samples need a temperature above 0; the greedy evaluation needs no setting")
    with check():
        rows, parts = run.batch.prompts * run.algorithm.group_size, run.batch.minibatches
        if parts > 0 and rows % parts:
            raise ValueError(
                f"batch.minibatches={parts} does not divide the {rows} rows of a step (batch.prompts="
                f"{run.batch.prompts} x algorithm.group_size={run.algorithm.group_size}); choose a divisor"
            )
    with check():
        if run.algorithm.critic_warmup >= run.steps > 0:
            raise ValueError(
                f"algorithm.critic_warmup={run.algorithm.critic_warmup}: the policy would train in none of the steps="
                f"{run.steps}; raise steps or lower algorithm.critic_warmup"
            )
    with check():
        if (
            algorithm.advantage is not None
            and algorithm.advantage.facts.group_baseline
            and run.algorithm.group_size == 1
        ):
            raise ValueError(
                f"algorithm.group_size={run.algorithm.group_size}: the advantage {algorithm.advantage.name!r} compares "
                "the rows of a group and is 0 for a group of one; set algorithm.group_size to 2 or more, or choose "
                "another algorithm/advantage"
            )
    for name, wanted, dummy in (("pass_k", run.eval.pass_k, run.eval.samples == 0), ("maj_k", run.eval.maj_k, False)):
        with check():
            if min(wanted, default=1) < 1:
                raise ValueError(f"eval.{name}={wanted}: a number of answers is 1 or more")
            if max(wanted, default=0) > run.eval.samples and not dummy:
                raise ValueError(
                    f"eval.{name}={wanted} asks for more answers than eval.samples={run.eval.samples}; set "
                    f"eval.samples to at least {max(wanted)}"
                )
    check.end()


def check_profile(run: Run) -> None:
    """The run can come to every step that is to be profiled."""
    warmup = run.warmup.steps if run.warmup is not None else 0
    last = warmup + run.steps
    if impossible := [step for step in run.profile.steps if not 1 <= step <= last]:
        raise ValueError(
            f"profile.steps={impossible}: the steps of this run are 1 to {last} (warmup.steps={warmup}, then steps="
            f"{run.steps}); choose among them"
        )


def check_metric(run: Run, metrics: list[str]) -> None:
    """The metric that the run returns is one that it will have.

    Args:
        metrics: of each held-out set.
    """
    known = [f"eval/{name}/{number}" for name in run.data.eval for number in metrics]
    if run.metric not in known:
        raise ValueError(
            f"metric={run.metric}: the run has no such number{did_you_mean(run.metric, known)} (there are: "
            f"{', '.join(known)})"
        )


def check_mixtures(held_out: dict[str, Target]) -> None:
    """Only `data.train` may be a mixture."""
    for target in held_out.values():
        if target.factory is Mixture:
            raise ValueError(
                f"{target.key}: an evaluation has all rows of a set, whatever their weights; give each part of the "
                "mixture a name of its own under data.eval"
            )


def check_engine(rollout: Rollout, engine: Target, lora: Lora | None) -> None:
    """The engine can do what is asked of it, and there is one to take the arguments that are meant for it.

    Args:
        lora: the policy's.
    """
    if rollout.engine_args and not engine.factory.facts.takes_arguments:
        name = sorted(rollout.engine_args)[0]
        raise ValueError(
            f"rollout.engine_args.{name}: {engine.factory.__name__} takes no arguments of an engine; choose another "
            "rollout or take it out"
        )
    engine.factory.check(engine.options | {"engine_args": rollout.engine_args, "lora": lora}, rollout)


def check_head(options: dict[str, Any], algorithms: dict[str, Algorithm], engine: Any) -> None:
    """The policy has the head that its losses train, and one that only gives scores is asked for nothing else.

    Args:
        options: of the policy.
        methods: of the stages, by their keys.
        engine: its class.
    """
    check, head = Checks(), options["head"]
    for key, algorithm in algorithms.items():
        with check():
            if (loss := algorithm.policy.terms[0].plugin).facts.head != head:
                raise ValueError(
                    f"{key}.loss: {loss.name!r} trains the head {loss.facts.head!r}, but actor.head={head}; choose "
                    "another loss, or another actor/head"
                )
    samples, scores = engine.facts.samples, head in CLASSIFIERS
    with check():
        if samples and scores:
            raise ValueError(f"actor.head={head}: such a model writes no text; choose rollout=none")
    with check():
        if not samples and not scores:
            raise ValueError("rollout=none: nothing would answer the prompts of data.eval; choose rollout=hf")
    if scores:
        with check():
            if options["lora"] is not None:
                raise ValueError(
                    f"actor.lora: adapters do not train the head of actor.head={head}; set actor.lora=null"
                )
    check.end()


def check_flow(run: Run, algorithm: Algorithm, source: SourceFacts) -> None:
    """Every column that a step reads has one writer before it.

    Args:
        source: of the batches.
    """
    reads = algorithm.reads()
    copied = run.algorithm.old_logprobs == "rollout"
    stages: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("algorithm.source", (), (*source.writes, *(name for name in source.writes_if_read if name in reads))),
        ("algorithm.mask_truncated", ("response_mask", "truncated"), ("loss_mask",)),
    ]
    if algorithm.selection.facts.groups:
        stages.append(("algorithm.pick", ("scores", "group", "unit"), algorithm.selection.facts.writes))
    if "old_logprobs" in reads:
        stages.append(
            ("algorithm.old_logprobs", ("rollout_logprobs" if copied else "tokens",), ("old_logprobs",)),
        )
    if "sum_p_squared" in reads:
        stages.append(("actor", ("tokens",), ("sum_p_squared",)))
    for role in ROLES:
        if role.key in algorithm.learners and not role.writes(reads):
            raise ValueError(
                f"algorithm.{role.loss} trains the {role.key}, but nothing reads its {', '.join(role.columns)}; choose "
                f"an algorithm/advantage that does or algorithm/{role.loss}=none"
            )
        if columns := role.writes(reads):
            if role.loss is not None and role.key not in algorithm.learners:
                raise ValueError(
                    f"something reads {', '.join(columns)}, but algorithm.{role.loss} is null, so nothing would train "
                    f"the {role.key}; choose an option of algorithm/{role.loss}"
                )
            stages.append((role.key, ("tokens",), tuple(columns)))
    check_columns([*stages, *algorithm.stages()])


def check_reference(
    options: AlgorithmOptions, algorithm: Algorithm, sampled: bool, precompute: bool, copied: bool
) -> None:
    """A reference whose weights change, or that samples, is a copy of the policy; a precomputed one does neither.

    Args:
        options: of the algorithm.
        sampled: whether batches are sampled, at least some of them.
        precompute: the option of the reference.
        copied: the reference starts as a copy of the policy.
    """
    check, moves, samples = Checks(), options.iteration > 0, options.sampler == "reference"
    with check():
        if samples and not sampled:
            raise ValueError(
                "algorithm.sampler=reference: algorithm.source samples nothing; set algorithm.sampler=actor"
            )
    with check():
        if (moves or samples) and not copied:
            raise ValueError(
                f"algorithm.iteration={options.iteration}, algorithm.sampler={options.sampler}: the reference is to be "
                "a copy of the policy, but reference names another model than actor; leave reference.path and "
                "reference.model_config as they are, or set algorithm.iteration=0 and algorithm.sampler=actor"
            )
    reasons = {
        "nothing reads ref_logprobs": "ref_logprobs" not in algorithm.reads(),
        "algorithm.source samples, so no row comes again": sampled,
        f"algorithm.iteration={options.iteration} moves it": moves,
    }
    with check():
        if precompute and (found := [reason for reason, holds in reasons.items() if holds]):
            raise ValueError(f"reference.precompute=true: {found[0]}; set reference.precompute=false")
    check.end()


def check_adapters(actors: dict[str, dict[str, Any]]) -> None:
    """Adapters are where they can train and be saved, and a reference that is the policy's model is run as it is.

    Args:
        actors: the options of every actor, by its key.
    """
    policy, frozen = actors["actor"], [r.key for r in ROLES if r.loss is None and r.follows and r.key in actors]
    for key, options in actors.items():
        if options["lora"] is not None:
            options["lora"].check(key, options["path"], options["optimizer"] is not None)
    if policy["lora"] is None:
        return
    for key in frozen:
        shared = actors[key].keys() - {"lora", "optimizer", "frozen", "ema"}
        own = [name for name in actors[key] if name in shared and actors[key][name] != policy[name]]
        if own and not {"path", "model_config"} & set(own):
            raise ValueError(
                f"{key}.{own[0]}={actors[key][own[0]]}: with actor.lora the {key} is computed by the actor, with its "
                f"{own[0]}={policy[own[0]]}; leave it at ${{actor.{own[0]}}}, or set {key}.path to another model"
            )


def check_training(options: dict[str, Any], key: str) -> None:
    """Weights are frozen where others train, and averaged where the average is of use.

    Args:
        options: of the actor with this key.
    """
    frozen, ema = options["frozen"], options["ema"]
    if frozen and options["optimizer"] is None:
        raise ValueError(f"{key}.frozen={frozen}: the {key} never trains; set {key}.frozen=[]")
    if frozen and options["lora"] is not None:
        raise ValueError(
            f"{key}.frozen={frozen}: with {key}.lora no weight of the model itself trains; choose the layers by "
            f"{key}.lora.targets and set {key}.frozen=[]"
        )
    if ema is not None and key != "actor":
        raise ValueError(f"{key}.ema={ema}: checkpoints hold the average of the actor alone; set {key}.ema=null")
    if ema is not None and not 0 < ema < 1:
        raise ValueError(f"{key}.ema={ema}: it is the part of the average that stays, above 0 and below 1, or null")


def check_packing(options: dict[str, Any], key: str) -> None:
    """A forward takes tokens, and rows that share some are packed.

    Args:
        options: of the actor with this key.
    """
    if options["micro_batch_tokens"] < 1:
        raise ValueError(f"{key}.micro_batch_tokens={options['micro_batch_tokens']}: set it to 1 or more")
    if options["share_prefix"] and not options["packing"]:
        raise ValueError(f"{key}.share_prefix=true: padded rows cannot share tokens; set its packing=true as well")


def check_architecture(model_config: dict[str, Any] | None, key: str) -> None:
    """No option of a new model is misspelt: transformers takes any name and ignores those that it does not know."""
    if model_config is None:
        return
    if "model_type" not in model_config:
        raise ValueError(f"{key}: expected a transformers config as {{model_type: ..., options}}, got {model_config!r}")
    kind = model_config["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"{key}.model_type={kind}: transformers has no such type{did_you_mean(kind, CONFIG_MAPPING)}")
    architecture = CONFIG_MAPPING[kind]
    known = {*architecture().to_dict(), *architecture.attribute_map, "attn_implementation"}
    for name in model_config:
        if name not in known:
            raise ValueError(f"{key}.{name}: a {kind} has no such option{did_you_mean(name, known)}")


def check_lengths(key: str, counts: list[int], shape: PretrainedConfig, new_tokens: int) -> None:
    """No prompt leaves less room in the model's context than a response may take.

    Args:
        counts: tokens of each prompt of the set of that key.
    """
    context = shape.get_text_config().max_position_embeddings
    longest = max(range(len(counts)), key=lambda number: counts[number])
    if counts[longest] + new_tokens > context:
        raise ValueError(
            f"{key}: the prompt of row {longest} has {counts[longest]} tokens; with rollout.max_new_tokens="
            f"{new_tokens} that is over the model's context of {context}; lower rollout.max_new_tokens, take the row "
            "out or choose a model with a longer context"
        )


def check_examples(counts: list[int], context: int) -> None:
    """No given text is longer than the model's context.

    Args:
        counts: tokens of each row.
        context: of the model.
    """
    if max(counts) > context:
        raise ValueError(
            f"data.train: the longest row has {max(counts)} tokens, over the model's context of {context}; take out "
            "what is too long (mode=inspect counts it) or choose a model with a longer context"
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, shape: PretrainedConfig) -> None:
    """A checkpoint would give back the tokenizer that it was written with.

    Beside the config of some architectures `AutoTokenizer` takes another class than the one that was saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder)
    if loaded.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"actor.model_config.model_type={shape.model_type}: beside such a model transformers would load a "
            f"{type(loaded).__name__} in place of this tokenizer; choose another type, such as qwen3 or llama"
        )
