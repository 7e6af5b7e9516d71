"""How evenly the tokens of a row go to the experts of a mixture, by the outputs of its routers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.init import meta_model


@dataclass
class RouterRecorder:
    """The outputs of the routers of a model in a forward.

    Attributes:
        logits: of every router, (N, experts): one of each token of the forward.
        chosen: of every router, (N, k): the experts that a token went to.
    """

    logits: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)

    def balance(self, choose: Callable[[Tensor], Tensor], row: Tensor, count: int) -> Tensor:
        """The sequence-wise balance loss of DeepSeek-V3 (2412.19437, eq. 17-20), the share of each token, (Q,).

        For a row of T chosen tokens that each go to k of E experts: the sum over experts i, and over routers, of
        f_i P_i, where f_i is E / (k T) times the tokens that went to i, and P_i the mean affinity to i, a softmax. It
        is 1 for each router where all go evenly. The share of token t is the sum of f_i s_ti / T; f has no gradient.

        Args:
            choose: from a tensor of all tokens of the forward (N, .) to the chosen tokens (Q, .).
            row: (Q,) the row of each chosen token.
            count: B, the number of rows.
        """
        total = torch.zeros(len(row), device=row.device)
        tokens = torch.zeros(count, device=row.device).index_add_(0, row, torch.ones_like(total))  # (B,)
        for logits, chosen in zip(self.logits, self.chosen, strict=True):
            affinity = choose(logits).float().softmax(-1)  # (Q, E)
            routed = torch.zeros_like(affinity).scatter_(1, choose(chosen), 1.0)
            load = torch.zeros(count, affinity.shape[1], device=row.device).index_add_(0, row, routed)
            load *= affinity.shape[1] / chosen.shape[1] / tokens.clamp(min=1)[:, None]  # (B, E)
            total = total + (load[row] * affinity).sum(-1) / tokens[row]
        return total


@contextmanager
def record_router_logits(model: PreTrainedModel) -> Iterator[RouterRecorder]:
    """Records the outputs of the routers in a forward.

    A compiled block runs without these hooks; its strategy refuses it (`ModelFacts.hooked`).
    """
    recorder, modules = RouterRecorder(), routers(model)

    def record(module: nn.Module, arguments: tuple, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        recorder.logits.append(outputs[0])
        recorder.chosen.append(outputs[2])

    hooks = [router.register_forward_hook(record) for router in modules]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()
    assert len(recorder.logits) == len(modules)


def routers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that choose experts and return (logits, weights, chosen), in the order of the layers."""
    recorder = (model._can_record_outputs or {}).get("router_logits")
    return (
        [] if recorder is None else [module for module in model.modules() if isinstance(module, recorder.target_class)]
    )


def check_routers(config: PretrainedConfig) -> None:
    """Checks that a model has routers, without loading it.

    Raises:
        ValueError: there are none.
    """
    if not routers(meta_model(config).base_model):
        raise ValueError(
            f"algorithm.terms.router_balance: a {config.model_type} has no router that transformers knows; take the "
            "term out, or train a mixture of experts such as qwen3_moe"
        )
