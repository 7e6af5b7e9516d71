"""Scores of responses to rows of IFEval: all or a share of the instructions, strict or loose."""

import importlib.util
import json

import pytest

from rft.data.rows.sources import HubRows
from rft.reward import REWARDS
from rft.reward.rules.instructions.ifeval import _build, variants
from tests.reward.reward_of import score_of

ROW = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words", "startend:end_checker"],
    "kwargs": [{}, {"relation": "at least", "num_words": 4.0, "keyword": None}, {"end_phrase": "The end."}],
}


def term(mode="strict", score="all"):
    node = {"name": "ifeval", "mode": mode, "score": score}
    return REWARDS.build(node, "reward.terms.ifeval")


@pytest.mark.parametrize(
    ("response", "share", "loose"),
    [
        ("Once upon a time. The end.", 1, 1),
        ("Once, upon a time. The end.", 2 / 3, 2 / 3),
        ("The end.", 2 / 3, 2 / 3),
        ("Yes, no", 0, 0),
        ("Sure, here it is:\nOnce upon a time. The end.", 2 / 3, 1),  # without the first line
        ("Once upon a time. The end.\nOK, bye", 1 / 3, 1),  # without the last line
        ("Sure, so:\nOnce upon a time. The end.\nBye, then", 1 / 3, 1),  # without both
        ("Once upon a time. *The end.*", 2 / 3, 1),  # without asterisks
        ("  \n", 0, 0),
    ],
)
def test_all_or_a_share_strict_or_loose(response, share, loose):
    assert term(score="share")(response, ROW) == pytest.approx(share)
    assert term(score="share", mode="loose")(response, ROW) == pytest.approx(loose)
    assert term()(response, ROW) == float(share == 1) and term(mode="loose")(response, ROW) == float(loose == 1)


def test_each_instruction_may_be_followed_by_another_variant():
    """As in the published program: the variants are tried for each instruction by itself."""
    row = {"instruction_id_list": ["startend:quotation", "detectable_format:title"], "kwargs": [{}, {}]}
    response = '<<Title>>\n"text"'
    assert term(score="share")(response, row) == 0.5 and term(mode="loose")(response, row) == 1.0


def test_the_reasoning_is_no_part_of_the_response():
    row = {"instruction_id_list": ["startend:quotation", "punctuation:no_comma"], "kwargs": [{}, {}]}
    response = '<think>So, quoted.</think>\n\n"Yes."'
    assert score_of("ifeval", response, row) == 1.0 and score_of("ifeval", response, row, reasoning=[]) == 0.0
    loose = score_of("ifeval", '<think>So.</think>\n\nSure:\n"Yes."', row, mode="loose")
    assert loose == 1.0, "its first line is not a blank one"
    assert score_of("ifeval", "<think>No end", row, score="share") == 0.0, "there is no answer"
    assert term(score="share")("", row) == 0.0, "an empty response follows nothing"


def test_the_eight_variants():
    assert variants("*a*\nb\nc") == ["*a*\nb\nc", "a\nb\nc", "b\nc", "b\nc", "*a*\nb", "a\nb", "b", "b"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kwargs": [{}]}, "must be lists of one length"),
        ({"instruction_id_list": [], "kwargs": []}, "must be lists of one length"),
        ({"kwargs": "[{}, {}, {}]"}, "must be lists of one length"),
        ({"kwargs": [{}, {}, {}]}, r"instruction 'length_constraints:number_words' of the row: kwargs\.num_words is"),
    ],
)
def test_rows_without_readable_instructions(changes, said):
    with pytest.raises(ValueError, match=said):
        term().call("gold", ROW | changes)


def test_a_row_about_a_language_needs_the_package(monkeypatch):
    row = {"instruction_id_list": ["change_case:english_lowercase"], "kwargs": [None]}
    _build.cache_clear()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "py3langid" else find(name))
    with pytest.raises(ValueError, match=r'needs the package py3langid: pip install "rft\[language\]"'):
        term().call("gold", row)
    term().call("gold", ROW)


def test_the_published_rows_are_read(tmp_path, resolved):
    """A row as the file has it, and as a table of the hub has it: with every argument of every other row, null."""
    published = {"key": 1000, "prompt": "Write a story. Do not use commas.", **ROW}
    path = tmp_path / "input_data.jsonl"
    path.write_text(json.dumps(published) + "\n")
    overrides = (f"data.eval.ifeval.path={path}", "data.eval.ifeval.split=null")
    node = resolved("data=benchmarks", "+data/rows@data.eval.ifeval=ifeval", *overrides)["data"]["eval"]["ifeval"]
    assert node.pop("_target_") == "rft.data.rows.sources.HubRows"
    [row] = HubRows(**node, key="data.eval.ifeval").load(["prompt", "instruction_id_list", "kwargs"])
    assert row["prompt"] == published["prompt"] and row["data_source"] == "ifeval"
    assert term()("Once upon a time. The end.", row) == 1.0
