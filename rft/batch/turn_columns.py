"""Columns of the turns of an episode that only some algorithms read."""

import hashlib
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Record = Mapping[str, Any]  # the fields of `rft.rollout.environment.record.EpisodeRecord`


def _state_hashes(record: Record) -> list[int]:
    """A hash of what was shown to the policy before each answer: at first the prompt, then the last observation."""
    messages, opening = record["messages"], record["opening"]
    answers = [place for place in range(opening, len(messages)) if messages[place]["role"] == "assistant"]
    shown = [messages[:opening], *(messages[before + 1 : place] for before, place in pairwise(answers))]
    texts = [json.dumps(part, sort_keys=True, default=str).encode() for part in shown]
    return [1 + int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) for text in texts]  # 0: no state


def _anchor(turn: Tensor, record: Record) -> Tensor:
    return torch.tensor([0, *_state_hashes(record)])[turn]


def _turn_scores(turn: Tensor, record: Record) -> Tensor:
    column = torch.zeros(len(turn))
    ends = turn * (turn != torch.cat([turn[1:], turn.new_zeros(1)]))  # the number of a turn at its last token, else 0
    for number, reward in enumerate(record["rewards"], start=1):
        column[ends == number] = reward
    return column


def _observation_mask(turn: Tensor, record: Record) -> Tensor:
    return (turn == 0) & (turn.cumsum(0) > 0)


def _agent(turn: Tensor, record: Record) -> int:
    agent: int = record["agent"]
    return agent


TURN_COLUMNS: dict[str, Callable[[Tensor, Record], Tensor | int]] = {
    "anchor": _anchor,
    "turn_scores": _turn_scores,
    "observation_mask": _observation_mask,
    "agent": _agent,
}


def turn_column(name: str, turn: Tensor, record: Record) -> Tensor | int:
    """A column of a batch row of an episode.

    - `anchor` (T,) int64: at the tokens of a turn a hash of the messages before it, from the answer before.
    - `turn_scores` (T,) float32: at the last token of a turn the reward of its step.
    - `observation_mask` (T,) bool: the given tokens behind the first answer of the row, those of the template included.
    - `agent`: the number of the player among all players of the environments of the run.

    Args:
        name: one of `TURN_COLUMNS`.
        turn: (T,) int64, the column `turn` of the row.
        record: of the episode.
    """
    return TURN_COLUMNS[name](turn, record)
