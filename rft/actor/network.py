"""The module that is sharded and trained: a transformers model whose forward returns per-token columns.

The head's weight is used inside this forward and stays in the root group of FSDP, so tied embeddings and sharding
agree. Right padding needs no attention mask: a causal model's real tokens never look at what follows them.
"""

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from rft.actor.logprobs import token_logprobs


def predicting_states(backbone: nn.Module, tokens: TensorDict) -> Tensor:
    """Hidden states aligned with the tokens they predict, (B, T - 1, D): entry t-1 predicts token t."""
    arguments = {name: column for name, column in tokens.items() if name != "attention_mask"}
    return backbone(**arguments, use_cache=False).last_hidden_state[:, :-1]


def aligned(values: Tensor, select: Tensor) -> Tensor:
    """Spreads values (N,) over the selected positions of a zero column (B, T)."""
    column = torch.zeros(select.shape, dtype=values.dtype, device=values.device)
    return column.masked_scatter(select, values)


class LanguageNetwork(nn.Module):
    """A causal language model. Columns: `logprobs`, `entropy`, `sum_p_squared` of the selected tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: TensorDict, select: Tensor, outputs: tuple[str, ...], temperature: float
    ) -> dict[str, Tensor]:
        """Computes the columns named in `outputs`, (B, T) each, zero outside `select` (B, T) bool."""
        where = select[:, 1:]
        hidden = predicting_states(self.model.base_model, tokens)[where]  # (N, D)
        head = self.model.get_output_embeddings()
        logprobs, entropy, squares = token_logprobs(
            hidden,
            head.weight,
            head.bias,
            tokens["input_ids"][:, 1:][where],
            temperature,
            with_entropy="entropy" in outputs,
            with_squares="sum_p_squared" in outputs,
        )
        select = nn.functional.pad(where, (1, 0))
        columns = {"logprobs": logprobs, "entropy": entropy, "sum_p_squared": squares}
        return {name: aligned(columns[name], select) for name in outputs}


class ValueNetwork(nn.Module):
    """A backbone with a scalar head. Column: `values`, the expected return before each selected token."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.model = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, tokens: TensorDict, select: Tensor, outputs: tuple[str, ...], temperature: float
    ) -> dict[str, Tensor]:
        """Computes `values`, (B, T) float32, zero outside `select` (B, T) bool; the temperature plays no part."""
        where = select[:, 1:]
        hidden = predicting_states(self.model, tokens)[where]  # (N, D)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = nn.functional.linear(hidden.to(dtype), self.head.weight.to(dtype), self.head.bias.to(dtype))[:, 0]
        return {"values": aligned(values, nn.functional.pad(where, (1, 0)))}


def check_head(model: PreTrainedModel, key: str) -> None:
    """Refuses a model that changes its logits after the head (soft-capping, scaling): our columns would differ.

    Raises:
        ValueError: names the key and the architecture.
    """
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, arguments, logits: 1e3 * logits)  # a new model's are under any cap
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        ours = 1e3 * nn.functional.linear(hidden, head.weight, head.bias).float()
    hook.remove()
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(ours.abs().max())):
        raise ValueError(
            f"{key}: {type(model).__name__} changes its logits after the head (soft-capping or scaling), which the "
            "log-probabilities here do not; choose a model without it"
        )
