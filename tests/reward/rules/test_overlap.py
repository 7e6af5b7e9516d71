"""SQuAD's measures, with values worked out by hand."""

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.rules.overlap import words_of


def rule(metric: str, tag: str | None = None) -> Plugin:
    return REWARDS.build({"name": "overlap", "metric": metric, "tag": tag}, "reward.terms.overlap")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Norman Conquest!", ["norman", "conquest"]),
        ("a cat, an owl; the theatre", ["cat", "owl", "theatre"]),
        ("U.S.A.", ["usa"]),
        ("$1,000 (approx.)", ["1000", "approx"]),
        ("it\u2019s \u201cso\u201d", ["its", "so"]),  # quotation marks of Unicode
        ("rock-'n'-roll", ["rocknroll"]),
        ("北京\uff0c中国", ["北", "京", "中", "国"]),
        ("the Tōkyō 東京 tower", ["tōkyō", "東", "京", "tower"]),
        (" \n", []),
        ("A. The!", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


# (response, answer, f1, exact, contains)
VALUES = [
    ("Denver Broncos", "Denver Broncos", 1.0, 1.0, 1.0),
    ("The Denver Broncos.", "denver broncos", 1.0, 1.0, 1.0),
    ("Broncos", "Denver Broncos", 2 / 3, 0.0, 0.0),  # precision 1, recall 1/2
    ("It was the Denver Broncos", "Denver Broncos", 2 / 3, 0.0, 1.0),  # precision 2/4, recall 1
    ("Broncos of Denver", "Denver Broncos", 4 / 5, 0.0, 0.0),  # precision 2/3, recall 1
    ("no no no", "no", 1 / 2, 0.0, 1.0),  # a word counts once: precision 1/3, recall 1
    ("no no", "no no no no", 2 / 3, 0.0, 0.0),  # precision 1, recall 2/4
    ("party", "art", 0.0, 0.0, 0.0),  # a part of a word is none
    ("", "Denver", 0.0, 0.0, 0.0),
    ("the", "Denver", 0.0, 0.0, 0.0),
    ("1000 dollars", 1000, 2 / 3, 0.0, 1.0),
    ("中国首都北京", "北京", 1 / 2, 0.0, 1.0),  # precision 2/6, recall 1
    ("Paris", ["London", "Paris"], 1.0, 1.0, 1.0),
    ("in Paris, France", ["Paris", "Paris France", "the"], 4 / 5, 0.0, 1.0),  # 1/2 of the first, 4/5 of the second
]


@pytest.mark.parametrize(("response", "answer", "f1", "exact", "contains"), VALUES)
def test_values(response: str, answer: object, f1: float, exact: float, contains: float) -> None:
    row = {"answer": answer}
    assert rule("f1")(response, row) == pytest.approx(f1, abs=1e-12)
    assert rule("exact")(response, row) == exact
    assert rule("contains")(response, row) == contains


def test_the_text_of_a_tag_alone() -> None:
    row = {"answer": "Paris"}
    response = "<answer>London</answer> No: <answer> Paris.</answer> in France"
    assert rule("exact", "answer")(response, row) == 1.0
    assert rule("exact")(response, row) == 0.0
    assert rule("f1", "answer")("Paris", row) == 0.0
    assert rule("contains", "answer")("<answer>Paris", row) == 0.0


@pytest.mark.parametrize(
    ("response", "tag", "found"),
    [
        ("The Norman  Conquest!", None, "norman conquest"),
        ("It is <a>The Conquest</a>", "a", "conquest"),
        ("The Conquest", "a", None),
        ("the ...", None, None),
    ],
)
def test_what_is_extracted_is_equal_where_the_words_are(response: str, tag: str | None, found: str | None) -> None:
    assert rule("f1", tag).call("extract", response) == found


@pytest.mark.parametrize("answer", ["", "the", "?", ["", "a"], []])
def test_an_answer_without_a_word(answer: object) -> None:
    for metric in ("f1", "exact", "contains"):
        with pytest.raises(ValueError, match="the field 'answer' has no word besides articles and punctuation"):
            rule(metric).call("gold", {"answer": answer})


@pytest.mark.parametrize("answer", [{"text": ["Paris"]}, ["Paris", None], [["Paris"]]])
def test_an_answer_that_is_no_text(answer: object) -> None:
    with pytest.raises(ValueError, match="the field 'answer' is neither a text nor a list of texts"):
        rule("f1").call("gold", {"answer": answer})


def test_a_tag_with_brackets() -> None:
    with pytest.raises(ValueError, match=r"^reward\.terms\.overlap\.tag: '<answer>' is no name of a tag"):
        rule("f1", "<answer>")
