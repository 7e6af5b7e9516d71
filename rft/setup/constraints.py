"""Checks of root keys against each other, and of data against the model. Messages name the yaml key and the cure.

A check raises a ValueError, or yields a message for every mistake. `rft.setup.components` lists what each needs.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from rft.actor.forward.logits import forbidden_tokens, vocabulary_size
from rft.actor.init import CLASSIFIERS
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.batch.encoded import MediaFacts
from rft.data.base import GivenTexts, SourceFacts, given_texts
from rft.data.rows.mixture import Mixture
from rft.errors import did_you_mean, prefixed
from rft.evaluation import generation, loss
from rft.evaluation.base import other_name
from rft.evaluation.preference import PairEvaluator, ScoreEvaluator
from rft.evaluation.process import StepEvaluator
from rft.registry import Target
from rft.reward.compose import WeightedSum
from rft.rollout.answerer import Episodes
from rft.rollout.engine.base import EngineCheckContext
from rft.setup.schema import Batch, Data, Eval, Profile, Rollout, Warmup
from rft.train.stop import seconds_of

UNFIT = r"[/\\\x00-\x1f\ud800-\udfff]"  # in the name of a folder
REWARD = "environment"  # the reward term with the environment's own reward
NO_EPISODES = ("plan", "generate", "chat", "doctor")  # modes that sample single completions
GRADERS: dict[str, type[ScoreEvaluator]] = {"score": PairEvaluator, "step": StepEvaluator}  # by the head of the policy
LONGEST_NAME = 120  # bytes; a folder's name has at most 255, and a sweep appends to it


def check_name(name: str) -> Iterator[str]:
    """Checks that the name of the run can be the name of a folder."""
    if name in ("", ".", "..") or len(name.encode(errors="surrogatepass")) > LONGEST_NAME or re.search(UNFIT, name):
        yield (
            f"name={name!r}: a run folder has this name: choose 1 to {LONGEST_NAME} bytes without slashes; output_dir "
            "sets where the folder is"
        )


def check_folders(output_dir: str, cache: str | None) -> Iterator[str]:
    """Checks that `output_dir` and `cache` name folders."""
    if Path(output_dir).name in ("", "..") or "\0" in output_dir:
        yield f"output_dir={output_dir!r}: name a folder of this run's own, such as outputs/first"
    if cache is not None and ("\0" in cache or not cache.strip()):
        yield f"cache={cache!r}: name a folder, or set cache=null to store no token counts"


def check_time(max_time: str | None) -> None:
    """Raises a ValueError if `max_time` is no duration."""
    if max_time is not None:
        seconds_of(max_time)


def check_batch(batch: Batch, options: AlgorithmOptions) -> Iterator[str]:
    """Checks that mini-batches divide the rows of a step."""
    rows = batch.prompts * options.group_size
    if rows % batch.minibatches:
        yield (
            f"batch.minibatches={batch.minibatches} does not divide the {rows} rows of a step (batch.prompts="
            f"{batch.prompts} x algorithm.group_size={options.group_size}); choose a divisor"
        )


def check_ranks(batch: Batch, ranks: int) -> Iterator[str]:
    """Checks that the prompts of a step divide over the processes."""
    if batch.prompts % ranks:
        yield f"batch.prompts={batch.prompts} does not divide over the {ranks} processes"


def check_eval(evaluation: Eval) -> Iterator[str]:
    """Checks that an evaluation samples the answers that its metrics need."""
    if evaluation.loss and evaluation.samples:
        yield f"eval.samples={evaluation.samples}: with eval.loss=true nothing is sampled; set eval.samples=0"
    for name, wanted in (("pass_k", evaluation.ks()), ("maj_k", evaluation.maj_k)):
        if max(wanted, default=0) > evaluation.samples:
            yield (
                f"eval.{name}={wanted} asks for more answers than eval.samples={evaluation.samples}; set eval.samples "
                f"to at least {max(wanted)}"
            )


def check_vote(evaluation: Eval, reward: WeightedSum) -> Iterator[str]:
    """Checks that there are answers to vote on."""
    if evaluation.maj_k and not reward.extracts:
        yield (
            f"eval.maj_k={evaluation.maj_k}: reward.accuracy={reward.accuracy} does not extract an answer from a "
            "response, so there is none to vote on; set eval.maj_k=[] or choose another accuracy"
        )


def check_epochs(steps: int | None, epochs: float | None, data: Data) -> Iterator[str]:
    """Checks that the run has a length, and one only."""
    if steps is not None and epochs is not None:
        yield f"epochs={epochs:g}: the run has the length steps={steps}; set steps=null, or epochs=null"
    if steps is None and epochs is None:
        yield "steps=null: the run has no length; set steps, or epochs"
    if epochs is not None and data.streaming is not None:
        yield (
            f"epochs={epochs:g}: the rows of a stream are not counted; set steps=<number> epochs=null, or "
            "data.streaming=null"
        )


def check_profile(profile: Profile, steps: int, warmup: Warmup | None) -> Iterator[str]:
    """Checks that the run has every step that is to be profiled."""
    before = warmup.steps if warmup is not None else 0
    last = before + steps
    if impossible := [step for step in profile.steps if not 1 <= step <= last]:
        yield (
            f"profile.steps={impossible}: the steps of this run are 1 to {last} (warmup.steps={before}, then steps="
            f"{steps}); choose among them"
        )


def held_out_texts(evaluation: Eval, source: Target, facts: SourceFacts) -> GivenTexts | None:
    """What makes the batches of held-out texts; None if their loss is not evaluated."""
    if not evaluation.loss:
        return None
    if facts.sampled != "never":
        raise ValueError(
            "eval.loss=true: the engine samples texts that train, so held-out rows alone have no loss; set "
            "eval.loss=false, which scores answers to held-out prompts"
        )
    return given_texts(source.factory, source.options)


def metrics_of_run(
    data: Data,
    evaluation: Eval,
    reward: WeightedSum,
    grader: type[ScoreEvaluator] | None,
    given: GivenTexts | None,
    algorithm: Algorithm,
) -> list[str]:
    """The metrics of the run's evaluations, the main one first; without held-out sets, the loss of training."""
    if given is not None:
        names = loss.metric_names(algorithm)
    elif grader is not None:
        names = list(grader.metrics)
    else:
        wanted = (evaluation.samples, evaluation.ks(), evaluation.maj_k)
        names = generation.metric_names(reward.names, reward.accuracy, *wanted)
    found = [f"eval/{name}/{number}" for name in data.held_out() for number in names]
    return found or [f"loss/{algorithm.policy.terms[0].name}"]


