"""Attention over packed rows: every row attends to itself causally, including the prefix that its group shares.

It stands in the place of transformers' attention functions, so it serves every model that calls them. What computes it
is a kernel of `rft.actor.packing.kernels`. Padded rows have such a function, too: for its own ones transformers reads
positions to decide whether a mask is needed, for which the host waits for the GPU.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from rft.actor.forward.backbone import language_part, media_part, run_backbone
from rft.actor.loading.stand_ins import random_numbers, stand_ins
from rft.actor.packing.kernels.base import AttentionKernel, AttentionNeeds, AttentionRule
from rft.actor.packing.kernels.operator import attend_opaque, register
from rft.actor.packing.kernels.sdpa import SdpaKernel, attend_rows
from rft.actor.packing.layout import PackedLayout, Segments, pack_layout
from rft.batch.encoded import EncodedText, MediaFacts
from rft.imports import import_part

RECURRENT = "linear_attention"  # the type of such a layer in a config


PADDED = "rft_padded"  # the name of `padded_attention` among transformers' attention functions
WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "output_attentions"}  # that models hand on as well


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: AttentionKernel,
    layout: PackedLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the signature of transformers' attention functions.

    Args:
        query: (1, heads, N, width) of the packed sequence; key, value: of as many or fewer heads.
        kernel: computes it.
        layout: of the rows.
        options: see `attention_rule`.

    Returns:
        (1, N, heads, width), and no attention weights.

    Raises:
        TypeError: the model asks for something else.
    """
    rule, part = attention_rule(attention_mask=attention_mask, **options), layout.shard
    if part is not None and rule.sinks is not None:  # of the heads of this rank
        rule = replace(rule, sinks=rule.sinks.chunk(part.context.size)[part.context.rank])
    if part is None and kernel.opaque and torch.compiler.is_compiling():
        return attend_opaque(kernel, query, key, value, layout.table, rule), None
    return _attend(kernel, query, key, value, layout, rule), None


