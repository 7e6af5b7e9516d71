"""The batch protocol: one TensorDict that flows through the stages of a step and only gains columns.

B rows, T tokens, right-padded with zeros. Every per-token column is aligned with `input_ids`: column t describes the
prediction *of* token t, and column 0 is 0. There is no prompt/response split: `response_mask` says which tokens train.

| column             | shape           | written by            | read by                                             |
|--------------------|-----------------|-----------------------|-----------------------------------------------------|
| `tokens`           | (B, T) each     | source                | actor, as keyword arguments of the model            |
| `response_mask`    | (B, T) bool     | source                | losses: True where the token trains                 |
| `media`            | ragged, by row  | source, if it has any | model: what the processor returned beside `tokens`  |
| `group`            | (B,) int64      | source                | advantages: rows of one prompt                      |
| `unit`             | (B,) int64      | source                | shuffle, micro-batches: rows that stay together     |
| `trajectory`       | (B,) int64      | a source of dialogues | rows that were cut or branched from one dialogue    |
| `turn`             | (B, T) int64    | a source of dialogues | the number of the answer that has the token, or 0   |
| `turn_scores`      | (B, T) float32  | a source of dialogues | rewards: of a turn, at its last trained token       |
| `anchor`           | (B, T) int64    | a source of dialogues | GiGPO: hash of the state before the turn; 0: none   |
| `agent`            | (B,) int64      | a source of games     | RAE: the player or role that the row trains, from 0 |
| `observation_mask` | (B, T) bool     | a source of dialogues | ECHO: tokens of tools, each in one row              |
| `chosen`           | (B,) bool       | a source of pairs     | preference losses: the better row of its unit       |
| `margin`           | (B,) float32    | a source of pairs     | losses that read it: how much better, in both rows  |
| `label`            | (B,) bool       | a source of labels    | KTO: the response is good                           |
| `mismatched`       | (B,) bool       | a source of labels    | KTO: it answers another prompt, and trains nothing  |
| `token_weights`    | (B, T) float32  | a source of texts     | losses: what a token counts; 0: it does not train   |
| `row_weights`      | (B,) float32    | a source of texts     | losses: what a row counts beside the others         |
| `step_labels`      | (B, T) float32  | a source of steps     | process reward: how right it is up to the token     |
| `truncated`        | (B,) bool       | source                | shaping, filters: the length limit ended the text   |
| `loss_mask`        | (B, T) bool     | filter, correction    | losses and counts: trained tokens, none rejected    |
| `rollout_logprobs` | (B, T) float32  | rollout source        | mismatch metrics, correction                        |
| `version`          | (B, T) int64    | rollout source        | staleness metrics: weights that sampled each token  |
| `ages`             | (B, T, S + 1) bool | source, if it is ahead | mismatch metrics: the token is n versions old    |
| `scores`           | (B,) float32    | reward                | advantages                                          |
| `terms`            | (B,) each       | reward                | filters, logs: the raw value of every reward term   |
| `greedy_scores`    | (B,) float32    | source, if it is read | ReMax: the score of the prompt's greedy answer      |
| `baseline_scores`  | (B,) float32    | a source that tracks  | SPO: how often the prompt was solved before         |
| `old_logprobs`     | (B, T) float32  | actor                 | clipped losses                                      |
| `ref_logprobs`     | (B, T) float32  | reference             | KL                                                  |
| `prm_logprobs`     | (B, T) float32  | process reward model  | PRIME                                               |
| `teacher_logprobs` | (B, T) float32  | teacher               | on-policy distillation                              |
| `teacher_top_ids`  | (B, T, K) int32 | teacher               | actor: the tokens that the teacher finds likeliest  |
| `teacher_top_logprobs` | (B, T, K) float32 | teacher         | divergences from the teacher: of those tokens       |
| `sum_p_squared`    | (B, T) float32  | actor, if it is read  | optimal token baseline                              |
| `values`           | (B, T) float32  | critic                | GAE, value loss                                     |
| `advantages`       | (B, T) float32  | advantage             | losses                                              |
| `returns`          | (B, T) float32  | advantage             | value loss                                          |
| `rejected`         | (B,) bool       | correction            | advantages: rows that lost all their trained tokens |
| `correction_weights` | (B, T) float32 | correction           | policy loss                                         |
| `gradient_mask`    | (B, T) bool     | gradient mask         | policy loss: tokens that pass a gradient            |
| `loss_weights`     | (B, T) float32  | aggregation           | trainer                                             |
| `unit_weights`     | (B,) float32    | aggregation           | trainer, for losses with one value a unit           |
| `fields`           | one dict a row  | source                | rewards, logs: the row of the data set, the text    |

`tokens` and `terms` are nested TensorDicts. `COLUMNS` states the kind of every column, and `collate`, `trim` and the
balance over ranks read it there; they never guess it from a shape. A plugin may add columns of its own:

- In a row that goes into `collate`, a number or 0-D tensor becomes (B,), and a 1-D tensor of as many elements as the
  row has tokens becomes (B, T).
- A column that is added to a batch is (B,), or (B, T) or (B, T, K) with the T of the batch.

Padding happens once, in `collate`; the actor's forward packs rows without it, or cuts away what the rows of a
micro-batch do not need. `media` is never padded and never cut; see `rft/batch/media.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

Kind = Literal["token", "row", "media", "fields"]

COLUMNS: dict[str, Kind] = {  # of a nested column: the kind of its leaves
    "tokens": "token",
    "response_mask": "token",
    "media": "media",
    "group": "row",
    "unit": "row",
    "trajectory": "row",
    "turn": "token",
    "turn_scores": "token",
    "anchor": "token",
    "agent": "row",
    "observation_mask": "token",
    "chosen": "row",
    "margin": "row",
    "label": "row",
    "mismatched": "row",
    "token_weights": "token",
    "row_weights": "row",
    "step_labels": "token",
    "truncated": "row",
    "loss_mask": "token",
    "rollout_logprobs": "token",
    "version": "token",
    "ages": "token",
    "scores": "row",
    "terms": "row",
    "greedy_scores": "row",
    "baseline_scores": "row",
    "old_logprobs": "token",
    "ref_logprobs": "token",
    "prm_logprobs": "token",
    "teacher_logprobs": "token",
    "teacher_top_ids": "token",
    "teacher_top_logprobs": "token",
    "sum_p_squared": "token",
    "values": "token",
    "advantages": "token",
    "returns": "token",
    "rejected": "row",
    "correction_weights": "token",
    "gradient_mask": "token",
    "loss_weights": "token",
    "unit_weights": "row",
    "fields": "fields",
}
EPISODE_COLUMNS = ("turn", "trajectory")
SOURCE_COLUMNS = ("tokens", "response_mask", "group", "unit", "truncated", "fields")
GIVEN_COLUMNS = (*SOURCE_COLUMNS, "token_weights")


def kind_of(name: str, dims: int) -> Kind:
    """The kind of a column: what `COLUMNS` says, or, of a plugin's column, per token where it has more than (B,).

    Args:
        name: of the column; of a nested one, without the names of its leaves.
        dims: dimensions of the column, or of the leaf, in a batch.
    """
    return COLUMNS.get(name, "token" if dims > 1 else "row")


def over(mask: Tensor, column: Tensor) -> Tensor:
    """A mask (B, T) in a shape that broadcasts to a column (B, T) or (B, T, K)."""
    return mask.view(*mask.shape, *[1] * (column.dim() - mask.dim()))


def candidates(batch: TensorDict) -> Tensor | None:
    """Tokens whose log-probabilities a forward computes beside those of the rows' own tokens, (B, T, K), or None."""
    return batch["teacher_top_ids"] if "teacher_top_ids" in batch.keys() else None


