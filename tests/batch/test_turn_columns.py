import torch

from rft.batch.trajectory import Finish, Segment, Trajectory, to_rows
from rft.batch.turn_columns import TURN_COLUMNS, turn_column


def message(role, content):
    return {"role": role, "content": content}


def sampled(*ids):
    return Segment(list(ids), trains=True, logprobs=[-1.0] * len(ids), versions=[0] * len(ids))


def given(*ids):
    return Segment(list(ids), trains=False)


PROMPT = [message("system", "s"), message("user", "find it")]
RECORD = {
    "messages": [*PROMPT, message("assistant", "5"), message("user", "higher"), message("assistant", "7"),
                 message("user", "higher"), message("assistant", "8")],
    "opening": 2,
    "rewards": [0.25, -1.0, 3.0],
    "agent": 1,
}  # fmt: skip
DIALOGUE = Trajectory(  # the third turn is in a row of its own, whose context is rendered again
    [given(1, 2, 9, 4), sampled(8, 0)],
    Finish("stop", "8"),
    {},
    ([given(1, 2), sampled(5, 0), given(3, 4), sampled(7)],),
    RECORD,
)


def test_the_columns_of_a_dialogue_that_forks():
    first, second = to_rows(DIALOGUE, group=0, unit=0, columns=TURN_COLUMNS)
    assert first["turn"].tolist() == [0, 0, 1, 1, 0, 0, 2] and second["turn"].tolist() == [0, 0, 0, 0, 3, 3]
    assert first["turn_scores"].tolist() == [0, 0, 0, 0.25, 0, 0, -1] and first["turn_scores"].dtype == torch.float32
    assert second["turn_scores"].tolist() == [0, 0, 0, 0, 0, 3]
    assert first["observation_mask"].tolist() == [False] * 4 + [True] * 2 + [False]
    assert not second["observation_mask"].any(), "nothing was observed behind the first answer of this row"
    assert first["agent"] == second["agent"] == 1
    start, higher = first["anchor"][2].item(), first["anchor"][6].item()
    assert first["anchor"].tolist() == [0, 0, start, start, 0, 0, higher] and first["anchor"].dtype == torch.int64
    assert second["anchor"].tolist() == [0, 0, 0, 0, higher, higher] and 0 not in (start, higher) and start != higher


def test_a_state_is_what_was_shown_last():
    other = RECORD | {"messages": [*PROMPT, message("assistant", "1"), message("user", "lower")]}
    turn = torch.tensor([0, 1])
    assert turn_column("anchor", turn, other).equal(turn_column("anchor", turn, RECORD)), "the same prompt"
    assert turn_column("anchor", torch.tensor([0, 0]), RECORD | {"messages": [], "opening": 0}).tolist() == [0, 0]


def test_an_answer_without_a_step_has_no_reward():
    cut = RECORD | {"rewards": [0.25]}
    assert turn_column("turn_scores", torch.tensor([1, 0, 2, 2]), cut).tolist() == [0.25, 0, 0, 0]
