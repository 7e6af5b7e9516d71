"""From the record of a text to its batch row, by hand."""

from dataclasses import replace

import pytest
import torch

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.encoded import EncodedText
from rft.batch.row_fields import EPISODE_FIELD
from rft.batch.trajectory import Finish, Segment, Trajectory, given_segments, to_row, to_rows

PROMPT = Segment([5, 6], trains=False)
FIRST = Segment([7], True, [-0.25], [3])
TOOL = Segment([90, 91], trains=False)
SECOND = Segment([8, 9], True, [-0.5, -1.0], [3, 4])


def plain(value):
    """Tensors as lists, with their types."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return (value.tolist(), value.dtype) if isinstance(value, torch.Tensor) else value


def test_two_sampled_segments_around_a_given_one():
    row = {"prompt": "p"}
    found = to_row(
        Trajectory([PROMPT, FIRST, TOOL, SECOND], Finish("length", "text"), row), group=3, unit=13, turns=True
    )
    assert plain(found) == {
        "tokens": {
            "input_ids": ([5, 6, 7, 90, 91, 8, 9], torch.int64),
            "attention_mask": ([1] * 7, torch.int64),
        },
        "response_mask": ([False, False, True, False, False, True, True], torch.bool),
        "group": 3,
        "unit": 13,
        "truncated": True,
        "fields": {"prompt": "p", "text": "text", "finish_reason": "length"},
        "rollout_logprobs": ([0.0, 0.0, -0.25, 0.0, 0.0, -0.5, -1.0], torch.float32),
        "version": ([0, 0, 3, 0, 0, 3, 4], torch.int64),
        "turn": ([0, 0, 1, 0, 0, 2, 2], torch.int64),
    }
    assert row == {"prompt": "p"}, "the row of the data set stays as it is"


def test_one_sampled_segment_has_no_turn():
    found = to_row(Trajectory([PROMPT, SECOND], Finish("stop", ""), {}), group=0, unit=0)
    assert set(found) == {*SOURCE_COLUMNS, "rollout_logprobs", "version"} and found["truncated"] is False
    counted = to_row(Trajectory([PROMPT, SECOND], Finish("stop", ""), {}), group=0, unit=0, turns=True)
    assert counted["turn"].tolist() == [0, 0, 1, 1], "in a batch that has the column, every row has it"


def test_given_tokens_alone():
    row = {"prompt": "p", "response": "r"}
    found = to_row(Trajectory(given_segments([1, 2, 3, 4], [False, True, True, False]), None, row), group=2, unit=2)
    assert plain(found) == {
        "tokens": {"input_ids": ([1, 2, 3, 4], torch.int64), "attention_mask": ([1, 1, 1, 1], torch.int64)},
        "response_mask": ([False, True, True, False], torch.bool),
        "group": 2,
        "unit": 2,
        "truncated": False,
        "fields": row,
    }


def test_a_sampled_text_without_its_numbers_has_no_columns_of_the_sampling():
    found = to_row(Trajectory([PROMPT, Segment([7], True)], Finish("length", "x"), {}), group=0, unit=0)
    assert set(found) == set(SOURCE_COLUMNS) and found["truncated"] is True
    assert found["response_mask"].tolist() == [False, False, True]


def test_rows_of_one_trajectory_share_its_numbers_and_count_its_turns_together():
    dialogue = Trajectory([PROMPT, TOOL, SECOND], Finish("stop", "end"), {"q": 1}, ([PROMPT, FIRST],), {"turns": 2})
    assert dialogue.turns == 2 and dialogue.sampled_tokens == len(FIRST.tokens) + len(SECOND.tokens)
    first, second = to_rows(dialogue, group=3, unit=7)
    assert [row["trajectory"] for row in (first, second)] == [7, 7] == [row["unit"] for row in (first, second)]
    assert first["turn"].tolist() == [0] * len(PROMPT.tokens) + [1] * len(FIRST.tokens)
    assert second["turn"].tolist()[-2:] == [2, 2] and second["fields"][EPISODE_FIELD] == {"turns": 2}
    [alone] = to_rows(Trajectory([PROMPT], Finish("stop", ""), {}), group=0, unit=0)
    assert not alone["rollout_logprobs"].any() and not alone["turn"].any(), "an episode that failed at once"
    with pytest.raises(AssertionError, match="to_rows"):
        to_row(dialogue, group=0, unit=0, turns=True)


def test_an_answer_with_an_inserted_text_is_one_turn():
    inserted, rest = Segment([50], trains=False, continues=True), replace(SECOND, continues=True)
    stopped = [PROMPT, FIRST, inserted, rest]
    dialogue = Trajectory([*stopped, TOOL, FIRST], Finish("stop", ""), {}, (stopped,), {})
    assert dialogue.turns == 3 and dialogue.forced_stops == 2 and dialogue.sampled_tokens == 7
    first, second = to_rows(dialogue, group=0, unit=0)
    assert first["turn"].tolist() == [0, 0, 1, 1, 1, 1] and second["turn"].tolist() == [0, 0, 2, 2, 2, 2, 0, 0, 3]
    assert first["response_mask"].tolist() == [False, False, True, False, True, True]
    alone = to_row(Trajectory(stopped, Finish("stop", ""), {}), group=0, unit=0)
    assert "turn" not in alone and alone["rollout_logprobs"].tolist() == [0, 0, -0.25, 0, -0.5, -1.0]
    assert alone["version"].tolist() == [0, 0, 3, 0, 3, 4]


def test_media_follow_their_segments():
    one, two = {"pixels": torch.ones(2, 3)}, {"pixels": torch.zeros(1, 3)}
    pictured = Segment(EncodedText([5, 6], media=one), False)
    found = to_row(Trajectory([pictured, FIRST], Finish("stop", ""), {}), group=0, unit=0)
    assert found["media"] is one, "rows of a group share it"
    both = to_row(Trajectory([pictured, FIRST, Segment(EncodedText([9], media=two), False)], None, {}), group=0, unit=0)
    assert both["media"]["pixels"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert "media" not in to_row(Trajectory([PROMPT], None, {}), group=0, unit=0)


def test_segments_of_a_given_text_are_its_runs():
    assert given_segments([1, 2, 3, 4, 5], [False, False, True, False, False]) == [
        Segment([1, 2], False), Segment([3], True), Segment([4, 5], False)
    ]  # fmt: skip
    assert given_segments([], []) == []


def test_rows_of_different_lengths_and_turns_make_one_batch():
    rows = [[PROMPT, FIRST, TOOL, SECOND], [PROMPT, SECOND]]
    batch = collate(
        [to_row(Trajectory(parts, Finish("stop", ""), {}), group=n, unit=n, turns=True) for n, parts in enumerate(rows)]
    )
    assert batch["turn"].tolist() == [[0, 0, 1, 0, 0, 2, 2], [0, 0, 1, 1, 0, 0, 0]]


def test_what_contradicts_itself_is_refused():
    with pytest.raises(AssertionError, match="turns=True"):
        to_row(Trajectory([PROMPT, FIRST, TOOL, SECOND], Finish("stop", ""), {}), group=0, unit=0)
    with pytest.raises(AssertionError, match="one number a token"):
        Segment([1, 2], True, [-1.0], [0, 0])
    with pytest.raises(AssertionError, match="a log-probability and a version"):
        Segment([1], True, [-1.0])
