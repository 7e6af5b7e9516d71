"""The module that is sharded and trained: a transformers model whose forward returns per-token columns.

The head's weight is used inside this forward and stays in the root group of FSDP, so that embeddings tied to it can be
sharded. No attention mask is needed: packed rows have their own attention function, and in rows padded on the right the
causal mask hides the padding.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from rft.actor.forward.backbone import ROUTER_BALANCE, replaced_forward, run_backbone
from rft.actor.forward.logits import LogitOptions, LogitShape, forbidden_logits
from rft.actor.loading.stand_ins import random_numbers, stand_ins
from rft.actor.logprobs import token_logprobs, top_logprobs
from rft.actor.packing.layout import PackedLayout, shard_queries
from rft.batch.columns import chosen_places, rows_and_columns
from rft.imports import import_part

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")  # names in configs
CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class ForwardInputs:
    """What a network computes its columns from.

    Attributes:
        tokens: columns (B, T) that the model takes.
        select: (B, T) bool, the tokens that the columns are of.
        chosen: (Q,) their places; see `chosen_places`.
        layout: how the rows are packed; None leaves them padded.
        media: the `MediaInputs` of the rows, or None.
        candidates: (B, T, K) ids of other tokens, those of `candidate_logprobs` (B, T, K).
        top: K of `top_ids` and `top_logprobs` (B, T, K), at most the number of ids that can follow.
    """

    tokens: TensorDict
    select: Tensor
    chosen: Tensor
    layout: PackedLayout | None
    media: Any
    candidates: Tensor | None
    top: int

    @cached_property
    def where(self) -> tuple[Tensor, Tensor]:
        """The row and the column of each selected token, (Q,) each."""
        return rows_and_columns(self.chosen, self.select.shape)

    def aligned(self, values: Tensor) -> Tensor:
        """Scatters values (Q,) or (Q, K) to the selected tokens of a zero column (B, T) or (B, T, K)."""
        # the backward pass of `masked_scatter` counts the mask, for which the host would wait
        return values.new_zeros(*self.select.shape, *values.shape[1:]).index_put(self.where, values)


@dataclass(frozen=True)
class LogitQueries:
    """The hidden states whose logits a forward computes.

    Attributes:
        states: (Q, D) hidden states.
        targets: (Q,) the next tokens, or (Q, 1 + K): the next token and K candidates.
        places: (Q,) positions of these states among the tokens of the forward.
        shard: with context parallelism the `SequenceShard`, which rank needs which output; None without.
    """

    states: Tensor
    targets: Tensor
    places: Tensor
    shard: Any

    def choose(self, values: Tensor) -> Tensor:
        """From values of the tokens of the forward (N, K) to those of the selected tokens of this rank (P, K)."""
        return self.returned(values[self.places])

    def returned(self, outputs: Tensor) -> Tensor:
        """From outputs of the states (Q, ...) to those of the selected tokens of this rank (P, ...)."""
        if self.shard is None:
            return outputs
        own: Tensor = self.shard.return_outputs(outputs)
        return own


def gather_queries(backbone: nn.Module, inputs: ForwardInputs) -> LogitQueries:
    """The hidden states that predict the selected tokens."""
    layout, chosen = inputs.layout, inputs.chosen
    states, place = run_backbone(backbone, inputs.tokens, layout, inputs.media)
    if layout is None or layout.shard is None:
        places = place[:, :-1].flatten()[chosen]
        return LogitQueries(states[places], shard_queries(inputs.tokens, chosen, inputs.candidates), places, None)
    places = layout.shard.queries
    return LogitQueries(states[places], layout.shard.targets, places, layout.shard)


class Network(nn.Module):
    """A model whose forward returns per-token columns.

    Args:
        model: a transformers model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: TensorDict,
        select: Tensor,
        outputs: tuple[str, ...],
        temperature: float,
        layout: PackedLayout | None = None,
        media: Any = None,
        chosen: Tensor | None = None,
        candidates: Tensor | None = None,
        top: int = 0,
    ) -> dict[str, Tensor]:
        """Computes the columns named in `outputs`, (B, T) each, float32 at least, zero outside `select` (B, T) bool.

        Args:
            tokens, select, layout, media, candidates, top: see `ForwardInputs`.
            temperature: divides logits; it has no effect on other numbers.
            chosen: `chosen_places` of `select`, if the caller has them.
        """
        chosen = chosen_places(select) if chosen is None else chosen
        return self.columns(ForwardInputs(tokens, select, chosen, layout, media, candidates, top), outputs, temperature)

    def columns(self, inputs: ForwardInputs, outputs: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """What `forward` returns; each network implements it."""
        raise NotImplementedError


class LanguageNetwork(Network):
    """A causal language model. Columns of the selected tokens: `logprobs`, `entropy`, `sum_p_squared`,
    `candidate_logprobs`, `top_ids` and `top_logprobs`, and `router_balance` of a mixture of experts.

    Args:
        key: the yaml key of the model, for messages.
        compiled, device_type: see `token_logprobs`.
        forbidden: ids that cannot follow, ascending; see `forbidden_tokens`.

    Raises:
        ValueError: the model changes its logits in an unknown way; names the key.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        key: str = "actor.path",
        compiled: bool = False,
        device_type: str | None = None,
        forbidden: Sequence[int] = (),
    ) -> None:
        super().__init__(model)
        self.compiled = compiled
        self.device_type = device_type
        self.forbidden = forbidden
        self.shape = find_logit_shape(model, key)

    @cached_property
    def _forbidden_logits(self) -> Tensor | None:
        """See `forbidden_logits`. Made once, in a forward, since the host waits for it to reach the device."""
        weight = self.model.get_output_embeddings().weight
        return forbidden_logits(self.forbidden, len(weight), weight.device)

    def columns(self, inputs: ForwardInputs, outputs: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        recording: AbstractContextManager[Any] = nullcontext()
        if ROUTER_BALANCE in outputs:
            term = f"algorithm.terms.{ROUTER_BALANCE}"
            recording = import_part("rft.actor.forward.routers", "record_router_logits", term)(self.model.base_model)
        with recording as recorder:
            queries = gather_queries(self.model.base_model, inputs)
        head = self.model.get_output_embeddings()
        options = LogitOptions(temperature, self.shape, self._forbidden_logits, self.device_type)
        columns: dict[str, Tensor] = {}
        if {"top_ids", "top_logprobs"} & set(outputs):
            columns["top_ids"], columns["top_logprobs"] = top_logprobs(
                queries.states, head.weight, head.bias, options, inputs.top
            )
        if set(outputs) - set(columns):
            logprobs, entropy, squares = token_logprobs(
                queries.states,
                head.weight,
                head.bias,
                queries.targets,
                options,
                with_entropy="entropy" in outputs,
                with_squares="sum_p_squared" in outputs,
                compiled=self.compiled,
            )
            columns |= {"logprobs": logprobs, "entropy": entropy, "sum_p_squared": squares}
            if inputs.candidates is not None:
                columns |= {"logprobs": logprobs[:, 0], "candidate_logprobs": logprobs[:, 1:]}
        named = (name for name in outputs if name != ROUTER_BALANCE)
        aligned = {name: inputs.aligned(queries.returned(columns[name])) for name in named}
        if ROUTER_BALANCE in outputs:
            balance = recorder.balance(queries.choose, inputs.where[0], len(inputs.select))
            aligned[ROUTER_BALANCE] = inputs.aligned(balance)
        return aligned


class ValueNetwork(Network):
    """A backbone with a scalar head. Column: `values`, the expected return before each selected token."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__(backbone)
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def columns(self, inputs: ForwardInputs, outputs: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        queries = gather_queries(self.model, inputs)
        values = linear(self.head, queries.states)[:, 0]
        return {"values": inputs.aligned(queries.returned(values))}


def linear(head: nn.Linear, states: Tensor) -> Tensor:
    """The outputs (N, K) of a head for hidden states (N, D), at least in float32."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(dtype)
    return nn.functional.linear(states.to(dtype), head.weight.to(dtype), bias)


def find_logit_shape(model: PreTrainedModel, key: str) -> LogitShape:
    """What a model does to the outputs of its head, of the scales and caps that its config names.

    No weight is read: hidden states and outputs of the head are given to what the model computes around the two.

    Raises:
        ValueError: it is something else, which the log-probabilities would lack; names the key and the architecture.
    """
    vocabulary, width = model.get_output_embeddings().weight.shape
    states = torch.linspace(-1, 1, 4 * width).view(1, 4, width)

    def outputs(hidden: Tensor) -> Tensor:
        """From below to above any cap."""
        sizes = torch.logspace(-1, 3, vocabulary) * torch.linspace(-1, 1, vocabulary).sign()
        return hidden.mean(-1, keepdim=True) * sizes.roll(vocabulary // 4)

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(stand_ins(model, random_numbers()))  # of layers between the two
        for module in model.base_model.modules():
            if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is None:
                stack.enter_context(replaced_forward(module, lambda *_, **__: _Given(last_hidden_state=states)))
        stack.enter_context(replaced_forward(model.get_output_embeddings(), outputs))
        computed = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits
    for shape in _logit_shapes(model.config.get_text_config()):
        if torch.allclose(computed, shape.apply(outputs(states)), rtol=1e-5, atol=1e-5):
            return shape
    raise ValueError(
        f"{key}: {type(model).__name__} changes its logits after the head in a way that the log-probabilities here do "
        f"not include (known: a factor {', '.join(SCALES)} and a cap {', '.join(CAPS)} of its config); choose another "
        "model"
    )


def _logit_shapes(config: PretrainedConfig) -> Iterator[LogitShape]:
    """The shapes that a config may mean; some models divide by their scale."""
    options = config.to_dict()
    scales, caps = ([float(options[name]) for name in names if options.get(name)] for names in (SCALES, CAPS))
    for cap in (None, *caps):
        for scale in (1.0, *scales, *(1 / scale for scale in scales)):
            yield LogitShape(scale, cap)


class _Given(BaseModelOutput):
    """The output of a backbone: hidden states, and None for everything else that a model returns beside its logits."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
