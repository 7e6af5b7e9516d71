"""The mean and the deviation of the scores of a reward model, which its config.json keeps."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig

from rft.ranges import PositiveFloat
from rft.registry import convert

NAMES = ("mean", "std")  # in config.json, as OpenRLHF names them


@dataclass(frozen=True)
class ScoreMoments:
    """What scores are normalised by.

    Attributes:
        mean: of the scores.
        std: their standard deviation (n - 1).
    """

    mean: float
    std: PositiveFloat

    def normalize(self, score: float) -> float:
        """The score in deviations above the mean."""
        return (score - self.mean) / self.std


def score_moments(scores: Tensor) -> ScoreMoments:
    """The moments of N scores (N,), computed in float64."""
    return ScoreMoments(float(scores.double().mean()), float(scores.double().std()))


def read_moments(config: PretrainedConfig, where: str) -> ScoreMoments | None:
    """The moments in a model's config; None where it has none.

    Args:
        where: names the config, for messages.

    Raises:
        ValueError: they are no finite numbers, or the deviation is not above 0.
    """
    options = config.to_dict()
    moments = {name: options[name] for name in NAMES if name in options}
    return convert(moments, ScoreMoments, where) if moments else None


def forget_moments(config: PretrainedConfig) -> None:
    """Takes the moments out of the config of a model that trains: its scores will be others."""
    for name in NAMES:
        vars(config).pop(name, None)
