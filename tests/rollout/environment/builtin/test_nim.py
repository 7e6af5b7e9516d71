import pytest

from rft.rollout.environment.builtin.nim import Nim, NimOpponent


def test_the_player_who_takes_the_last_stone_wins():
    game = Nim(most=3)
    assert game.reset(stones=6, prompt="6:") is None
    seen = []
    for taken in ("2", " 1\n", "3"):
        seen.append(game.get_observation())
        ended, _ = game.step(taken)
    assert seen == [(0, ""), (1, "4:"), (0, "3:")]
    assert ended and game.get_rewards() == [1.0, 0.0]


@pytest.mark.parametrize("action", ["", "0", "4", "-1", "two", "1.0", "٣"])
def test_a_wrong_action_loses(action):
    game = Nim(most=3)
    game.reset(stones=9)
    assert not game.step("1")[0]
    assert game.step(action)[0] and game.get_rewards() == [1.0, 0.0]


def test_more_stones_than_there_are_cannot_be_taken():
    game = Nim(most=3)
    game.reset(stones=2)
    assert game.step("3")[0] and game.get_rewards() == [0.0, 1.0]


def test_the_opponent_wins_wherever_it_can():
    game = NimOpponent(most=3)
    game.reset(stones=7)
    assert game.step("1") == ("4:", 0.0, False, False, {})  # of 6 it takes 2
    assert game.step("1") == ("0:", 0.0, True, False, {})  # and the last 3
    game.reset(stones=7)
    assert game.step("3") == ("3:", 0.0, False, False, {})  # of 4 it takes 1
    assert game.step("3") == ("", 1.0, True, False, {})
    game.reset(stones=7)
    assert game.step("x") == ("", 0.0, True, False, {})