@torch.compiler.disable(reason="it has calls for rows of any length, and those of ranks")
def _attend(
    kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, rule: AttentionRule
) -> Tensor:
    """Attention (1, N, heads, width), with heads for tokens exchanged where several ranks have one sequence."""
    part = layout.shard
    if part is None or not part.context.gathers_in_attention:
        return kernel.attend(query, key, value, layout.segments, rule)
    copies = part.context.size // math.gcd(key.shape[1], part.context.size)
    key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))  # every rank needs heads
    query, key, value = (part.context.all_to_all_heads(states, part.counts, "heads") for states in (query, key, value))
    states = kernel.attend(query, key, value, layout.segments, rule).transpose(1, 2)
    return part.context.all_to_all_heads(states, part.counts, "tokens").transpose(1, 2)


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one layer over rows padded on the right, in the signature of transformers' attention functions.

    Args:
        query: (B, heads, T, width); key, value: of as many or fewer heads.
        options: see `attention_rule`.

    Returns:
        (B, T, heads, width), and no attention weights.

    Raises:
        TypeError: the model asks for something else.
    """
    states = attend_rows(query, key, value, rule=attention_rule(attention_mask=attention_mask, **options))
    return states.transpose(1, 2).contiguous(), None


def attention_rule(
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> AttentionRule:
    """How a layer attends, by the names that models of transformers have for it.

    Raises:
        TypeError: the layer passes another argument that would have an effect.
    """
    if foreign := {name for name, value in others.items() if value is not None} - WITHOUT_EFFECT:
        raise TypeError(f"its attention takes {', '.join(sorted(foreign))}")
    return AttentionRule(scaling, sliding_window, softcap, s_aux)


class _Recorder(SdpaKernel):
    """Keeps what the layers of a model call it with."""

    implementation: ClassVar[str] = "rft_packed_probe"

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor, AttentionRule]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
        self.calls.append((query, key, value, rule))
        return super().attend(query, key, value, segments, rule)


def use_kernel(config: PretrainedConfig, kernel: AttentionKernel) -> None:
    """Lets the layers of a model with this config compute packed rows with a kernel."""
    register(kernel)
    AttentionInterface.register(kernel.implementation, partial(packed_attention, kernel=kernel))
    config._attn_implementation = kernel.implementation


@torch.no_grad()
def use_packed_attention(
    model: PreTrainedModel,
    key: str,
    media: MediaFacts | None = None,
    choose: Callable[[AttentionNeeds], AttentionKernel] = lambda needs: SdpaKernel(),
) -> None:
    """Replaces the attention of a causal language model, after a test on packed rows.

    Args:
        media: of the processor of a model that takes media; the test then has a row with media, too.
        choose: the kernel for what the layers need.

    Raises:
        ValueError: the model computes other states for packed rows than for each row alone.
    """
    model.eval()
    config, recorder = model.config.get_text_config(), _Recorder()
    recurrent = []
    if RECURRENT in _kinds(config):
        separate_rows = import_part("rft.actor.packing.recurrent", "separate_rows", f"{key}.packing")
        recurrent = separate_rows(language_part(model))
    if (obstacle := _obstacle(model, media, bool(recurrent), True, lambda: use_kernel(config, recorder))) is not None:
        name = type(model).__name__
        raise ValueError(f"{key}.packing: {name} {obstacle}, so packed rows would go wrong; set {key}.packing=false")
    use_kernel(config, choose(AttentionNeeds.of(recorder.calls)))


@torch.no_grad()
def use_padded_attention(model: PreTrainedModel, media: MediaFacts | None = None) -> None:
    """Replaces the attention of a causal language model over padded rows if it stays the same, which a test shows.

    Args:
        media: as for `use_packed_attention`.
    """
    model.eval()
    config = model.config.get_text_config()
    implementation = config._attn_implementation

    def use() -> None:
        AttentionInterface.register(PADDED, padded_attention)
        config._attn_implementation = PADDED

    if _obstacle(model, media, RECURRENT in _kinds(config), False, use) is not None:
        config._attn_implementation = implementation


def _kinds(config: PretrainedConfig) -> set[str]:
    """The kinds of layers that a config names."""
    return set(config.to_dict().get("layer_types") or ())


def _obstacle(
    model: PreTrainedModel, media: MediaFacts | None, recurrent: bool, packed: bool, use: Callable[[], None]
) -> str | None:
    """Why the attention of a model cannot be replaced, or None.

    Args:
        recurrent: layers of linear attention stay as they are.
        packed: the replacement computes packed rows, and padded ones otherwise.
        use: replaces the attention.
    """
    others = _kinds(model.config.get_text_config()) - {"full_attention", "sliding_attention"}
    if recurrent:
        others.discard(RECURRENT)
    if others:
        return f"has layers of {', '.join(sorted(others))}"
    if not (model._supports_flash_attn and (model._supports_attention_backend or recurrent)):
        return "has an attention that cannot be replaced"
    try:
        same = _keeps_states(model, media, packed, use)
    except TypeError as error:
        return f"cannot separate rows ({error})"
    return None if same else "mixes rows, or has a window that it does not state"


def _keeps_states(model: PreTrainedModel, media: MediaFacts | None, packed: bool, use: Callable[[], None]) -> bool:
    """Whether rows keep the states of padded ones when `use` replaces the attention.

    A difference is at most a hundredth of the effect of a token's context.
    """
    config = model.config.get_text_config()
    probe = EncodedText([]) if media is None else media.probe
    taken = () if media is None else media.placeholders
    words = [token for token in range(min(config.vocab_size, 10 + len(taken))) if token not in taken]
    texts = [[words[number % len(words)] for number in row] for row in ([1, 2, 3, 4, 5], [1, 2, 6], [9, 8, 7, 6, 5])]
    rows = _test_rows([*map(EncodedText, texts), *([probe] if probe else [])], probe)
    inputs = None
    if media is not None:
        tensors = probe.media or {}
        positions = media_part("row_positions")(model.base_model, rows["tokens"], tensors, list(range(len(rows))))
        inputs = media_part("MediaInputs")(tensors, media, positions=positions)
    layout = pack_layout(rows, torch.tensor([2, 2, 0, 0])[: len(rows)]) if packed else None
    with _narrow_windows(model, config), stand_ins(model, random_numbers()):  # no weight is read yet
        states, place = run_backbone(model.base_model, rows["tokens"], None, inputs)
        before = states[place]
        use()
        states, place = run_backbone(model.base_model, rows["tokens"], layout, inputs)
        after = states[place]
    effect = (before[0, 4] - before[2, 4]).abs().max()
    error = (after - before)[rows["response_mask"]].abs().max()
    return bool(error <= 1e-2 * effect + 1e-6 * before.abs().max())


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
