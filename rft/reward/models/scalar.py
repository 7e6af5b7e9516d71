"""The score of a reward model: a sequence classifier of transformers, as `algorithm=reward_model` exports it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rft.actor.score_moments import ScoreMoments, read_moments
from rft.batch.encoded import EncodedText
from rft.reward.models.base import ClassifierOptions, ClassifierTerm


@dataclass(frozen=True)
class RewardModelOptions(ClassifierOptions):
    """The options of a sequence classifier with one label.

    Attributes:
        normalize: a score is less the mean and divided by the deviation that the model's config.json holds, or by
            these; false leaves it as it is.
    """

    normalize: bool | ScoreMoments


class RewardModel(ClassifierTerm):
    """Scores a prompt with its response and the end token, encoded as in training."""

    Options = RewardModelOptions
    options: RewardModelOptions
    head = "score"

    def _check_config(self) -> None:
        super()._check_config()
        self._moments()

    @torch.no_grad()
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        def encode() -> list[EncodedText]:
            return [
                self._encoder.example({**row, "response": response})[0]
                for response, row in zip(responses, rows, strict=True)
            ]

        scores = [float(logits[0]) for logits in self._outputs(encode)]
        moments = self._moments()
        return scores if moments is None else [moments.normalize(score) for score in scores]

    def _moments(self) -> ScoreMoments | None:
        """The mean and deviation that are applied; None: none."""
        normalize, path = self.options.normalize, self.options.path
        if isinstance(normalize, ScoreMoments):
            return normalize
        if not normalize:
            return None
        key = f"{self._key}.normalize=true"
        if (moments := read_moments(self._config, f"{key}: config.json of {path}")) is None:
            raise ValueError(
                f"{key}: config.json of {path} has no mean and std, which a run with actor.head=score and a "
                f"held-out set saves; give them as {self._key}.normalize={{mean: <number>, std: <number>}}"
            )
        return moments