def choose_metric(metric: str | None, known: list[str]) -> str:
    """The metric that the run returns: the one that is named, or the first one.

    Args:
        known: the metrics of the run.

    Raises:
        ValueError: the run has no such metric, under neither of its names.
    """
    if metric is None:
        return known[0]
    if metric not in known and other_name(metric) not in known:
        raise ValueError(
            f"metric={metric}: the run has no such metric{did_you_mean(metric, known)} (known: {', '.join(known)})"
        )
    return metric


def check_stop(warmup: Warmup | None, metric: str) -> Iterator[str]:
    """Checks that the warm-up measures the metric that ends it early."""
    if warmup is not None and warmup.stop_at is not None and not metric.startswith("eval/"):
        yield f"warmup.stop_at={warmup.stop_at}: no held-out set of data.eval is evaluated; set warmup.stop_at=null"


def check_mixtures(held_out: Mapping[str, Target]) -> Iterator[str]:
    """Checks that only `data.train` is a mixture."""
    for target in held_out.values():
        if target.factory is Mixture:
            yield (
                f"{target.key}: an evaluation uses all rows of a set, so the weights of a mixture have no effect; give "
                "each part of the mixture its own name under data.eval"
            )


def check_forbidden(
    engine: Target, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, media: MediaFacts | None
) -> None:
    """Checks that the engine can forbid all ids that cannot follow; see `forbidden_tokens`."""
    most = engine.factory.facts.most_forbidden
    forbidden = forbidden_tokens(config.get_text_config().vocab_size, tokenizer, media)
    if most is not None and len(forbidden) > most:
        raise ValueError(
            f"actor.path: {len(forbidden):,} ids of the model have no token or stand for media, and "
            f"{engine.factory.__name__} forbids at most {most:,}; set rollout=hf, or give the model "
            f"{vocabulary_size(tokenizer):,} rows with resize_token_embeddings of transformers and save it"
        )


def check_engine(rollout: Rollout, engine: Target, actor: Target, processor: Target | None, strategy: Target) -> None:
    """Checks the options of the engine, how it samples, and that it takes the arguments of `rollout.engine_args`."""
    if rollout.engine_args and not engine.factory.facts.takes_arguments:
        name = sorted(rollout.engine_args)[0]
        raise ValueError(
            f"rollout.engine_args.{name}: {engine.factory.__name__} takes no arguments of an engine; choose another "
            "rollout or take it out"
        )
    device, lora = strategy.options.device_name(), actor.options.lora
    engine.options.check(EngineCheckContext(rollout.engine_args, lora, processor is not None, device, rollout))
    with prefixed("rollout."):
        engine.factory.check_sampling(rollout, logprobs=True)


def check_media(processor: Target | None, engine: Target, facts: SourceFacts, generates: bool) -> None:
    """Checks that the engine samples from prompts with media, if it samples and the policy takes media."""
    if processor is not None and (facts.sampled != "never" or generates) and not engine.factory.facts.takes_media:
        raise ValueError(
            f"actor.processor: {engine.factory.__name__} samples from prompts of text alone; set rollout=hf, or "
            "actor/processor=none"
        )


