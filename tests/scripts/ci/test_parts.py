"""The slow tests of parts that `.ci/run` leaves out."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / ".ci"))

import parts  # noqa: E402
from parts import parts_of_tests, unchanged  # noqa: E402

ATTACKS = "tests/reward/sandbox/test_sandbox_attacks.py"
MCP = "tests/rollout/environment/adapters/test_mcp.py"
TENSORBOARD = "tests/logger/test_tensorboard.py"


@pytest.fixture(scope="module")
def tested():
    return parts_of_tests(ROOT)


def test_a_test_file_tests_the_parts_whose_modules_its_name_says(tested):
    assert tested[ATTACKS] >= {"sandbox", "worker processes"}, "which the sandbox needs"
    assert tested[TENSORBOARD] == {"loggers of services"}
    assert tested[MCP] >= {"environments", "adapters of environments"}
    assert not any(path.startswith(("tests/e2e/", "tests/scripts/")) for path in tested), "these start whole runs"
    assert "tests/train/test_trainer.py" not in tested and "tests/reward/test_compose.py" not in tested
    assert "tests/reward/rules/test_text.py" not in tested, "the rule of the default run"


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ([], {ATTACKS, MCP, TENSORBOARD}),
        ([".ci/full_pass", "README.md", "docs/pictures/learning.svg", "scripts/fuzz.py"], {ATTACKS, MCP, TENSORBOARD}),
        (["rft/reward/sandbox/isolation/harness.py"], {MCP, TENSORBOARD}),
        (["rft/rollout/environment/adapters/mcp.py"], {ATTACKS, TENSORBOARD}),
        (["rft/reward/sandbox/isolation/harness.py", "rft/logger/tensorboard.py"], {MCP}),
        ([ATTACKS, "tests/train/test_stop.py"], {MCP, TENSORBOARD}),
        (["rft/worker/worker.py"], {TENSORBOARD}),
        (["rft/train/trainer.py"], set()),
        (["rft/reward/sandbox/of_yesterday.py"], set()),
        (["rft/config/logger/wandb.yaml"], set()),
        (["tests/helpers.py"], set()),
        (["tests/reward/sandbox/programs.py"], set()),
        ([".ci/run"], set()),
    ],
)
def test_a_change_concerns_the_tests_of_its_part_and_one_of_the_core_all(changed, left, tested):
    assert set(unchanged(ROOT, tested, changed)) & {ATTACKS, MCP, TENSORBOARD} == left


def test_what_is_left_out_is_printed_for_pytest(tested, monkeypatch, capsys):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    changed, versions = ["rft/logger/tensorboard.py"], set()
    monkeypatch.setattr(parts, "changed_files", lambda root, commit: changed)
    monkeypatch.setattr(parts, "changed_packages", lambda root, commit: versions)

    def printed(commit, *arguments):
        monkeypatch.setattr(parts, "full_pass", lambda root: commit)
        monkeypatch.setattr(sys, "argv", ["parts.py", *arguments])
        parts.main()
        return capsys.readouterr()

    of_logger = {path for path, names in tested.items() if "loggers of services" in names}
    out, said = printed(head)
    assert out.split() == [f"--ignore={path}" for path in sorted(tested.keys() - of_logger)]
    assert said == f"left out: {len(tested) - len(of_logger)} of the {len(tested)} test files of parts\n"
    assert printed(head, "--all").out == printed(None).out == ""
    versions.add("torch")
    assert printed(head).out == ""
