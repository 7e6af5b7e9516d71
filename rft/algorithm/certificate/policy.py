"""A policy that is small enough to enumerate: every answer, and every group of answers, with its probability."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.scores.rewards import token_rewards

SYMBOLS = 3
LAST = SYMBOLS - 1  # the symbol that ends an answer
_SEED = 84  # of tables on which no approximation passes for exact: each shows in the third digit
_NEVER = -1e4  # logit of a symbol that a prompt does not allow: its probability is 0 in float64


class Prompt(NamedTuple):
    """The answers that a prompt allows.

    Attributes:
        positions: tokens at most.
        first: symbols `first` to `LAST` are allowed.
        ends: whether `LAST` ends the answer; if not, all answers have the same length.
        given: a position where an environment answers, any symbol but `LAST`: what follows is a second turn.
    """

    positions: int
    first: int = 0
    ends: bool = True
    given: int | None = None

    def answers(self) -> list[tuple[int, ...]]:
        """All of them."""
        answers: list[tuple[int, ...]] = [()]
        for position in range(self.positions):
            over = {answer for answer in answers if self.ends and answer[-1:] == (LAST,)}
            longer = [(answer,) if answer in over else self._continued(answer, position) for answer in answers]
            answers = [answer for each in longer for answer in each]
        return answers

    def allows(self, position: int, symbol: int) -> bool:
        """Whether a symbol may stand there."""
        return self.first <= symbol and not (position == self.given and symbol == LAST)

    def _continued(self, answer: tuple[int, ...], position: int) -> Sequence[tuple[int, ...]]:
        return [(*answer, symbol) for symbol in range(SYMBOLS) if self.allows(position, symbol)]


PROMPTS = (Prompt(positions=2), Prompt(positions=1, first=1))  # 7 answers of 1 or 2 tokens; 2 answers of 1 token


def term_weights(options: Mapping[str, Any]) -> dict[str, float]:
    """Two reward terms; the first is the one that an option `term` of a plugin names."""
    return {options.get("term", "right"): 0.75, "form": 0.5}


class TinyPolicy:
    """A table of logits for the answers to some prompts, and the columns that a batch of them has. All in float64.

    Args:
        prompts: each has logits of its own.
        binary: scores are 0 or 1; else the weighted sum of two reward terms, with some answers tied.
        reads: columns beside the usual ones. Scores are numbers of the prompt, as a baseline is.
        options: of a plugin.

    Attributes:
        logits: (states, SYMBOLS).
        prompts: how many.
        prompt: (Y,), the prompt of an answer; Y answers to all prompts, T columns, the first of which is the prompt's.
        columns: of every answer, (Y,).
    """

    def __init__(
        self,
        prompts: Sequence[Prompt] = PROMPTS,
        binary: bool = False,
        reads: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        answers = [(p, answer) for p, prompt in enumerate(prompts) for answer in prompt.answers()]
        prefixes = dict.fromkeys((p, answer[:t]) for p, answer in answers for t in range(len(answer)))
        states = {prefix: state for state, prefix in enumerate(prefixes)}
        self.prompts = len(prompts)
        self.prompt = torch.tensor([p for p, _ in answers])
        self._tokens = torch.zeros(len(answers), 1 + max(prompt.positions for prompt in prompts), dtype=torch.int64)
        self._states, keep = torch.zeros_like(self._tokens), torch.zeros_like(self._tokens, dtype=torch.bool)
        given = keep.clone()  # (Y, T)
        for row, (p, answer) in enumerate(answers):
            for t, token in enumerate(answer):
                self._tokens[row, t + 1], self._states[row, t + 1] = token, states[p, answer[:t]]
                given[row, t + 1] = t == prompts[p].given
            keep[row, 1 : len(answer) + 1] = True
        keep &= ~given

        self._generator = torch.Generator().manual_seed(_SEED)
        allowed = [[prompts[p].allows(len(prefix), symbol) for symbol in range(SYMBOLS)] for p, prefix in states]
        self._unknown = ~torch.tensor(allowed)
        self.logits = self._table()
        environment = self.logits.log_softmax(dim=1)[self._states, self._tokens]  # of what it answers, fixed
        self._environment = torch.where(given, environment, 0.0).sum(1)  # (Y,)
        self.columns = TensorDict({"loss_mask": keep}, batch_size=[len(answers)])
        now = self.forward(self.logits)
        right = torch.randint(4, (len(answers),), generator=self._generator).double() / 3
        form = torch.randint(2, (len(answers),), generator=self._generator).double()
        weights = term_weights(options or {})
        terms = dict(zip(weights, (right, form), strict=True))
        scores = form if binary else torch.stack([weight * terms[name] for name, weight in weights.items()]).sum(0)
        greedy = ((self._tokens == self.logits.argmax(1)[self._states]) | ~keep).all(1)  # one answer to each prompt
        usual = {
            "terms": TensorDict(terms, batch_size=[len(answers)]),
            "scores": scores,
            "rewards": token_rewards(scores, keep, None, 0.0)[1],
            "greedy_scores": scores[greedy][self.prompt],
            "sum_p_squared": now["sum_p_squared"],
            "old_logprobs": now["logprobs"],
            "rollout_logprobs": now["logprobs"],
            "turn": torch.where(keep, 1 + given.cumsum(1), 0),
            "anchor": torch.where(keep, 1 + (given * (1 + self._tokens)).cumsum(1), 0),  # what the environment answered
            "agent": self.prompt,
            "observation_mask": given,
        }
        for name in (*usual, "ref_logprobs", *reads):
            if name not in self.columns.keys():
                self.columns[name] = usual[name] if name in usual else self._another(name)

    def _table(self) -> Tensor:
        normal = torch.randn(self._unknown.shape, dtype=torch.float64, generator=self._generator)
        return torch.where(self._unknown, _NEVER, normal)

    def _another(self, name: str) -> Tensor:
        """A random column, by its name one of another policy, of the prompt, or of the state of a token."""
        if name.endswith("logprobs"):
            return self.forward(self._table())["logprobs"]
        if name.endswith("scores"):
            return torch.randn(self.prompts, dtype=torch.float64, generator=self._generator)[self.prompt]
        of_state = torch.randn(len(self.logits), dtype=torch.float64, generator=self._generator)
        return torch.where(self.columns["loss_mask"], of_state[self._states], 0.0)

    def forward(self, logits: Tensor) -> dict[str, Tensor]:
        """The outputs of a model at every token of every answer, (Y, T) each, zero outside `loss_mask`."""
        table = logits.log_softmax(dim=1)  # (states, SYMBOLS)
        each = {
            "logprobs": table[self._states, self._tokens],
            "entropy": -(table.exp() * table).sum(1)[self._states],
            "sum_p_squared": table.exp().square().sum(1)[self._states],
        }
        return {name: torch.where(self.columns["loss_mask"], output, 0.0) for name, output in each.items()}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of every answer to its prompt, (Y,)."""
        return (self.forward(logits)["logprobs"].sum(1) + self._environment).exp()

    def groups(self, n: int) -> list[tuple[Tensor, Tensor]]:
        """For each prompt: groups of n answers in any order, (groups, n), and how many orders each has, (groups,)."""
        groups_of_prompts = []
        for p in range(self.prompts):
            rows = (self.prompt == p).nonzero()[:, 0].tolist()
            groups = list(itertools.combinations_with_replacement(rows, n))
            orders = [math.factorial(n) / math.prod(map(math.factorial, Counter(group).values())) for group in groups]
            groups_of_prompts.append((torch.tensor(groups), torch.tensor(orders, dtype=torch.float64)))
        return groups_of_prompts

    def batches(self, n: int, together: bool) -> Iterator[tuple[Tensor, TensorDict, Tensor]]:
        """Every batch, as (answers (N,), columns of the batch (N,), probability of each row's group or batch (N,)).

        Args:
            n: rows of a group.
            together: a batch is one group for each prompt. If not, groups are independent, and one batch holds all of
                them.
        """
        now = self.probabilities(self.logits)
        each = [(groups, orders * now[groups].prod(1)) for groups, orders in self.groups(n)]
        if together:
            choices = torch.cartesian_prod(*(torch.arange(len(groups)) for groups, _ in each)).view(-1, self.prompts)
            chosen = [(groups[i], chances[i]) for (groups, chances), i in zip(each, choices.unbind(1), strict=True)]
            rows = torch.stack([groups for groups, _ in chosen], dim=1)  # (batches, prompts, n)
            chance = torch.stack([chances for _, chances in chosen]).prod(0)[:, None].expand(rows.shape[:2])
        else:
            rows = torch.cat([groups for groups, _ in each])[None]  # (1, groups, n)
            chance = torch.cat([chances for _, chances in each])[None]
        batch = self.columns[rows.flatten()]
        batch["group"] = torch.arange(rows.shape[1]).repeat_interleave(n).repeat(len(rows))
        batch["unit"] = torch.arange(rows[0].numel()).repeat(len(rows))
        yield from zip(rows.flatten(1), batch.split(rows[0].numel()), chance.repeat_interleave(n, dim=1), strict=True)
