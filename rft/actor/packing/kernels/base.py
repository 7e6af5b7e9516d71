"""The protocol of kernels: attention of one layer over packed rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rft.actor.packing.layout import Segments


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


SavedStates = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # query, key and value; what `attend_forward` returned


class AttentionKernel(ABC):
    """Attention over packed rows.

    Attributes:
        implementation: its name among transformers' attention functions.
        opaque: in a compiled block it is one operator (`operator.py`); otherwise the block has a graph break there.
        keeps_lse: `attend_forward` returns the log-sum-exp of the products.
    """

    implementation: ClassVar[str]
    opaque: ClassVar[bool] = True
    keeps_lse: ClassVar[bool] = False

    def refuses(self, needs: AttentionNeeds) -> str | None:
        """What of a model's needs the kernel cannot compute, or None."""
        return None

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
        """Every row attends to itself causally, and to the prefix that its group shares. Differentiable.

        Args:
            query: (1, heads, N, width) of the packed sequence; key, value: of as many or fewer heads.
            segments: of the sequence.
            rule: of the layer.

        Returns:
            (1, N, heads, width of the values).
        """

    def attend_forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
    ) -> tuple[Tensor, Tensor]:
        """The result of `attend`, and the log-sum-exp (heads, N) in float32; (heads, 0) where it is not kept."""
        return self.attend(query, key, value, segments, rule), query.new_empty(query.shape[1], 0, dtype=torch.float32)

    def attend_backward(
        self, gradient: Tensor, states: SavedStates, segments: Segments, rule: AttentionRule
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of query, key, value and sinks; a kernel that keeps nothing computes its forward again.

        Args:
            gradient: of the result (1, N, heads, width of the values).
            states: of the forward.
        """
        query, key, value, *_ = states

        def again(query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
            return self.attend(query, key, value, segments, replace(rule, sinks=sinks[0] if sinks else None))

        sinks = () if rule.sinks is None else (rule.sinks,)
        pull: Any = torch.func.vjp(again, query, key, value, *sinks)[1]  # inside an operator autograd itself is off
        gradients = pull(gradient)
        return gradients[0], gradients[1], gradients[2], gradients[3] if sinks else None
