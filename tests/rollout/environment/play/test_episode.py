"""Games of several players, all of which are the policy."""

import pytest

from rft.rollout.environment.options import EnvironmentOptions, Environments
from tests.rollout.environment.play import environments
from tests.rollout.environment.scripted import play

HERE = environments.__name__
COUNT = {"count": {"_target_": f"{HERE}.Count"}}
ROW = {"prompt": "Q"}


def sides(found):
    """What each player of the first row read and said."""
    return [[message["content"] for message in one.episode["messages"]] for one in found[0]]


def counts_up(prompt):
    """The number after that in the last brackets; the first players say 1."""
    return str(int(prompt.split("[")[-1].split("]")[0]) + 1) if "[" in prompt else "1"


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_each_player_has_a_dialogue_a_trajectory_and_a_reward(workers):
    found, _ = play(counts_up, COUNT, [ROW], samples=3, workers=workers)
    # said: 1 1 1 2 3 4 5 6 7 8 9 by the players 0 1 2 0 1 2 0 1 2 0 1
    assert sides(found) == [
        ["Q go", "1", "[1]", "2", "[4]", "5", "[7]", "8"],
        ["Q go", "1", "[2]", "3", "[5]", "6", "[8]", "9"],
        ["Q go", "1", "[3]", "4", "[6]", "7"],
    ]
    assert [one.episode["reward"] for one in found[0]] == [16.0, 19.0, 12.0]
    assert [one.episode["turns"] for one in found[0]] == [4, 4, 3]
    assert [one.episode["agent"] for one in found[0]] == [0, 1, 2]
    assert [(one.text, one.finish.reason) for one in found[0]] == [("8", "stop"), ("9", "stop"), ("7", "stop")]
    for one in found[0]:
        assert sum(segment.sampled for segment in one.segments) == one.episode["turns"]


def test_samples_are_the_players_of_games_and_the_last_game_may_lack_some():
    found, sampler = play(counts_up, COUNT, [ROW, ROW], samples=4)
    for group in found:
        assert [one.episode["agent"] for one in group] == [0, 1, 2, 0]
        assert [one.episode["reward"] for one in group] == [16.0, 19.0, 12.0, 16.0]
    assert sum(map(len, sampler.batches)) == 4 * 11  # two games for each row


def test_agents_of_several_classes_are_numbered_by_player():
    classes = {"one": {"_target_": f"{HERE}.Guess"}, **COUNT, "last": {"_target_": f"{HERE}.Guess"}}
    rows = [{**ROW, "environment": name, "number": 1} for name in ("last", "count", "one")]
    found, _ = play(counts_up, classes, rows, samples=3)
    assert [[one.episode["agent"] for one in group] for group in found] == [[4, 4, 4], [1, 2, 3], [0, 0, 0]]


def test_a_limit_of_turns_ends_the_game_and_truncates_the_player():
    found, _ = play(counts_up, COUNT, [ROW], samples=3, max_turns=2)
    assert [one.episode["reward"] for one in found[0]] == [3.0, 1.0, 1.0]
    assert [one.finish.reason for one in found[0]] == ["length", "stop", "stop"]


def test_a_player_without_a_turn_has_no_score():
    found, _ = play(lambda prompt: "9", COUNT, [ROW], samples=3)
    first, *others = found[0]
    assert first.episode["failed"] is None and first.episode["reward"] == 9.0
    for one in others:
        assert one.episode["failed"].startswith("turns:")
        assert [segment.trains for segment in one.segments] == [False]


@pytest.mark.parametrize(
    ("write", "fails", "reason"),
    [
        (lambda prompt: "raise", "", "ZeroDivisionError: step raised ZeroDivisionError: by zero"),
        (counts_up, "player", "get_observation: it returned (3, ''); it must return (player, observation)"),
        (counts_up, "rewards", "get_rewards: it returned [1.0], not a reward for each of 3 players"),
    ],
)
def test_a_game_that_fails_scores_no_player(write, fails, reason):
    found, _ = play(write, COUNT, [{**ROW, "fails": fails}], samples=3)
    assert all(one.episode["failed"].startswith(reason) for one in found[0])
    assert all(one.episode["reward"] is None for one in found[0])


class NoPlayers:
    def reset(self, **row): ...
    def get_observation(self): ...
    def step(self, action): ...
    def get_rewards(self): ...


class NoRewards:
    players = 2

    def reset(self, **row): ...
    def get_observation(self): ...
    def step(self, action): ...


class WithTool(NoPlayers):
    players = 2

    def look(self) -> str:
        """Looks."""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoPlayers", "NoPlayers has get_observation, so it is a game, and lacks players = 2, or more; add it"),
        ("NoRewards", "NoRewards has get_observation, so it is a game, and lacks get_rewards; add it"),
        ("WithTool", r"the game WithTool has tools \(look\); begin their names with _"),
    ],
)
def test_the_contract_of_a_game(name, said):
    node = {"_target_": f"{__name__}.{name}"}
    with pytest.raises(ValueError, match=rf"environment\.classes\.x\._target_: {said}"):
        Environments.of(EnvironmentOptions({"x": node}, {"name": "hermes"}, 1, 1, None, None, 1, "inline", 1, None))
