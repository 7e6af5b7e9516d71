"""What a worker does in the sandbox, called in this process; attacks on whole workers are in test_pool_attacks.py."""

import os

from rft.reward.build import build_term
from rft.reward.sandbox.workers.worker import clear, facts

MODULE = "tests.reward.sandbox.workers.functions"


def test_the_working_folder_is_cleared(tmp_path):
    (tmp_path / "outside").write_text("x")
    work = tmp_path / "work"
    (work / "a" / "b").mkdir(parents=True)
    (work / "a" / "b" / "file").write_text("x")
    (work / "link").symlink_to(tmp_path / "outside")
    (work / "folder").symlink_to(tmp_path)
    assert clear(str(work)) and os.listdir(work) == []
    assert (tmp_path / "outside").read_text() == "x"
    assert not clear(str(tmp_path / "missing"))


FACTS = {
    "ours": {"reads": [], "rows_per_call": 1, "needs_truth": False},
    "verl": {"reads": [], "rows_per_call": 1, "needs_truth": True},
    "trl": {"reads": ["prompt", "answer"], "rows_per_call": None, "needs_truth": False},
}


def test_facts_of_a_term():
    for name, expected in FACTS.items():
        assert facts(build_term({"function": f"{MODULE}:{name}"}, "reward.terms.a")) == expected
