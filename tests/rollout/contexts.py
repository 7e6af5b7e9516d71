"""What a run gives to sources that sample."""

import dataclasses
from typing import Any

from rft.batch.scores import Scores, ScoringAtEnd
from rft.batch.thoughts import PromptThoughts
from rft.distributed import World
from rft.modes.plan.stubs import StubTokenizer
from rft.rollout.answerer import SingleTurn
from rft.rollout.engine.base import EngineCheckContext
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.base import RolloutContext
from tests.data.contexts import source_context
from tests.helpers import yaml_options

NO_THOUGHTS = PromptThoughts(StubTokenizer(1))  # of encoders without a tokenizer


def sampling_of_yaml(**changes: Any) -> Sampling:
    """How the yaml of the group `rollout` samples; its other keys are of the run."""
    names = {field.name for field in dataclasses.fields(Sampling)}
    given = {
        name: value for name, value in yaml_options("rollout/_base.yaml", max_new_tokens=24).items() if name in names
    }
    return Sampling(**given | {"first_token": None, "max_new_tokens": 24} | changes)


def engine_check_context(sampling: Any, **changes: Any) -> EngineCheckContext:
    """A run of a model of text without adapters, on a CPU."""
    run = {"engine_args": {}, "lora": None, "media": False, "device": "cpu"}
    return EngineCheckContext(**{**run, "sampling": sampling, **changes})


def rollout_context(
    world: World,
    sampler: Any,
    encoder: Any,
    rows: Any,
    prompts: int,
    group_size: int,
    sampling: Any,
    seed: int,
    **changes: Any,
) -> RolloutContext:
    """What a source that samples is given; nothing scores and no policy computes."""
    shared = vars(source_context(world, encoder, rows, prompts, seed))
    answerer = SingleTurn(encoder, sampler)
    own = {
        "sampler": sampler,
        "answerer": answerer,
        "group_size": group_size,
        "sampling": sampling,
        "scoring": None,
        "logprobs": None,
    }
    if (score := changes.pop("score", None)) is not None:
        own["scoring"] = plain_scoring(score)
    return RolloutContext(**{**shared, **own, **changes})


def plain_scoring(score: Any) -> Any:
    """Begins the scoring by a function of texts and rows that returns (total, terms)."""
    return lambda: ScoringAtEnd(lambda texts, rows: Scores.plain(*score(texts, rows)))
