"""The protocol of ranks that compute one sequence together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel


class Context(ABC):
    """The ranks that compute one sequence together, this one among them.

    Attributes:
        rank: of this process in its group.
        size: ranks of a group.
        key: the yaml key that sets the size.
        gathers_in_attention: attention receives slices and exchanges tokens for heads.
    """

    key: ClassVar[str]
    gathers_in_attention: ClassVar[bool]
    rank: int
    size: int

    @abstractmethod
    def check_model(self, config: PretrainedConfig, packing: bool, key: str) -> None:
        """Checks that the ranks of a group can compute the rows of a model together.

        Raises:
            ValueError: names the key.
        """

    def check_layers(self, meta_model: Callable[[], PreTrainedModel], key: str) -> None:
        """Checks that the ranks of a group can split the layers of a model, if they do; raises as `check_model`.

        Args:
            meta_model: makes the model with this yaml key on the meta device.
        """

    def split_layers(self, backbone: PreTrainedModel, key: str) -> None:
        """Splits the layers of the backbone of a model among the ranks of a group, in place, if they do."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of weights that every rank of a group holds whole, if each has computed a part of them."""

    @abstractmethod
    def gather(self, thing: Any) -> list[Any]:
        """The objects of all ranks of the group, in the order of their ranks, on every rank of it."""

    @abstractmethod
    def all_to_all_heads(self, states: Tensor, counts: Sequence[int], to: Literal["heads", "tokens"]) -> Tensor:
        """Exchanges tokens for heads over the group, or heads for tokens. Differentiable.

        Args:
            states: with `to="heads"` this rank's tokens of all heads, (1, H, n, D); with `to="tokens"` all tokens of
                its heads, (1, H / size, N, D).
            counts: tokens of every rank.
            to: what this rank receives: all tokens of its heads, (1, H / size, N, D), or its tokens of all heads,
                (1, H, n, D).
        """
