import pytest

from rft.rollout.environment.builtin.guessing import Guessing


def game(prompt="a", low=1, high=100):
    made = Guessing(low=low, high=high, reply=("higher", "lower"))
    assert made.reset(prompt=prompt, other=1) is None
    return made


def test_halving_finds_the_number():
    for prompt in ("a", "b", [{"role": "user", "content": "c"}]):
        made, low, high = game(prompt), 1, 100
        for _ in range(7):
            guess = (low + high) // 2
            reply, reward, ended, truncated, _ = made.step(f" {guess}\n")
            if ended:
                break
            assert reward == 0.0 and not truncated and reply in ("higher", "lower")
            low, high = (guess + 1, high) if reply == "higher" else (low, guess - 1)
        assert reward == 1.0 and ended


def test_a_row_has_one_number():
    assert game("a").step("7") == game("a").step("7")
    assert {game(str(n), 0, 1).step("0")[1] for n in range(20)} == {0.0, 1.0}


@pytest.mark.parametrize("action", ["", "seven", "1.5", "-3", "٣"])
def test_what_is_no_number_ends_the_game(action):
    assert game().step(action) == ("", 0.0, True, False, {})


def test_wrong_bounds():
    with pytest.raises(ValueError, match="low=5 is above high=2"):
        game(low=5, high=2)
