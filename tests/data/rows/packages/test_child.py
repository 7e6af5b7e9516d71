"""Rows that a process of its own makes: its output, its errors, and a package that does not answer."""

import importlib
import sys

import pytest

from rft import redaction
from rft.data.rows.packages import child
from rft.data.rows.packages.child import rows_of_child

PACKAGE = """
import os, sys, time

def make(kind):
    print("makes rows with", os.environ["RFT_TEST_KEY"])
    if kind == "error":
        raise ValueError("no such split")
    if kind == "end":
        sys.exit(3)
    if kind == "question":
        input("continue? ")
    if kind == "hang":
        time.sleep(600)
    return [{"prompt": kind}]
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "package_of_rows.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RFT_TEST_KEY", "sk-2718281828")
    monkeypatch.setattr(redaction, "_hidden", {"sk-2718281828": "${oc.env:RFT_TEST_KEY}"})
    yield importlib.import_module("package_of_rows").make
    del sys.modules["package_of_rows"]


@pytest.mark.slow
def test_rows_come_back_and_what_the_package_prints_is_redacted(make, capfd):
    assert rows_of_child(make, "train") == [{"prompt": "train"}]
    assert capfd.readouterr() == ("", "makes rows with ${oc.env:RFT_TEST_KEY}\n")


@pytest.mark.slow
def test_an_error_of_the_package_is_raised_here(make):
    with pytest.raises(ValueError, match=r"^no such split$"):
        rows_of_child(make, "error")
    for kind, status in (("end", 3), ("question", 1)):  # there is no terminal that could answer
        with pytest.raises(OSError, match=rf"^package_of_rows has made no rows: .* ended with status {status}; see"):
            rows_of_child(make, kind)


def test_a_package_that_does_not_answer_is_ended_and_named(make, monkeypatch):
    monkeypatch.setattr(child, "MAKE_S", 0.2)
    with pytest.raises(ValueError, match=r"^package_of_rows has made no rows within 0\.2 s; make them once"):
        rows_of_child(make, "hang")
