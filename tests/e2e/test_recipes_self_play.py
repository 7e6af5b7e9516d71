"""The game of the recipe of self-play, and its rows."""

import sys
from pathlib import Path

import pytest

import rft

sys.path.append(str(Path(rft.__file__).parent.parent / "recipes" / "self_play"))

import nim_games


def test_the_player_who_takes_the_last_stone_wins():
    game = nim_games.Nim(most=3)
    assert game.reset(stones=6, prompt="6:") is None
    seen = []
    for taken in ("2", " 1\n", "3"):
        seen.append(game.get_observation())
        ended, _ = game.step(taken)
    assert seen == [(0, ""), (1, "4:"), (0, "3:")]
    assert ended and game.get_rewards() == [1.0, 0.0]


@pytest.mark.parametrize("action", ["", "0", "4", "-1", "two", "1.0", "٣"])
def test_a_wrong_action_loses(action):
    game = nim_games.Nim(most=3)
    game.reset(stones=9)
    assert not game.step("1")[0]
    assert game.step(action)[0] and game.get_rewards() == [1.0, 0.0]


def test_more_stones_than_there_are_cannot_be_taken():
    game = nim_games.Nim(most=3)
    game.reset(stones=2)
    assert game.step("3")[0] and game.get_rewards() == [0.0, 1.0]


def test_the_opponent_wins_wherever_it_can():
    game = nim_games.NimOpponent(most=3)
    game.reset(stones=7)
    assert game.step("1") == ("4:", 0.0, False, False, {})  # of 6 it takes 2
    assert game.step("1") == ("0:", 0.0, True, False, {})  # and the last 3
    game.reset(stones=7)
    assert game.step("3") == ("3:", 0.0, False, False, {})  # of 4 it takes 1
    assert game.step("3") == ("", 1.0, True, False, {})
    game.reset(stones=7)
    assert game.step("x") == ("", 0.0, True, False, {})


def games(**changed):
    options = {"count": 12, "stones": (5, 8), "most": 3, "environment": "nim", "winning": False, "seed": 0}
    return nim_games.Games("data.train", **(options | changed))


def test_rows_go_through_the_piles():
    rows = games().load(["prompt"])
    assert [row["stones"] for row in rows] == [5, 6, 7, 8] * 3
    assert [row["prompt"] for row in rows[:2]] == ["5:", "6:"]
    assert {row["environment"] for row in rows} == {"nim"}
    assert [row["stones"] for row in games(winning=True).load([])[:4]] == [5, 6, 7, 5]  # 8 is lost by the first player


def test_a_demonstration_is_one_side_of_a_legal_game():
    seats = set()
    for row in games(count=200).load(["demonstration"]):
        left, messages = row["stones"], row["demonstration"]
        seats.add(messages[0]["role"])
        for message in messages:
            if message["role"] == "user":
                assert 1 <= left - int(message["content"][:-1]) <= 3  # the other player has taken so many
                left = int(message["content"][:-1])
            else:
                assert 1 <= int(message["content"]) <= min(3, left)
                left -= int(message["content"])
        assert messages[-1]["role"] == "assistant" and left <= 3
    assert seats == {"user", "assistant"}


def test_a_pile_and_a_field_that_there_are_not():
    with pytest.raises(ValueError, match=r"data\.train\.stones=\[8, 8\]: there is no such pile"):
        games(stones=(8, 8), winning=True)
    with pytest.raises(ValueError, match=r"data\.train: the game has no field 'answer'"):
        games().load(["answer"])