def check_environments(
    environments: Episodes | None,
    facts: SourceFacts,
    reward: WeightedSum,
    algorithm: Algorithm,
    processor: Target | None,
    mode: str,
) -> Iterator[str]:
    """Checks that the run can answer with episodes, and that a reward of the environment has an environment."""
    own = REWARD in reward.names
    if environments is None:
        if own:
            yield f"reward.terms.{REWARD}: the run has no environment whose reward it could be; choose an environment"
        return
    if own and not environments.scores:
        yield f"reward.terms.{REWARD}: a class of environment.classes has no get_reward; add it, or remove the term"
    if own and algorithm.options.turn_rewards is not None:
        yield (
            f"algorithm.turn_rewards: the score has the rewards of all turns already, by reward.terms.{REWARD}; choose "
            "another reward, or set algorithm.turn_rewards=null"
        )
    if facts.sampled != "never" and not facts.episodes:
        yield "environment: this source runs no episodes; choose algorithm/source=rollout, or environment=none"
    if processor is not None:
        yield "environment: dialogues have no media yet; set actor/processor=none, or environment=none"
    if reward.canary.path is not None:
        yield "environment: canary tasks are answered without it; set reward.canary.path=null, or environment=none"
    if mode in NO_EPISODES:
        yield f"environment: mode={mode} runs no episodes; set environment=none"
    if environments.several_players:
        yield from _compared_players(algorithm)


def _compared_players(algorithm: Algorithm) -> Iterator[str]:
    """Refuses comparisons of the samples of a prompt, which are different players of games."""
    advantage, pick = algorithm.advantage, algorithm.selection
    said = "compares the samples of a prompt, which are different players in a game of environment.classes; choose"
    if advantage is not None and (advantage.facts.group_baseline or "greedy_scores" in advantage.facts.reads):
        yield f"algorithm.advantage={advantage.name}: it {said} algorithm/advantage=rae"
    if pick.facts.groups:
        yield f"algorithm.pick={pick.name}: it {said} algorithm.pick=all"


def check_eval_sampling(rollout: Rollout, evaluation: Eval, engine: Target) -> None:
    """Checks that the engine can draw the sampled answers of an evaluation."""
    if evaluation.samples:
        with prefixed("eval."):
            engine.factory.check_sampling(evaluation.sampling(rollout), logprobs=False)


def check_head(
    actor: Target, engine: Target, algorithms: Mapping[str, Algorithm], facts: SourceFacts, generates: bool
) -> Iterator[str]:
    """Checks that the policy has the head that its losses train, and that the engine samples only from a language head.

    Args:
        algorithms: of the stages, by their keys.
        facts: of the source of batches.
        generates: the policy answers held-out prompts.
    """
    head = actor.options.head
    for key, algorithm in algorithms.items():
        if (loss := algorithm.policy.terms[0].plugin).facts.head != head:
            yield (
                f"{key}.loss: {loss.name!r} trains the head {loss.facts.head!r}, but actor.head={head}; choose another "
                "loss, or another actor/head"
            )
    samples, scores = engine.factory.facts.samples, head in CLASSIFIERS
    if samples and scores:
        yield f"actor.head={head}: a model with this head cannot generate text; choose rollout=none"
    if not samples and not scores and facts.sampled != "never":
        yield "rollout=none: no engine samples the texts that train; choose rollout=hf"
    elif not samples and generates:
        yield (
            "rollout=none: no engine samples answers to the prompts of data.eval; choose rollout=hf, or eval.loss=true "
            "for the loss of held-out texts"
        )
    if scores and actor.options.lora is not None:
        yield f"actor.lora: adapters do not train the head of actor.head={head}; set actor.lora=null"


def check_lengths(key: str, counts: ArrayLike, model_config: PretrainedConfig, new_tokens: int) -> None:
    """Checks that each prompt and a response of the maximal length fit into the model's context.

    Args:
        counts: tokens of each prompt of the set of that key.
    """
    context = model_config.get_text_config().max_position_embeddings
    longest, most = int(np.argmax(counts)), int(np.max(counts))
    if most + new_tokens > context:
        raise ValueError(
            f"{key}: the prompt of row {longest + 1} has {most} tokens; with rollout.max_new_tokens="
            f"{new_tokens} that is over the model's context of {context}; lower rollout.max_new_tokens, take the row "
            "out or choose a model with a longer context"
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig) -> None:
    """Checks that a checkpoint restores the tokenizer that it was saved with.

    For some architectures `AutoTokenizer` loads another class than the one that was saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        model_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if loaded.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"actor.model_config.model_type={model_config.model_type}: for this type transformers would load a "
            f"{type(loaded).__name__} instead of this tokenizer; choose another type, such as qwen3 or llama"
        )
