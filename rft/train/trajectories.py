"""Sampled texts that a run keeps for people."""

from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from rft.batch.columns import fields
from rft.batch.entries import EPISODE, EPISODE_FIELD, UNSCORED, UNSCORED_FIELD
from rft.batch.scores import number_or_none
from rft.evaluation.base import term_scores
from rft.ranges import NonNegativeInt, PositiveInt
from rft.reward.route import SOURCE

KEPT = {SOURCE: SOURCE, EPISODE_FIELD: EPISODE, UNSCORED_FIELD: UNSCORED}  # fields of a row, by their names in a line


@dataclass
class Trajectories:
    """Sampled texts that are kept: of every n-th step, this many rows of each set."""

    every: PositiveInt
    rows: NonNegativeInt


def sampled_texts(batch: TensorDict, rows: int) -> list[dict[str, Any]]:
    """The first rows of a sampled batch as people read them; nothing where the texts were given."""
    if "scores" not in batch.keys():
        return []
    return [
        {"set": "train", "prompt": row["prompt"], "response": row["text"], "score": number_or_none(float(score))}
        | term_scores({name: float(value) for name, value in terms.items()})
        | {name: row[field] for field, name in KEPT.items() if field in row}
        for row, score, terms in zip(fields(batch[:rows]), batch["scores"][:rows], batch["terms"][:rows], strict=True)
    ]
