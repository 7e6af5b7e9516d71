"""Random input: the first ones of each kind, what a failure prints, and what such input has found."""

import json
import math
import sys
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import fuzz
from fuzzing import answers, rows

from rft.remote.http_client import BadResponse

SEED = 5


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_the_first_inputs_pass_and_are_the_same_ones_each_time(kind):
    made = [fuzz.KINDS[kind].make(Random(f"{SEED}/{number}")) for number in range(40)]
    assert made == [fuzz.KINDS[kind].make(Random(f"{SEED}/{number}")) for number in range(40)]
    assert len({str(one) for one in made}) > 20
    assert [fuzz.fault(kind, SEED, number) for number in range(40)] == [None] * 40


@pytest.mark.parametrize("kind", answers.READERS)
def test_answers_as_servers_give_them_are_read(kind):
    answers.check_read(answers.READERS[kind].read(answers.READERS[kind].good))


def about(**changes):
    return {"meta_info": answers.ABOUT | changes}


def given(**changes):
    return {"meta_info": answers.INPUT | changes}


def test_numbers_that_do_not_fit_are_noticed():
    for found in ([math.nan], [{"score": 1.0, "f1": True}], [{"score": "1"}]):
        with pytest.raises(AssertionError, match="no finite numbers"):
            answers.check_read(found)


@pytest.mark.parametrize(
    ("kind", "part", "said"),
    [
        ("vllm", {"choices": [answers.CHOICE | {"weight_versions": [answers.SPAN | {"version": 3}]}]}, "partition"),
        ("vllm", {"choices": [answers.CHOICE | {"finish_reason": "x" * 9000}]}, "finish reason"),
        ("vllm", {"prompt_token_ids": [5, "6"]}, "ids that are not"),
        (
            "sglang",
            about(output_token_logprobs=[[-1.0, 5, 0], [-1.0, "6", 0]]) | {"output_ids": [5, "6"]},
            "ids that are not",
        ),
        ("sglang", about(output_token_logprobs=[[False, 5, 0], [-1.0, 6, 0]]), "not log-prob"),
        ("sglang text", given(input_top_logprobs=[None, *[[[-0.5, 5], [-1.0, -1]]] * 2]), "ids that are not"),
        ("sglang text", given(input_token_logprobs=[[None, 5], [None, 6], [-1.0, 7]]), "no numbers"),
        ("vllm text", {"choices": [{"prompt_logprobs": [None, answers.TOP, []]}]}, "indices must be"),
    ],
)
def test_answers_that_were_read_or_ended_a_run_are_bad_responses(kind, part, said):
    reader = answers.READERS[kind]
    with pytest.raises(BadResponse, match=said) as error, answers.CLIENT.parse("the answer"):
        reader.read(reader.good | part)
    assert len(str(error.value)) < 600


def test_a_message_without_a_content_is_refused_where_no_template_renders_it():
    made = {
        "kind": "prompts",
        "template": "none",
        "train_on": "response",
        "lines": ['{"prompt": [{"role": "user", "content": "a"}, {"role": "a"}]}'],
    }
    with pytest.raises(ValueError, match=r"set data\.template=chat"):
        rows.tokens(made)


@pytest.mark.parametrize("kind", rows.ROWS)
@pytest.mark.parametrize("number", [0, 1])
def test_rows_as_people_write_them_become_tokens(kind, number):
    row = rows.ROWS[kind][number]
    template = "none" if "text" in row and number == 0 else "chat"
    made = {"kind": kind, "template": template, "train_on": "response", "lines": [json.dumps(row)]}
    assert rows.tokens(made)


def test_a_failure_prints_how_to_repeat_it(monkeypatch, capsys):
    def check(made):
        assert made["kind"] != "sglang", "what is wrong"

    monkeypatch.setattr(answers, "check", check)
    assert fuzz.main(["answers", "--seconds", "0.2", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "answers: seed 3, input" in printed and "AssertionError: what is wrong" in printed
    command = next(line.split() for line in printed.splitlines() if "--only" in line)
    number = command[command.index("--only") + 1]
    assert fuzz.main(["answers", "--seed", "3", "--only", number]) == 1
    found = capsys.readouterr()
    assert "'kind': 'sglang'" in found.out and "what is wrong" in found.err
    assert fuzz.main(["rows", "--seed", "3", "--only", "0"]) == 0
