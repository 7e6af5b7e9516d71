"""The suites that `.ci/run` selects by what changed: the table, and what it selects."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / ".ci"))

import suites  # noqa: E402
from suites import EVERY, SUITES, changed_files, changed_packages, full_pass, matches, requirements, selected  # noqa: E402

PYPROJECT = '[project]\ndependencies = ["torch>=2.9"]\n[project.optional-dependencies]\nmcp = ["mcp>={}"]\n'
MARKED = re.compile(r"^(@|pytestmark = .*)pytest\.mark\.suite\b", re.MULTILINE)  # tests that the slow ones leave out
FILES = sorted(
    str(path.relative_to(ROOT))
    for top in ("rft", "recipes", "tests", "scripts", ".ci")
    for path in (ROOT / top).rglob("*")
)


def test_every_pattern_of_the_table_names_a_file_that_there_is():
    for suite in (EVERY, *SUITES.values()):
        for pattern in suite.paths:
            assert any(matches(pattern, path) for path in FILES), pattern


def test_every_package_of_the_table_has_a_version():
    known = requirements((ROOT / "constraints.txt").read_text(), (ROOT / "pyproject.toml").read_text())
    assert {package for suite in (EVERY, *SUITES.values()) for package in suite.packages} <= set(known)


def test_every_suite_has_a_command_whose_tests_select_it():
    text = (ROOT / ".ci" / "suites.sh").read_text()
    commands = dict(re.findall(r"^suite_(\w+)\(\) \{.*\n((?:  .*\n|\n)+)\}$", text, re.MULTILINE))
    assert set(commands) == set(SUITES)
    marked = {
        path for path in FILES if re.fullmatch(r"tests/.*\.py", path) and MARKED.search((ROOT / path).read_text())
    }
    run = [
        test for command in commands.values() if "-m suite" in command for test in re.findall(r"tests/[\w/.]+", command)
    ]
    assert len(marked) > 3 and [path for path in marked if not any(matches(test, path) for test in run)] == []
    for name, command in commands.items():
        tests = re.findall(r"tests/[\w/.]+", command)
        assert tests
        for path in (path for test in tests for path in FILES if matches(test, path)):
            assert name in selected([path], set()), path


@pytest.mark.parametrize("folder", ["rollout/environment/adapters", "data/rows/packages", "logger"])
def test_every_module_that_imports_such_a_package_selects_a_suite(folder):
    modules = [path for path in FILES if re.fullmatch(rf"rft/{folder}/[a-z]\w*\.py", path)]
    assert len(modules) > 3
    for path in modules:
        assert selected([path], set()), path


@pytest.mark.parametrize(
    ("paths", "packages", "expected"),
    [
        (["rft/remote/event_loop.py"], set(), {"servers", "verl"}),
        (["docs/engines.md", "rft/report/page.py"], {"ruff"}, set()),
        (["rft/rollout/environment/adapters/mcp.py"], set(), {"mcp"}),
        (["rft/config/environment/verl_interaction.yaml"], set(), {"verl"}),
        (["rft/config/logger/wandb.yaml"], set(), {"loggers"}),
        ([], {"mcp", "trackio"}, {"mcp", "loggers"}),
        (["rft/data/rows/packages/child.py"], set(), {"verifiers", "verifiers_v1", "reasoning_gym"}),
        (
            ["rft/rollout/environment/contract.py"],
            set(),
            {"mcp", "verl", "openrlhf", "openenv", "renderers", "trl_templates", "verifiers", "verifiers_v1"},
        ),
        (["rft/rollout/engine/base.py"], set(), {"servers", "vllm", "torchvision", "plan"}),
        (["rft/strategy/base.py"], set(), {"liger", "torchao", "plan", "strategy"}),
        (["scripts/bench/step.py"], set(), {"benchmark"}),
        ([".ci/full_pass"], set(), set()),
        ([".ci/run"], set(), set(SUITES)),
        ([], {"torch"}, set(SUITES)),
    ],
)
def test_a_change_selects_the_suites_that_it_concerns(paths, packages, expected):
    assert set(selected(paths, packages)) == expected


def test_the_reason_is_the_first_thing_that_changed():
    assert selected(["rft/logger/media.py", "rft/logger/log.py"], {"wandb"}) == {"loggers": "rft/logger/log.py changed"}
    assert selected([], {"wandb", "trackio"}) == {"loggers": "the versions of trackio changed"}


def test_a_pattern_names_a_file_or_a_folder_and_a_star_stays_within_one_name():
    assert matches("a/b", "a/b") and matches("a/b", "a/b/c/d.py") and matches("a/*.py", "a/b.py")
    assert not matches("a/b", "a/bc") and not matches("a/*.py", "a/b/c.py") and not matches("a/b", "a")


def test_lines_of_a_package_are_compared_not_their_order():
    first = requirements("mcp==2.3.0\n# a comment\nray==2.60.0\n", PYPROJECT.format(2))
    assert first == {
        "mcp": ["constraints: mcp==2.3.0", "mcp: mcp>=2"],
        "ray": ["constraints: ray==2.60.0"],
        "torch": ["dependencies: torch>=2.9"],
    }
    assert first == requirements("ray==2.60.0\nmcp==2.3.0\n", PYPROJECT.format(2))


@pytest.fixture
def clone(tmp_path):
    """A repository of one commit; `git` runs a command in it."""
    for name, text in {
        "constraints.txt": "mcp==2.3.0\nray==2.60.0\n",
        "pyproject.toml": PYPROJECT.format(2),
        "a": "",
    }.items():
        (tmp_path / name).write_text(text)

    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path, git


def test_what_is_committed_and_what_is_not_counts_as_changed(clone):
    root, git = clone
    commit = git("rev-parse", "HEAD").strip()
    assert changed_files(root, commit) == [] and changed_packages(root, commit) == set()
    git("mv", "a", "b")
    git("commit", "-q", "-m", "second")
    (root / "c").write_text("")
    (root / "constraints.txt").write_text("ray==2.61.0\nmcp==2.3.0\n")
    assert sorted(changed_files(root, commit)) == ["a", "b", "c", "constraints.txt"]
    assert changed_packages(root, commit) == {"ray"}
    (root / "pyproject.toml").write_text(PYPROJECT.format(3))
    assert changed_packages(root, commit) == {"mcp", "ray"}


def test_without_a_full_pass_that_the_clone_knows_every_suite_runs(clone, monkeypatch, capsys):
    root, git = clone
    (root / ".ci").mkdir()
    monkeypatch.setattr(suites, "ROOT", root)

    def printed(*arguments):
        monkeypatch.setattr(sys, "argv", ["suites.py", *arguments])
        suites.main()
        return capsys.readouterr().out.split()

    assert full_pass(root) is None and printed() == list(SUITES)
    for text in ("0" * 40, git("rev-parse", "HEAD:a"), "HEAD", ""):  # unknown, a file, not the name of a commit
        (root / ".ci" / "full_pass").write_text(text)
        assert full_pass(root) is None and printed() == list(SUITES), text
    (root / ".ci" / "full_pass").write_text(git("rev-parse", "HEAD"))
    assert printed() == [] and printed("--all") == list(SUITES)
