"""The abstract class of corrections for tokens that were sampled from another policy than the one that trains."""

from abc import ABC, abstractmethod

from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import AllSum
from rft.metrics import Metrics
from rft.registry import Plugin


class TokenCorrection(ABC):
    """Weights and rejections of tokens.

    Attributes:
        anchor: what the rollout policy is compared with, see `CorrectionOptions`.
        reads: columns that the batch must hold.
        weighs: whether some rule gives weights, so that `correction_weights` are not all 1.
        by_ratio: whether a ratio is among them.
    """

    anchor: str
    reads: tuple[str, ...]
    weighs: bool
    by_ratio: bool

    @abstractmethod
    def check(self, loss: Plugin, copied: bool, key: str) -> None:
        """Checks that the correction fits the loss.

        Args:
            copied: the old log-probabilities are those of the rollout policy.
            key: of the algorithm.

        Raises:
            ValueError: names the key and the cure.
        """

    @abstractmethod
    def unsigned(self, logprobs: Tensor, batch: TensorDict, all_sum: AllSum, metrics: Metrics) -> None:
        """Applies the rules without a sign.

        Narrows `loss_mask`; writes `correction_weights` (B, T), 0 outside it, and `rejected` (B,) bool: rows that had
        trained tokens and have none left. `correction/weight` and `correction/weight_max` are the weights before they
        are normalised; `correction/tokens_rejected` and `correction/rows_rejected` shares of what trained before;
        `correction/outside_<rule>` is the share of the tokens outside a rule's bounds.

        Args:
            logprobs: (B, T) of the anchor's policy: old, or the current one without a gradient.
            batch: whole groups of this rank.
        """

    @abstractmethod
    def signed(self, logprobs: Tensor, batch: TensorDict, metrics: Metrics) -> None:
        """Applies the rules with a sign of the advantage, after `advantages` are computed.

        Narrows `loss_mask` and `correction_weights`; both stay as `unsigned` left them where no rule has a sign.
        """
