"""The built-in tasks."""

import itertools

import pytest
from omegaconf import OmegaConf

from rft.data.encode.tokenizer import characters
from rft.data.rows.judge_data import Question
from rft.data.rows.symbolic import FIELDS, TASKS, Products, Symbolic
from tests.helpers import CONFIG


def load(task="reverse", split="train", count=300, length=(2, 4), slips=0.5, seed=0, required=("prompt", "answer")):
    return Symbolic("data.train", task, split, count, list(length), slips, seed).load(required)


def right(task, digits):
    if task == "reverse":
        return "".join(digits[place] for place in range(len(digits) - 1, -1, -1))
    if task == "sort":
        return "".join(digit * digits.count(digit) for digit in "0123456789")
    total = 0
    for digit in digits:
        total += "0123456789".index(digit)
    return f"{total}"


@pytest.mark.parametrize("task", ["reverse", "sort", "add"])
def test_answers_are_right(task):
    rows = load(task)
    assert len(rows) == len({row["prompt"] for row in rows}) == 300
    for row in rows:
        name, digits = row["prompt"].removesuffix("=").split(" ")
        assert name == task and digits.isdigit() and 2 <= len(digits) <= 4
        assert row["answer"] == row["response"] == right(task, digits)
        assert row["demonstration"] in (digits, row["answer"])
        assert row["chosen"] == row["answer"] != row["rejected"]
        assert row["rejected"] == digits or digits == row["answer"]
        assert row["completion"] == row["chosen" if row["label"] else "rejected"]
        right_so_far = [
            "".join(row["completions"][: n + 1]) == row["answer"][: n + 1] for n in range(len(row["answer"]))
        ]
        assert row["labels"] == right_so_far and all(right_so_far) == row["label"]
    assert 100 < sum(row["label"] for row in rows) < 200
    assert {len(row["prompt"]) for row in rows} == {len(task) + 2 + length for length in (2, 3, 4)}


@pytest.mark.parametrize(("length", "seeds"), [((2, 4), (0, 1)), ((3, 3), (5, 5))])
def test_train_and_held_out_share_no_prompt(length, seeds):
    train = {row["prompt"] for row in load(count=800, length=length, seed=seeds[0])}
    held_out = {row["prompt"] for row in load(split="heldout", count=80, length=length, seed=seeds[1])}
    assert len(train) == 800 and len(held_out) == 80
    assert not train & held_out


def test_the_two_splits_are_all_there_is():
    """Every string of two digits is in exactly one of them, whatever the seed."""
    prompts = {f"reverse {a}{b}=" for a, b in itertools.product("0123456789", repeat=2)}
    with pytest.raises(ValueError) as caught:
        load(count=100, length=(2, 2))
    train = int(str(caught.value).split("only ")[1].split(" ")[0])
    found = {row["prompt"] for seed in (0, 1) for row in load(count=train, length=(2, 2), seed=seed)}
    held_out = {row["prompt"] for row in load(split="heldout", count=100 - train, length=(2, 2), seed=3)}
    assert len(found) == train
    assert found | held_out == prompts


def test_rows_depend_on_the_seed_alone():
    assert load(seed=4) == load(seed=4)
    assert load(seed=4) != load(seed=5)


def test_slips_are_the_share_of_demonstrations_that_copy():
    def copies(slips):
        rows = [row for row in load(count=2000, length=(4, 4), slips=slips) if row["answer"] != row["prompt"][8:12]]
        return sum(row["demonstration"] == row["prompt"][8:12] for row in rows) / len(rows)

    assert copies(0.0) == 0.0
    assert copies(1.0) == 1.0
    assert abs(copies(0.6) - 0.6) < 0.05  # four standard errors of 2,000 draws


def test_more_rows_than_there_are():
    message = r"^data\.train\.count=99: only \d+ different prompts were found; lower it, or widen data\.train\.length$"
    with pytest.raises(ValueError, match=message):
        load(count=99, length=(1, 1))


def test_a_field_that_the_task_does_not_have():
    with pytest.raises(ValueError, match=r"^data\.train: the built-in tasks have no field 'rationale'"):
        load(required=("prompt", "rationale"))


def strings(value):
    """The texts of a value of a row."""
    return [value] if isinstance(value, str) else value if isinstance(value, list) else []


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_built_in_alphabet_has_every_character_of_the_tasks(task, split):
    alphabet = OmegaConf.load(CONFIG / "actor" / "tokenizer" / "characters.yaml").alphabet
    tokenizer = characters(alphabet=alphabet)
    questions = [
        Question.of(OmegaConf.to_container(OmegaConf.load(CONFIG / "data" / "question" / f"{name}.yaml")), "question")
        for name in ("short_good", "short_better")
    ]
    separator = OmegaConf.load(CONFIG / "algorithm" / "source" / "steps.yaml").separator
    texts = [separator]
    for row in load(task, split, required=FIELDS):
        texts += [text for value in row.values() for text in strings(value) if not isinstance(text, bool)]
        texts += [questions[0].ask(row, response=row["chosen"])]
        texts += [questions[1].ask(row, a=row["chosen"], b=row["rejected"])]
    assert len(texts) > 3000
    unknown = {text for text in texts if tokenizer.unk_token_id in tokenizer(text).input_ids}
    assert unknown == set()


def products(**changes):
    return Products(
        "data.train", **{"split": "train", "count": 300, "digits": 2, "slips": 0.5, "seed": 0, **changes}
    ).load([])


def test_products_and_their_demonstrations():
    found = products()
    called = 0
    for row in found:
        left, right = row["prompt"].removesuffix("=").split("*")
        assert row["answer"] == str(int(left) * int(right)) and len(left) == len(right) == 2
        *before, last = row["demonstration"]
        assert len(last["content"]) == len(row["answer"]) and last["role"] == "assistant"
        if before:
            called += 1
            assert [m["content"] for m in before] == [f"?{left}*{right}", row["answer"]]
            assert [m["role"] for m in before] == ["assistant", "tool"] and last["content"] == row["answer"]
    assert 100 < called < 200, "half of the demonstrations guess"
    assert products() == found and products(seed=1) != found


def test_held_out_products_do_not_train():
    assert not {row["prompt"] for row in products()} & {row["prompt"] for row in products(split="heldout", count=200)}


def test_wrong_options_of_products():
    with pytest.raises(ValueError, match=r"data\.train\.count=99: only \d+ different prompts"):
        products(digits=1, count=99)
    with pytest.raises(ValueError, match="no field 'steps'"):
        Products("data.train", "train", 5, 2, 0.5, 0).load(["steps"])
