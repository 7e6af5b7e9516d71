"""How the servers of vLLM and SGLang are asked what their model makes of a text that is there.

Both tell log-probabilities of the softmax of the model's logits at temperature 1, whatever a request says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from rft.remote.http_client import ServerClient
from rft.rollout.server.server_api import Call

ROUNDING = 0.02  # that bfloat16 may add to probabilities


class Text(NamedTuple):
    """A text that is there, and the place of the first token of which something is to be known, at least 1."""

    tokens: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class TokenLogprobs:
    """What a server says of N tokens of a text.

    Attributes:
        own: (N,) float32 log-probabilities of the tokens themselves.
        ids: (N, K) int32, the likeliest tokens in the place of each, the likeliest first.
        logprobs: (N, K) float32, of those.

    Raises:
        ValueError: these are no log-probabilities.
    """

    own: Tensor
    ids: Tensor
    logprobs: Tensor

    def __post_init__(self) -> None:
        shares = torch.stack([self.own.exp(), self.logprobs.exp().sum(-1)])
        if not (shares <= 1 + ROUNDING).all():
            raise ValueError("log-probabilities that are none; does it answer with logits?")

    @classmethod
    def of(cls, own: list[float], top: Sequence[Sequence[tuple[int, float]]], count: int) -> "TokenLogprobs":
        """From plain numbers: of each token its own, and the likeliest ones with theirs.

        Raises:
            ValueError: they are not as many as were asked for.
        """
        if any(len(pairs) != count for pairs in top) or len(own) != len(top):
            raise ValueError(f"of {len(own)} tokens {sorted({len(pairs) for pairs in top})} others, not {count}")
        ids = torch.tensor([name for pairs in top for name, _ in pairs], dtype=torch.int32)
        logprobs = torch.tensor([number for pairs in top for _, number in pairs], dtype=torch.float32)
        return cls(torch.tensor(own), ids.view(len(top), count), logprobs.view(len(top), count))

    def lacking(self, known: int, count: int) -> int:
        """How many more than those that are told of it takes, at least, to have `count` of the first `known` tokens."""
        return max(0, count - int((self.ids < known).sum(-1).min()))

    def among(self, known: int, count: int) -> "TokenLogprobs":
        """The `count` likeliest of the first `known` tokens alone."""
        order = (self.ids >= known).int().argsort(dim=-1, stable=True)[:, :count]
        return TokenLogprobs(self.own, self.ids.gather(-1, order), self.logprobs.gather(-1, order))


class PromptLogprobs(Protocol):
    """One kind of server.

    Attributes:
        context: tokens of its context, one more than a text may have.
        context_flag: that a server is started with to have a longer one.
        count_flag: that it is started with to tell of more tokens; None where it has no limit.
    """

    context: int
    context_flag: ClassVar[str]
    count_flag: ClassVar[str | None]

    def call(self, text: Text, count: int) -> Call:
        """Asks for the tokens of a text, and in the place of each for the `count` likeliest."""
        ...

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """What an answer says. May raise KeyError, IndexError, TypeError and ValueError: it is garbage."""
        ...

    def spelt(self, answer: Any) -> str:
        """The text in an answer to `/detokenize`."""
        ...


@dataclass
class VLLMPromptLogprobs:
    """vLLM's server: `prompt_logprobs` of its completions. It reads no cached prefix for them."""

    context: int
    context_flag: ClassVar = "--max-model-len"
    count_flag: ClassVar[str | None] = "--max-logprobs"

    def call(self, text: Text, count: int) -> Call:
        """It tells of every token of the text."""
        body = {"prompt": text.tokens, "prompt_logprobs": count, "max_tokens": 1, "temperature": 1.0}
        return Call("/v1/completions", body)

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """Of a place there are the likeliest, with ranks from 1 on, and the token itself, whose rank may be any."""
        [choice] = answer["choices"]
        own, top = [], []
        pairs = zip(text.tokens, choice["prompt_logprobs"], strict=True)
        for token, others in list(pairs)[text.first :]:
            own.append(others[str(token)]["logprob"])
            ranks = {entry["rank"]: (int(name), entry["logprob"]) for name, entry in others.items()}
            top.append([ranks[rank] for rank in range(1, count + 1)])
        return TokenLogprobs.of(own, top, count)

    def spelt(self, answer: Any) -> str:
        """As it calls what it would be asked to complete."""
        return str(answer["prompt"])


@dataclass
class SGLangPromptLogprobs:
    """SGLang's server: the log-probabilities of the input that its own endpoint gives."""

    context: int
    context_flag: ClassVar = "--context-length"
    count_flag: ClassVar[str | None] = None

    def call(self, text: Text, count: int) -> Call:
        """What comes before the first token may be in its cache."""
        how = {"return_logprob": True, "logprob_start_len": text.first - 1, "top_logprobs_num": count}
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        return Call("/generate", {"input_ids": text.tokens, "sampling_params": sampling, **how})

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """Of the token in front of the first one nothing is said. Ids are not compared: it calls the last one 0."""
        about = answer["meta_info"]
        own = [number for number, *_ in about["input_token_logprobs"][1:]]
        if len(own) != len(text.tokens) - text.first:
            raise ValueError(f"it tells of {len(own)} tokens, not of {len(text.tokens) - text.first}")
        said = about["input_top_logprobs"][1:] if count else [[]] * len(own)
        return TokenLogprobs.of(own, [[(name, number) for number, name, *_ in others] for others in said], count)

    def spelt(self, answer: Any) -> str:
        """The text."""
        return str(answer["text"])


KINDS: dict[str, Callable[[int], PromptLogprobs]] = {
    "vllm": VLLMPromptLogprobs,
    "sglang": SGLangPromptLogprobs,
}  # by who owns their models


async def wait_until_up(peer: ServerClient) -> PromptLogprobs:
    """Asks a server what it is.

    Raises:
        Failed: it is not up, or of another kind.
    """
    with peer.parse("what it serves"):
        card = (await peer.get("/v1/models"))["data"][0]
        kind, context = card["owned_by"], int(card["max_model_len"])
    if kind not in KINDS:
        raise peer.bad_response(f"it calls itself {kind!r}, and is no server of {' or '.join(KINDS)}")
    return KINDS[kind](context)
