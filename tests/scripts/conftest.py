"""Runs the scripts in the process of the tests."""

import sys

import pytest


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Calls the `main` of a script with arguments; returns the exit code and what it prints to stderr."""

    def run(main, *arguments):
        capsys.readouterr()  # the progress bars of transformers
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().err

    return run
