"""How evenly the tokens of a row go to the experts of a mixture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.init import meta_model


@dataclass
class RouterRecorder:
    """What the routers of a model have said in a forward.

    Attributes:
        logits: of every router, (N, experts): one of each token of the forward.
        chosen: of every router, (N, k): the experts that a token went to.
    """

    logits: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)

    def balance(self, places: Tensor, where: Tensor) -> Tensor:
        """The sequence-wise balance loss of DeepSeek-V3 (2412.19437, eq. 17-20), each token with its share, (Q,).

        For a row of T chosen tokens that each go to k of E experts: the sum over experts i, and over routers, of
        f_i P_i, where f_i is E / (k T) times the tokens that went to i, and P_i the mean affinity to i, a softmax. It
        is 1 for each router where all go evenly. The share of token t is the sum of f_i s_ti / T; f has no gradient.

        Args:
            places: (Q,) where the chosen tokens lie in the forward.
            where: (B, .) bool, Q of them True: the rows that they are of.
        """
        row = where.nonzero()[:, 0]  # (Q,)
        tokens = where.sum(1)  # (B,)
        total = torch.zeros(len(row), device=places.device)
        for logits, chosen in zip(self.logits, self.chosen, strict=True):
            affinity = logits[places].float().softmax(-1)  # (Q, E)
            went = torch.zeros_like(affinity).scatter_(1, chosen[places], 1.0)
            load = torch.zeros(len(where), affinity.shape[1], device=places.device).index_add_(0, row, went)
            load *= affinity.shape[1] / chosen.shape[1] / tokens.clamp(min=1)[:, None]  # (B, E)
            total = total + (load[row] * affinity).sum(-1) / tokens[row]
        return total


@contextmanager
def record_router_logits(model: PreTrainedModel, on: bool) -> Iterator[RouterRecorder]:
    """Hears what the routers say in a forward, where it is on.

    A compiled block runs without these hooks; `check_routers` refuses it.
    """
    heard, said = RouterRecorder(), routers(model) if on else []

    def hear(module: nn.Module, arguments: tuple, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        heard.logits.append(outputs[0])
        heard.chosen.append(outputs[2])

    hooks = [router.register_forward_hook(hear) for router in said]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()
    assert len(heard.logits) == len(said)


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that choose experts and answer (logits, weights, chosen), in the order of the layers."""
    recorder = (model._can_record_outputs or {}).get("router_logits")
    return (
        [] if recorder is None else [module for module in model.modules() if isinstance(module, recorder.target_class)]
    )


def check_routers(shape: PretrainedConfig, compiled: bool, context_parallel: int) -> None:
    """Looks for routers in a model without weights.

    Raises:
        ValueError: there are none, or a strategy does not let them be heard.
    """
    for key, hidden in {"compile": compiled, "context_parallel": context_parallel > 1}.items():
        if hidden:
            raise ValueError(
                f"strategy.{key}: the term algorithm.terms.router_balance cannot hear the routers with it; take the "
                f"term out, or leave strategy.{key} at its default"
            )
    if not routers(meta_model(shape).base_model):
        raise ValueError(
            f"algorithm.terms.router_balance: a {shape.model_type} has no router that transformers knows; take the "
            "term out, or train a mixture of experts such as qwen3_moe"
        )
