import pytest

from rft.data.rows.piles import Piles


def piles(**changed):
    options = {"count": 12, "stones": (5, 8), "most": 3, "environment": "nim", "winning": False, "seed": 0}
    return Piles("data.train", **(options | changed))


def test_rows_go_through_the_piles():
    rows = piles().load(["prompt"])
    assert [row["stones"] for row in rows] == [5, 6, 7, 8] * 3
    assert [row["prompt"] for row in rows[:2]] == ["5:", "6:"]
    assert {row["environment"] for row in rows} == {"nim"}
    assert [row["stones"] for row in piles(winning=True).load([])[:4]] == [5, 6, 7, 5]  # 8 is lost by the first player


def test_a_demonstration_is_one_side_of_a_legal_game():
    seats = set()
    for row in piles(count=200).load(["demonstration"]):
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


def test_errors():
    with pytest.raises(ValueError, match=r"data\.train\.stones=\[8, 8\]: there is no such pile"):
        piles(stones=(8, 8), winning=True)
    with pytest.raises(ValueError, match=r"data\.train: the built-in game has no field 'answer'"):
        piles().load(["answer"])
