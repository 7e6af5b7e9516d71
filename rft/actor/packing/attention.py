"""Attention over packed rows: every row attends to itself causally, including the prefix that its group shares.

It stands in the place of transformers' attention functions, so it serves every model that calls them. There is one
call of scaled_dot_product_attention for all rows of one length: nothing is computed between rows, and no mask of
(tokens, tokens) exists.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from rft.actor.forward.backbone import run_backbone
from rft.actor.forward.media_inputs import MediaInputs, language_part
from rft.actor.loading.stand_ins import random_numbers, stand_ins
from rft.actor.packing.layout import PackedLayout, PackedSegment, pack_layout
from rft.actor.packing.recurrent import RECURRENT, separate_rows
from rft.batch.encoded import EncodedText, MediaFacts

NAME = "rft_packed"
WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "output_attentions"}  # that models hand on as well


@torch.compiler.disable(reason="it loops over rows of any length")
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the signature of transformers' attention functions.

    Args:
        query: (1, heads, N, width) of the packed sequence; key, value: of as many or fewer heads.
        layout: of the rows.
        scaling: of the products, or None for 1 / sqrt(width).
        sliding_window: a token sees at most so many, itself included; None for all.
        softcap: bound of the products (Gemma 2, 2408.00118, section 2), or None.
        s_aux: (heads,) sinks, the logit of one more key of each head, without a value (gpt-oss, 2508.10925), or None.

    Returns:
        (1, N, heads, width), and no attention weights.

    Raises:
        TypeError: the model asks for something else.
    """
    others["attention_mask"] = attention_mask
    if foreign := {name for name, value in others.items() if value is not None} - WITHOUT_EFFECT:
        raise TypeError(f"its attention takes {', '.join(sorted(foreign))}")
    part = layout.shard
    if part is not None and s_aux is not None:
        s_aux = s_aux.chunk(part.context.size)[part.context.rank]  # of the heads of this rank
    rule = _Rule(scaling, sliding_window, softcap, s_aux)
    if part is None or not part.context.gathers_in_attention:
        return _attend(query, key, value, layout.segments, rule), None
    copies = part.context.size // math.gcd(key.shape[1], part.context.size)
    key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))  # every rank needs heads
    query, key, value = (part.context.all_to_all_heads(states, part.counts, "heads") for states in (query, key, value))
    states = _attend(query, key, value, layout.segments, rule).transpose(1, 2)
    return part.context.all_to_all_heads(states, part.counts, "tokens").transpose(1, 2), None


@dataclass(frozen=True)
class _Rule:
    """How a layer attends; see `packed_attention`."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention (rows, heads, length, D) with a mask (length, keys) or a causal one; a head of keys may serve
        several of queries."""
        copies = q.shape[1] // k.shape[1]
        plain = self.softcap is None and self.sinks is None
        if copies > 1 and (mask is not None or not plain):  # with a mask CUDA shares heads only where it writes all
            k, v = (states.repeat_interleave(copies, dim=1) for states in (k, v))  # products down
        if plain:
            gqa = k.shape[1] != q.shape[1]
            return scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scaling, enable_gqa=gqa
            )
        products = q @ k.mT * (q.shape[-1] ** -0.5 if self.scaling is None else self.scaling)
        products = products.to(torch.promote_types(q.dtype, torch.float32))
        if self.softcap is not None:
            products = self.softcap * torch.tanh(products / self.softcap)
        if mask is None:
            mask = causal_window_mask(q.shape[2], 0, q.shape[2], q.device)
        products = products.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.to(products.dtype).view(1, -1, 1, 1).expand(*products.shape[:3], 1)
            products = torch.cat((products, sinks), -1)
        return products.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: Sequence[PackedSegment], rule: _Rule) -> Tensor:
    tokens = [segment.rows * segment.length for segment in segments]
    queries, keys, values = (states.split(tokens, dim=2) for states in (query, key, value))
    results = []
    for q, k, v, segment in zip(queries, keys, values, segments, strict=True):
        q, k, v = (_apart(states, segment) for states in (q, k, v))
        if segment.prefix is not None:
            k, v = (_behind(parts[segment.prefix], own) for parts, own in ((keys, k), (values, v)))
        total = k.shape[2]
        before, window = total - segment.length, total if rule.window is None else min(rule.window, total)
        mask = causal_window_mask(segment.length, before, window, q.device) if before or window < total else None
        states = rule.attend(q, k, v, mask)
        results.append(states.transpose(1, 2).flatten(0, 1)[None])  # (1, rows * length, H, D)
    return torch.cat(results, 1)


def _apart(states: Tensor, segment: PackedSegment) -> Tensor:
    """The rows of a segment by themselves: (1, H, rows * length, D) to (rows, H, length, D)."""
    return states[0].unflatten(1, (segment.rows, segment.length)).transpose(0, 1)