def predicted(batch: TensorDict) -> Tensor:
    """Tokens of which a forward computes outputs, (B, T) bool: those that train, and those that are observed."""
    keep: Tensor = batch["loss_mask"]
    return keep | batch["observation_mask"] if "observation_mask" in batch.keys() else keep


def chosen_places(select: Tensor) -> Tensor:
    """The places (Q,) of selected tokens (B, T) among the flattened (B, T - 1) from the second one of each row on.

    A host that reads them from a mask on a GPU waits for it.
    """
    return select[:, 1:].flatten().nonzero()[:, 0]


def rows_and_columns(chosen: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The row and the column (Q,) of each chosen token among tokens (B, T); see `chosen_places`."""
    width = max(1, shape[1] - 1)
    return chosen // width, chosen % width + 1


def lengths(batch: TensorDict) -> Tensor:
    """Real tokens per row, (B,) int64."""
    return batch["tokens", "attention_mask"].sum(-1)


def fields(batch: TensorDict) -> list[dict[str, Any]]:
    """The plain dict of every row."""
    return batch.get("fields").tolist()


def check_columns(stages: Iterable[tuple[str, Sequence[str], Sequence[str]]]) -> None:
    """Checks that every column that a stage reads was written by an earlier one, and that none has two writers.

    Args:
        stages: (yaml key, columns read, columns written), in the order of a step.

    Raises:
        ValueError: names the key, the column, and the columns that are there.
    """
    writers: dict[str, str] = {}
    for key, reads, writes in stages:
        for column in reads:
            if column not in writers:
                raise ValueError(
                    f"{key} reads the column {column!r}, which nothing before it writes (there are: "
                    f"{', '.join(sorted(writers))}); choose another {key} or add what writes {column!r}"
                )
        for column in writes:
            if column in writers:
                raise ValueError(f"{key} writes the column {column!r}, which {writers[column]} already writes")
            writers[column] = key
