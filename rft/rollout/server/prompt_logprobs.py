"""How the servers of vLLM and SGLang report the log-probabilities of the tokens of a given text.

Both report those of the softmax of the model's logits at temperature 1, whatever temperature a request has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from rft.remote.http_client import ServerClient
from rft.remote.requests import Call

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
        ids = torch.tensor([name for pairs in top for name, _ in pairs], dtype=torch.int32)
        logprobs = torch.tensor([number for pairs in top for _, number in pairs], dtype=torch.float32)
        return cls(torch.tensor(own), ids.view(len(top), count), logprobs.view(len(top), count))

    def lacking(self, known: int, count: int) -> int:
        """How many more tokens a request needs, at least, to return `count` ids below `known` at every position."""
        return max(0, count - int((self.ids < known).sum(-1).min()))

    def restrict(self, known: int, count: int) -> "TokenLogprobs":
        """Keeps the `count` most likely tokens with ids below `known`."""
        order = (self.ids >= known).int().argsort(dim=-1, stable=True)[:, :count]
        return TokenLogprobs(self.own, self.ids.gather(-1, order), self.logprobs.gather(-1, order))


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


@dataclass
class VLLMPromptLogprobs:
    """vLLM's server: `prompt_logprobs` of its completions, which do not use cached prefixes."""

    context: int
    context_flag: ClassVar = "--max-model-len"
    count_flag: ClassVar[str | None] = "--max-logprobs"

    def call(self, text: Text, count: int) -> Call:
        """The response covers every token of the text."""
        body = {"prompt": text.tokens, "prompt_logprobs": count, "max_tokens": 1, "temperature": 1.0}
        return Call("/v1/completions", body)

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """At a position there are the most likely tokens, ranks from 1 on, and the text's own token with any rank."""
        [choice] = answer["choices"]
        own, top = [], []
        pairs = zip(text.tokens, choice["prompt_logprobs"], strict=True)
        for token, others in list(pairs)[text.first :]:
            own.append(others[str(token)]["logprob"])
            ranks = {entry["rank"]: (int(name), entry["logprob"]) for name, entry in others.items()}
            top.append([ranks[rank] for rank in range(1, count + 1)])
        return TokenLogprobs.of(own, top, count)

    def detokenized(self, answer: Any) -> str:
        """vLLM returns the text as `prompt`."""
        return str(answer["prompt"])


@dataclass
class SGLangPromptLogprobs:
    """SGLang's server: the log-probabilities of the input that its own endpoint gives."""

    context: int
    context_flag: ClassVar = "--context-length"
    count_flag: ClassVar[str | None] = None

    def call(self, text: Text, count: int) -> Call:
        """The response starts one token before `text.first`, so that the server may use a cached prefix."""
        how = {"return_logprob": True, "logprob_start_len": text.first - 1, "top_logprobs_num": count}
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        return Call("/generate", {"input_ids": text.tokens, "sampling_params": sampling, **how})

    def read(self, answer: Any, text: Text, count: int) -> TokenLogprobs:
        """The first entry, in front of `text.first`, is empty. Ids are not compared: SGLang reports 0 for the last."""
        about = answer["meta_info"]
        own = [number for number, *_ in about["input_token_logprobs"][1:]]
        if len(own) != len(text.tokens) - text.first:
            raise ValueError(f"log-probabilities of {len(own)} tokens, not of {len(text.tokens) - text.first}")
        top = about["input_top_logprobs"][1:] if count else [[]] * len(own)
        return TokenLogprobs.of(own, [[(name, number) for number, name, *_ in others] for others in top], count)

    def detokenized(self, answer: Any) -> str:
        """SGLang returns the text as `text`."""
        return str(answer["text"])


KINDS: dict[str, Callable[[int], PromptLogprobs]] = {
    "vllm": VLLMPromptLogprobs,
    "sglang": SGLangPromptLogprobs,
}  # by `owned_by` in the list of models


async def identify(client: ServerClient) -> PromptLogprobs:
    """The kind of a server.

    Raises:
        RequestFailed: the server is not up, or of an unknown kind.
    """
    with client.parse("its list of models"):
        card = (await client.get("/v1/models"))["data"][0]
        kind, context = card["owned_by"], int(card["max_model_len"])
    if kind not in KINDS:
        raise client.bad_response(f"its kind is {kind!r}, which is not {' or '.join(KINDS)}")
    return KINDS[kind](context)
