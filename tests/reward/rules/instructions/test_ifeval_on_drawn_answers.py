"""The checks on drawn answers, beside those of lm_eval's IFEval; every other verdict has its reason here."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rft.reward import REWARDS
from tests.reward.rules.instructions.drawn_answers import Case, cases

FOLDER = os.environ.get("RFT_LM_EVAL_DIR", "")  # with lm_eval 0.4.13, what its IFEval imports, and the models of punkt
# Without the other tasks, which import datasets. nltk reads the model of punkt from files, the package has it as code.
JUDGE = """
import functools, importlib.util, json, logging, os, pathlib, sys, types
os.environ["NLTK_DATA"] = sys.argv[1]
tasks = types.ModuleType("lm_eval.tasks")
tasks.__path__ = [str(pathlib.Path(importlib.util.find_spec("lm_eval").origin).with_name("tasks"))]
sys.modules["lm_eval.tasks"] = tasks
import langdetect
from nltk.tokenize.punkt import PunktParameters, save_punkt_params
from punkt.data import english
model = PunktParameters()
model.abbrev_types, model.collocations = english.ABBREV_TYPES, english.COLLOCATIONS
model.sent_starters, model.ortho_context = english.SENT_STARTERS, english.ORTHO_CONTEXT
folder = pathlib.Path(sys.argv[1]) / "tokenizers/punkt_tab/english"
folder.mkdir(parents=True, mode=0o700)
save_punkt_params(model, str(folder))
from lm_eval.tasks.ifeval import utils
langdetect.DetectorFactory.seed = 0
langdetect.detect = functools.cache(langdetect.detect)
logging.disable()
tests = {"strict": utils.test_instruction_following_strict, "loose": utils.test_instruction_following_loose}
verdicts = []
for name, arguments, text, mode in json.load(sys.stdin):
    try:
        verdicts.append(tests[mode](utils.InputExample(0, [name], "", [arguments]), text).follow_all_instructions)
    except Exception as error:
        verdicts.append(type(error).__name__)
print(json.dumps(verdicts))
"""
Reason = tuple[str, int, Callable[[Case], bool]]


def _texts(why: str, count: int, pattern: str) -> Reason:
    """A reason for answers in which a pattern occurs."""
    return why, count, lambda case: re.search(pattern, case.text, re.MULTILINE) is not None


def _words(count: int) -> Reason:
    """The reason for words to look for that are other words as regular expressions."""
    why = "words to look for are texts, not regular expressions"
    return why, count, lambda case: re.search(r"[.+]", str([*case.arguments.values()])) is not None


# Of an instruction the reasons, how many verdicts differ for each, strict and loose, and which answers it explains.
DIFFERENCES: dict[str, list[Reason]] = {
    "keywords:existence": [_words(36), _texts("STRASSE is straße in capitals", 16, "STRASSE")],
    "keywords:frequency": [_words(14)],
    "keywords:forbidden_words": [_words(37)],
    "language:response_language": [_texts("a text without letters is in no language", 8, r"\A[^a-z]+\Z")],
    "length_constraints:number_sentences": [
        _texts("abbreviations: lm_eval is wrong", 54, r"e\.g\.|A\. B\.|etc\.|Fig\.|No\.|approx\.|Inc\.|al\.|U\.S\."),
        _texts("numbers and letters of a list are no sentences", 15, r"(?:^|\s)[1A]\. "),
        _texts("a mark of Japanese ends a sentence: lm_eval is wrong", 7, "\u3002"),
        _texts("marks alone are no sentence", 9, r"(?:^|\s)(?:\.\.\.|\*+)(?:\s|$)|!!!"),
        _texts("marks in quotes or brackets before a small letter end none", 4, r'\?" and|\.\) then'),
    ],
    "length_constraints:nth_paragraph_first_word": [_texts("empty paragraphs do not count", 10, r"\n\s*\n\s*\n")],
    "detectable_content:postscript": [_words(14)],
    "detectable_format:number_bullet_lists": [_texts("a bullet behind an empty one: lm_eval is wrong", 4, r"^\*\n")],
    "detectable_format:multiple_sections": [_words(22)],
    "detectable_format:json_format": [
        _texts("``` at the end without one at the beginning", 2, r"\A[^`]+```\Z"),
        _texts("json behind ``` in any case", 1, "jsoN"),
        _texts("nested too deep for Python: lm_eval raises an error", 2, r"\[{9000}"),
    ],
    "detectable_format:title": [_texts("signs alone are no title", 6, "[<>] [<>]")],
    "startend:quotation": [_texts("white space in front is no line", 1, r"\A\n")],
    "change_case:capital_word_frequency": [
        _texts("a word may hold an apostrophe or &: lm_eval is wrong", 32, "['\u2019&]"),
        _texts("a slash separates words", 10, "/"),
    ],
    "change_case:english_capital": [_texts("Spanish and Italian: lm_eval is wrong", 4, "JARDÍN|GIARDINO")],
}
VERDICTS = 7764


def reason(case: Case) -> str | None:
    """Why the two judge an answer differently; None where no reason is listed."""
    return next((why for why, _, explains in DIFFERENCES.get(case.name, []) if explains(case)), None)


def test_the_docs_have_the_figures() -> None:
    others = sum(count for reasons in DIFFERENCES.values() for _, count, _ in reasons)
    text = (Path(__file__).parents[4] / "docs/rewards.md").read_text().replace("\n", " ")
    assert f"{VERDICTS:,} verdicts" in text
    assert f"{VERDICTS - others:,} agree, and each of the {others} others" in text


def judged(case: Case, mode: str) -> bool:
    term = REWARDS.build({"name": "ifeval", "mode": mode, "score": "all"}, "reward.terms.ifeval")
    return term(case.text, {"instruction_id_list": [case.name], "kwargs": [case.arguments]}) == 1.0


def test_drawn_answers_are_judged_as_their_tables_say() -> None:
    known = [case for case in cases() if case.follows is not None]
    assert [case for case in known if judged(case, "strict") != case.follows] == []
    assert len(known) > 1000 and 0.3 < sum(case.follows is True for case in known) / len(known) < 0.7


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.skipif(not FOLDER, reason="RFT_LM_EVAL_DIR is not set")
def test_the_checks_beside_those_of_lm_eval(tmp_path: Path) -> None:
    asked = [(case, mode) for case in cases() for mode in ("strict", "loose")]
    run = subprocess.run(
        [sys.executable, "-c", JUDGE, str(tmp_path)],
        input=json.dumps([(*case[:3], mode) for case, mode in asked]),
        env=os.environ | {"PYTHONPATH": FOLDER},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    verdicts = json.loads(run.stdout)
    assert len(verdicts) == len(asked) == VERDICTS
    others = [ask for ask, verdict in zip(asked, verdicts, strict=True) if judged(*ask) != verdict]
    assert [(case, mode) for case, mode in others if reason(case) is None] == []
    counts = Counter((case.name, reason(case)) for case, _ in others)
    assert counts == {(name, why): count for name, reasons in DIFFERENCES.items() for why, count, _ in reasons}
