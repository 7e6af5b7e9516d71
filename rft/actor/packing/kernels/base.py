"""The protocol of kernels: attention of one layer over packed rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rft.actor.packing.layout import PackedSegment


@dataclass(frozen=True)
class AttentionRule:
    """How a layer attends.

    Attributes:
        scaling: of the products, or None for 1 / sqrt(width).
        window: a token sees at most so many, itself included; None for all.
        softcap: bound of the products (Gemma 2, 2408.00118, section 2), or None.
        sinks: (heads,) the logit of one more key of each head, without a value (gpt-oss, 2508.10925), or None.
    """

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True)
class AttentionNeeds:
    """What the layers of a model ask of a kernel.

    Attributes:
        softcap: some layer bounds its products.
        sinks: some layer has sinks.
        windows: some layer has a window.
        width: the largest width of a head, of queries or values.
        heads, key_heads: of a layer.
    """

    softcap: bool
    sinks: bool
    windows: bool
    width: int
    heads: int
    key_heads: int

    @classmethod
    def of(cls, calls: Iterable[tuple[Tensor, Tensor, Tensor, AttentionRule]]) -> "AttentionNeeds":
        """The needs of a forward: queries, keys and values (1, heads, N, width) and the rule of each layer."""
        calls = list(calls)
        query, key, *_ = calls[0]
        return cls(
            softcap=any(rule.softcap is not None for *_, rule in calls),
            sinks=any(rule.sinks is not None for *_, rule in calls),
            windows=any(rule.window is not None for *_, rule in calls),
            width=max(max(q.shape[3], v.shape[3]) for q, _, v, _ in calls),
            heads=query.shape[1],
            key_heads=key.shape[1],
        )


class AttentionKernel(ABC):
    """Attention over packed rows.

    Attributes:
        implementation: its name among transformers' attention functions.
    """

    implementation: ClassVar[str]

    def refuses(self, needs: AttentionNeeds) -> str | None:
        """What of a model's needs the kernel cannot compute, or None."""
        return None

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, segments: tuple[PackedSegment, ...], rule: AttentionRule
    ) -> Tensor:
        """Every row attends to itself causally, and to the prefix that its group shares. Differentiable.

        Args:
            query: (1, heads, N, width) of the packed sequence; key, value: of as many or fewer heads.
            segments: of the sequence.
            rule: of the layer.

        Returns:
            (1, N, heads, width of the values).
        """
