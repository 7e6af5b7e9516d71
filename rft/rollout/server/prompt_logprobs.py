"""How servers report the log-probabilities of the tokens of a given text.

All kinds report those of the softmax of the model's logits at temperature 1, whatever temperature a request has.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from rft.registry import Registry
from rft.remote.http_client import ServerClient
from rft.remote.json_values import are_numbers, are_tokens
from rft.remote.server_requests import Call
from rft.rollout import server

ROUNDING = 0.02  # that bfloat16 may add to a sum of probabilities


class Text(NamedTuple):
    """A text, and the position (at least 1) of the first token whose log-probabilities are requested."""

    tokens: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class TokenLogprobs:
    """What a server reports of N tokens of a text.

    Attributes:
        own: (N,) float32, log-probabilities of the tokens themselves.
        ids: (N, K) int32, the most likely tokens at each position, in descending order.
        logprobs: (N, K) float32, of those.

    Raises:
        ValueError: the numbers are not log-probabilities.
    """

    own: Tensor
    ids: Tensor
    logprobs: Tensor

    def __post_init__(self) -> None:
        shares = torch.stack([self.own.exp(), self.logprobs.exp().sum(-1)])
        if not (shares <= 1 + ROUNDING).all():
            raise ValueError("numbers that are not log-probabilities; does it answer with logits?")

    @classmethod
    def of(cls, own: list[float], top: Sequence[Sequence[tuple[int, float]]], count: int) -> "TokenLogprobs":
        """From lists: the log-probability of each token, and pairs (id, log-probability) of the most likely tokens.

        Raises:
            ValueError: their numbers differ from the request.
        """
        if any(len(pairs) != count for pairs in top) or len(own) != len(top):
            raise ValueError(f"{sorted({len(pairs) for pairs in top})} pairs for {len(own)} tokens, not {count} each")
        names, numbers = ([pair[part] for pairs in top for pair in pairs] for part in (0, 1))
        if not are_tokens(names) or not are_numbers([*own, *numbers]):
            raise ValueError("ids that are not those of tokens, or values that are no numbers")
        ids, logprobs = torch.tensor(names, dtype=torch.int32), torch.tensor(numbers, dtype=torch.float32)
        shape = (len(top), count)
        return cls(torch.tensor(own, dtype=torch.float32), ids.view(shape), logprobs.view(shape))

    def lacking(self, following: Tensor, count: int) -> int:
        """How many more tokens a request needs, at least, to return `count` ids that can follow at every position.

        Args:
            following: (V,) bool, the ids that can follow.
        """
        return max(0, count - int(self._follow(following).sum(-1).min()))

    def restrict(self, following: Tensor, count: int) -> "TokenLogprobs":
        """Keeps the `count` most likely tokens that can follow."""
        order = (~self._follow(following)).int().argsort(dim=-1, stable=True)[:, :count]
        return TokenLogprobs(self.own, self.ids.gather(-1, order), self.logprobs.gather(-1, order))

    def _follow(self, following: Tensor) -> Tensor:
        """(N, K) bool: which of `ids` can follow."""
        return (self.ids < len(following)) & following[self.ids.long().clamp(max=len(following) - 1)]


class PromptLogprobs(Protocol):
    """One kind of server.

    Attributes:
        context: tokens of its context, one more than a text may have.
        context_flag: the flag of the server that sets the context.
        count_flag: the flag that limits the tokens per position; None where there is no limit.
    """

    context: int
    context_flag: ClassVar[str]
    count_flag: ClassVar[str | None]

    def call(self, text: Text, count: int) -> Call:
        """The POST for the tokens of a text and the `count` most likely tokens at each position."""
        ...

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """The log-probabilities in a response.

        Raises:
            KeyError, IndexError, TypeError, ValueError: the response is malformed.
        """
        ...

    def detokenized(self, answer: Any) -> str:
        """The text in a response of `/detokenize`."""
        ...


# Classes by `owned_by` in the list of models; each is called with the tokens of the server's context.
PROMPT_LOGPROBS = Registry("kind of server")


@cache
def import_kinds() -> None:
    """Imports every module of this folder. A kind of server registers in its own file, and only that file names it."""
    for module in pkgutil.iter_modules(server.__path__):
        importlib.import_module(f"{server.__name__}.{module.name}")


async def identify(client: ServerClient) -> PromptLogprobs:
    """The kind of a server.

    Raises:
        RequestFailed: the server is not up, or of an unknown kind.
    """
    with client.parse("its list of models"):
        card = (await client.get("/v1/models"))["data"][0]
        kind, context = card["owned_by"], int(card["max_model_len"])
    import_kinds()
    if kind not in (known := PROMPT_LOGPROBS.names()):
        raise client.bad_response(f"its kind is {kind!r}, which is not {' or '.join(known)}")
    found: PromptLogprobs = PROMPT_LOGPROBS.function(kind)(context)
    return found
