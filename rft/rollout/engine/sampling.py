"""Draws tokens from logits. A draw is a function of its row's seed and position alone: it does not depend on the other
rows of the batch, on their order, or on the process."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from rft.batch.counter_rng import GOLDEN, mix, shift, signed
from rft.conditions import GENERATION, SAMPLED, ReadWith
from rft.ranges import PositiveInt, Range, SamplingTemperature, TopK, TopP


@dataclass(frozen=True)
class FirstToken:
    """The first new token has a temperature of its own, a high one, so that answers begin differently (FIRE,
    2410.21236).

    Attributes:
        temperature: of this token alone.
        top_k: it is one of the k most likely tokens; no other truncation applies.
    """

    temperature: SamplingTemperature
    top_k: PositiveInt


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature first, then top-k, top-p and min-p, each on the result of the one before.

    Attributes:
        max_new_tokens: cap on sampled tokens, the end token included.
        temperature: divides the logits; 0 takes the most likely token and ignores all truncation.
        top_p: keeps the most likely tokens until their mass reaches it; 1 is off.
        top_k: keeps the k most likely tokens; 0 is off.
        min_p: keeps tokens of at least this share of the largest probability; 0 is off.
        stop: strings that end a text; special tokens among them are end tokens of the run.
        first_token: how the first new token is drawn; None: as the others.
    """

    max_new_tokens: Annotated[PositiveInt, ReadWith(GENERATION)]
    temperature: Annotated[SamplingTemperature, ReadWith(SAMPLED)]
    top_p: Annotated[TopP, ReadWith(SAMPLED)]
    top_k: Annotated[TopK, ReadWith(SAMPLED)]
    min_p: Annotated[float, Range(low=0, high=1, hint="0 turns it off"), ReadWith(SAMPLED)]
    stop: Annotated[list[str], ReadWith(GENERATION)]
    first_token: Annotated[FirstToken | None, ReadWith(SAMPLED)]

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError(
                f"rollout.stop={self.stop}: an empty string ends every text before its first token; take it out"
            )

    def truncates(self) -> bool:
        """True if tokens are drawn from another distribution than the one that training computes."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.first_token is not None

    def first(self) -> "Sampling":
        """How the first new token is drawn."""
        hot = self.first_token
        if hot is None:
            return self
        return replace(self.untruncated(hot.temperature), top_k=hot.top_k)

    def untruncated(self, temperature: float) -> "Sampling":
        """The same at a temperature and without truncation."""
        return replace(self, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, first_token=None)


def stream(seeds: list[int]) -> Tensor:
    """The start value of one random stream per seed, (R,) int64. Neighbouring seeds give unrelated streams."""
    return mix(torch.tensor([signed(seed) for seed in seeds]))


def uniform(streams: Tensor, position: int | Tensor) -> Tensor:
    """The number in [0, 1) of each stream at a position, an int or (1,) int64; (R,) float64."""
    return shift(mix(streams + torch.as_tensor(position + 1) * GOLDEN), 11).double() * 2.0**-53


def draw(logits: Tensor, streams: Tensor, position: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draws a token for each row.

    Args:
        logits: (R, V), which it may overwrite.
        streams: (R,) random streams.
        position: (1,) int64, the number of the token in its text.
        sampling: without regard to a first token.

    Returns:
        Tokens (R,) int64 and their log-probabilities (R,) float32.
    """
    if sampling.temperature == 0:
        return greedy(logits)
    draws = uniform(streams, position)
    return sample(logits, draws, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def draws_on_device(sampling: Sampling) -> bool:
    """Whether `draw` reads no number on the host. For top-p alone it does, to sort no more than it must."""
    return sampling.temperature == 0 or sampling.top_p >= 1.0 or sampling.top_k > 0


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens (R,) and their log-probabilities (R,) float32 at temperature one, of logits (R, V)."""
    logits = logits.float()
    top, tokens = logits.max(-1)
    return tokens, top - logits.logsumexp(-1)


def sample(
    logits: Tensor, draws: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """Draws one token a row by inverting the distribution function, tokens in the order of the vocabulary.

    Args:
        logits: (R, V), which it may overwrite.
        draws: (R,) float64 in [0, 1).
        temperature, top_k, top_p, min_p: as in `Sampling`; temperature above 0.

    Returns:
        Tokens (R,) int64 and log-probabilities (R,) float32 under the truncated, renormalised distribution.
    """
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    # On a CPU a new tensor of this size takes about as long as the softmax: the system hands out its pages one by one.
    weights = torch.softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)  # (R, V)
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        weights = truncate(weights, top_k, top_p, min_p)
    return invert(weights, draws)


def truncate(weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Sets to zero what top-k, then top-p, then min-p exclude; tokens as likely as the last one kept are kept.

    Args:
        weights: (R, V) float32, rows sum to one.

    Returns:
        (R, V) float32, not renormalised.
    """
    width = weights.shape[1]
    floor = weights.amax(-1, keepdim=True) * min_p  # (R, 1)
    if 0 < top_k < width or top_p < 1.0:
        count = min(top_k or 256, width)
        while True:
            best = weights.sort(-1, descending=True).values if count == width else weights.topk(count).values
            best = best.double()  # (R, count)
            mass = running_sum(best)  # (R, count)
            # Sorting a whole vocabulary is slow, and few tokens hold the mass unless the distribution is flat.
            if top_k > 0 or count == width or bool((mass[:, -1] >= top_p).all()):
                break
            count = min(count * 8, width)
        whole = mass[:, -1:] if top_k > 0 else 1.0
        kept = (mass - best < top_p * whole).sum(-1, keepdim=True)  # (R, 1)
        floor = torch.maximum(floor, best.gather(1, (kept - 1).clamp(min=0)).float())
    return torch.where(weights >= floor, weights, 0.0)


def invert(weights: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Finds for each row the token where its distribution function passes the draw.

    The sums are taken over blocks first, so that only one block a row is summed token by token.

    Args:
        weights: (R, V) float32, each row with a positive sum.
        draws: (R,) float64 in [0, 1).

    Returns:
        Tokens (R,) int64 of positive weight, and the logarithms (R,) float32 of their shares of the row's sum.
    """
    width = weights.shape[1]
    size = 1 << (width.bit_length() + 1) // 2  # about the square root, so that both searches are short
    if size // 8 <= width & -width < size:
        size = width & -width  # shorter blocks that divide the row need no copy of it
    if width % size:
        weights = torch.nn.functional.pad(weights, (0, -width % size))
    blocks = weights.unflatten(1, (-1, size))  # (R, K, size)
    mass = blocks.sum(-1).double()  # (R, K)
    total = mass.sum(-1)  # (R,)
    block, rest = _find(mass, draws * total)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block].double()  # (R, size)
    place, _ = _find(inside, rest)
    chosen = inside.gather(1, place[:, None]).squeeze(1)  # (R,)
    return block * size + place, (chosen / total).log().float()


def running_sum(values: Tensor) -> Tensor:
    """The sums of the first numbers of each row, (R, K).

    On a GPU torch has no deterministic kernel for it. With `strategy.deterministic` the sums double their reach in
    log2(K) additions.
    """
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_doubling(values)
    return values.cumsum(-1)


def sum_by_doubling(values: Tensor) -> Tensor:
    """The sums of the first numbers of each row, (R, K), in log2(K) additions."""
    reach = 1
    while reach < values.shape[-1]:
        values = torch.cat([values[..., :reach], values[..., reach:] + values[..., :-reach]], -1)
        reach *= 2
    return values


def _find(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry where the running sum of (R, K) exceeds the target (R,), and the target left inside it."""
    sums = running_sum(mass)
    # Rounding may put the target on the total itself, past the last entry of positive mass.
    target = torch.minimum(target, sums[:, -1] * (1 - 2.0**-52))[:, None]  # (R, 1)
    place = torch.searchsorted(sums, target, right=True)  # (R, 1)
    before = sums.gather(1, place) - mass.gather(1, place)
    return place.squeeze(1), (target - before).squeeze(1)