def _behind(prefix: Tensor, own: Tensor) -> Tensor:
    """What rows begin with (1, H, P, D) in front of each of them (rows, H, length, D)."""
    return torch.cat((prefix.expand(len(own), -1, -1, -1), own), 2)


def causal_window_mask(length: int, before: int, window: int, device: torch.device) -> Tensor:
    """Mask (length, before + length) of the keys that a token attends to: itself and fewer than `window` before it."""
    places = torch.arange(before + length, device=device)
    distance = places[before:, None] - places
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)


@torch.no_grad()
def use_packed_attention(model: PreTrainedModel, key: str, media: MediaFacts | None = None) -> None:
    """Replaces the attention of a causal language model, after a test on packed rows.

    Args:
        media: of the processor of a model that takes media; the test then has a row with media, too.

    Raises:
        ValueError: the model computes other states for packed rows than for each row alone.
    """
    model.eval()
    config = model.config.get_text_config()
    kinds = set(config.to_dict().get("layer_types") or ())
    recurrent = separate_rows(language_part(model)) if RECURRENT in kinds else []
    others = kinds - {"full_attention", "sliding_attention", *([RECURRENT] if recurrent else [])}
    if others:
        obstacle: str | None = f"has layers of {', '.join(sorted(others))}"
    elif not (model._supports_flash_attn and (model._supports_attention_backend or recurrent)):
        obstacle = "has an attention that cannot be replaced"
    else:
        try:
            obstacle = (
                None
                if _keeps_rows_apart(model, config, media)
                else "mixes rows, or has a window that it does not state"
            )
        except TypeError as error:
            obstacle = f"cannot separate rows ({error})"
    if obstacle is not None:
        name = type(model).__name__
        raise ValueError(f"{key}.packing: {name} {obstacle}, so packed rows would go wrong; set {key}.packing=false")


def _keeps_rows_apart(model: PreTrainedModel, config: PretrainedConfig, media: MediaFacts | None) -> bool:
    """Whether packed rows have the states of padded ones, up to a hundredth of the effect of a token's context."""
    probe = EncodedText([]) if media is None else media.probe
    taken = () if media is None else media.placeholders
    words = [token for token in range(min(config.vocab_size, 10 + len(taken))) if token not in taken]
    texts = [[words[number % len(words)] for number in row] for row in ([1, 2, 3, 4, 5], [1, 2, 6], [9, 8, 7, 6, 5])]
    rows = _test_rows([*map(EncodedText, texts), *([probe] if probe else [])], probe)
    inputs = None if media is None else MediaInputs(probe.media or {}, media)
    layout = pack_layout(rows, torch.tensor([2, 2, 0, 0])[: len(rows)])
    with _narrow_windows(model, config), stand_ins(model, random_numbers()):  # no weight is read yet
        states, place = run_backbone(model.base_model, rows["tokens"], None, inputs)
        apart = states[place]
        config._attn_implementation = NAME
        states, place = run_backbone(model.base_model, rows["tokens"], layout, inputs)
        together = states[place]
    effect = (apart[0, 4] - apart[2, 4]).abs().max()
    error = (together - apart)[rows["response_mask"]].abs().max()
    return bool(error <= 1e-2 * effect + 1e-6 * apart.abs().max())


def _test_rows(texts: Sequence[EncodedText], probe: EncodedText) -> TensorDict:
    """Padded rows of texts, with the columns that the probe has; the first two are of one group."""
    width = max(len(text) for text in texts)
    real = torch.tensor([[place < len(text) for place in range(width)] for text in texts])
    columns = {name: torch.tensor([text.column(name) + [0] * (width - len(text)) for text in texts])
               for name in probe.columns}  # fmt: skip
    columns["input_ids"] = torch.tensor([list(text) + [0] * (width - len(text)) for text in texts])
    columns["attention_mask"] = real.long()
    size = len(texts)
    group = torch.tensor([0, 0, 1, 2])[:size]
    return TensorDict({"tokens": TensorDict(columns, [size]), "group": group, "response_mask": real}, [size])


@contextmanager
def _narrow_windows(model: nn.Module, config: PretrainedConfig) -> Iterator[None]:
    """Sliding windows of two tokens in the block, so that a few tokens show which layers apply them."""
    owners = [vars(owner) for owner in (config, *model.modules()) if vars(owner).get("sliding_window")]
    widths = [owner["sliding_window"] for owner in owners]
    try:
        for owner in owners:
            owner["sliding_window"] = 2
        yield
    finally:
        for owner, width in zip(owners, widths, strict=True):
            owner["sliding_window"] = width
