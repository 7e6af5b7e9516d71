"""The architecture: the repository keeps each rule of tests/architecture/rules.py, and each rule can be broken.

`ALLOWED` lists the violations that stay, with the reason. A listed violation that no longer exists fails the test too.
"""

import tomllib
from pathlib import Path

import pytest

import rft
from tests.architecture.parts import NEEDS, files_of_parts
from tests.architecture.rules import (
    RULES,
    backends,
    calls,
    cycles,
    folders,
    imports,
    layers,
    metaphors,
    mirror,
    modalities,
    modules,
    names_of_algorithms,
    nodes_of,
    options_of_algorithms,
    parts,
    processor_keys,
    remote_code,
    sizes,
    unpickles,
)

ROOT = Path(rft.__file__).parent.parent

ALLOWED: dict[str, dict[str, str]] = {
    "calls": {
        "rft.errors: except Exception": "a report, a logger or an engine that is closed may raise anything",
        "rft.imports: except Exception": "a file of the user's may raise anything; the error names the key",
        "rft.rollout.environment.instance: except (Exception, SystemExit)": "a tool of the user's may raise anything",
        "rft.rollout.environment.hosted: except (Exception, SystemExit)": "a tool may raise anything",
        "rft.reward.rules.math_check.formula: except Exception": "math-verify raises Exception itself, sympy anything",
        "rft.modes.model: except BaseException": "an interrupt too stops the engine's requests; it is raised again",
        "rft.reward.sandbox.isolation.harness: except (Exception, SystemExit)": "a program may raise anything",
        "rft.setup.assembly: except BaseException": "an interrupt too stops the engine's requests; it is raised again",
    },
    "parts": {
        "rft.modes.plan.dry_run: imports rft.reward.models.base": "it loads them and computes with them",
        "rft.modes.plan.job: imports rft.reward.models.base": "the plan counts the models of a reward",
    },
    "unpickles": {
        "rft/data/rows/packages/child.py: pickle.loads": "of a child process, over a socket that the two alone have",
        "rft/distributed.py: pickle.loads": "between the ranks of a run, which unpickle each other's objects anyway",
        "rft/reward/sandbox/workers/worker.py: pickle.loads": "in the sandbox, from the run",
        "rft/reward/workers.py: pickle.loads": "of a function that the run may execute in its own process too",
        "rft/worker/fork_server.py: pickle.load": "from the run, over a socket that the two alone have",
    },
    "modalities": {
        "rft.report.page: image": "a property of CSS",
        "rft.logger.media: image": "the type of a file, as HTML and tracking services name it",
        "rft.logger.media: audio": "the type of a file, as HTML and tracking services name it",
        "rft.logger.media: video": "the type of a file, as HTML and tracking services name it",
    },
    "mirror": {
        "tests/test_architecture.py: mirrors no module": "the tree as a whole",
        "tests/test_docs.py: mirrors no module": "the pages",
        "tests/algorithm/test_boundary_values.py: mirrors no module": "what mutants of the package showed",
        "tests/algorithm/loss/test_on_policy_gradient.py: mirrors no module": "every loss at once",
    },
    "backends": {
        "rft.modes.plan.skip_compute: fsdp": "a namespace of torch's operators",
    },
    "names_of_algorithms": {
        "rft.reward.function: reward_model": "a field of verl's rows",
    },
    "folders": {
        "tests/e2e: more than 13 files": "one file for each kind of run; nothing is nested in it",
        "tests/rollout/server: more than 13 files": "scripted servers and workers stand beside the tests that use them",
        "scripts/bench: more than 13 files": "one file for each section, and one for each side of a comparison",
    },
}


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    """All rules share what is parsed, which is freed at the end."""
    yield
    nodes_of.cache_clear()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule):
    listed = set(ALLOWED.get(rule.__name__, ()))
    found = set(rule(ROOT))
    assert sorted(found - listed) == [], "new violations: cure them; do not list them"
    assert sorted(listed - found) == [], "these no longer exist: take them out of the list"


@pytest.mark.parametrize("rule", ALLOWED)
def test_every_list_belongs_to_a_rule(rule):
    assert rule in [known.__name__ for known in RULES]


# For each rule: files of a small tree that break it, and the violations; nothing else in the tree is one.
ADVANTAGE = '@ADVANTAGES.register("group_mean")\ndef group_mean(): ...\n'
OPTIONS = "class AlgorithmOptions:\n    iteration: int\n"
BROKEN = [
    (layers, {"rft/data/a.py": "import rft.modes.b", "rft/modes/b.py": ""}, {"rft.data.a: imports rft.modes.b"}),
    (
        layers,
        {"rft/actor/a.py": "def f():\n    from rft.data import b", "rft/data/b.py": ""},
        {"rft.actor.a: imports rft.data.b"},
    ),
    (
        layers,
        {
            "rft/batch/a.py": "if TYPE_CHECKING:\n    from ..train.b import C",
            "rft/batch/__init__.py": "",
            "rft/train/b.py": "C = 1",
        },
        {"rft.batch.a: imports rft.train.b"},
    ),
    (
        layers,
        {"rft/errors.py": "importlib.import_module('rft.batch.b')", "rft/batch/b.py": ""},
        {"rft.errors: imports rft.batch.b"},
    ),
    (layers, {"rft/utils/a.py": ""}, {"rft.utils.a: no layer"}),
    (
        parts,
        {
            "rft/reward/sandbox/a.py": "from rft.reward.sandbox import b\nfrom rft.reward import call",
            "rft/reward/sandbox/b.py": "from rft.reward.rules import text",
            "rft/reward/call.py": "def f():\n    from rft.reward.sandbox.a import C",
            "rft/reward/rules/text.py": "from rft.reward.rules import tags",
            "rft/reward/rules/tags.py": "",
            "rft/reward/sandbox/workers/c.py": "from rft.reward import workers",
            "rft/reward/workers.py": "",
            "rft/reward/models/d.py": "from rft.reward import workers",
            "rft/modes/model.py": "",
            "rft/modes/chat.py": "from rft.modes import model",
            "rft/modes/inspect.py": "from rft.modes import model",
        },
        {
            "rft.modes.inspect: imports rft.modes.model",
            "rft.reward.call: imports rft.reward.sandbox.a",
            "rft.reward.models.d: imports rft.reward.workers",
            "rft.reward.rules.text: imports rft.reward.rules.tags",
        },
    ),
    (
        parts,
        {
            "rft/data/tool_calls/a.py": "",
            "rft/rollout/environment/b.py": "import rft.data.tool_calls.a",  # environments need tool calls
            "rft/reward/rules/tags.py": "import rft.data.tool_calls.a",
        },
        {"rft.reward.rules.tags: imports rft.data.tool_calls.a"},
    ),
    (
        cycles,
        {"rft/data/a.py": "from rft.data import b", "rft/data/b.py": "def f(): import rft.data.a", "rft/data/c.py": ""},
        {"rft.data.a: in a cycle with rft.data.b", "rft.data.b: in a cycle with rft.data.a"},
    ),
    (
        mirror,
        {
            "rft/data/a.py": "",
            "tests/data/test_a.py": "",
            "tests/data/test_a_on_ranks.py": "",
            "tests/e2e/test_it.py": "",
            "tests/data/test_b.py": "",
        },
        {"tests/data/test_b.py: mirrors no module"},
    ),
    (sizes, {"rft/a.py": "\n" * 400, "tests/b.py": "\n" * 401}, {"tests/b.py: more than 400 lines"}),
    (folders, {f"rft/data/a{number}.py": "" for number in range(14)}, {"rft/data: more than 13 files"}),
    (
        calls,
        {
            "rft/a.py": "hasattr(a, 'b')\nprint(1)\nconsole.print(1)\ngetattr(a, 'b')",
            "rft/b.py": "getattr(a, 'b', None)",
            "rft/c.py": "try: f()\nexcept: pass",
            "rft/d.py": "try: f()\nexcept (ValueError, Exception): pass\ntry: f()\nexcept ValueError: pass",
        },
        {
            "rft.a: hasattr",
            "rft.a: print",
            "rft.b: getattr with a default",
            "rft.c: except",
            "rft.d: except (ValueError, Exception)",
        },
    ),
    (
        unpickles,
        {
            "rft/a.py": "torch.load(file)\ntorch.load(file, weights_only=True)\njson.load(file)\npickle.dumps(a)",
            "scripts/b.py": "torch.load(file, weights_only=False)\npickle.loads(data)",
        },
        {
            "rft/a.py: torch.load without weights_only=True",
            "scripts/b.py: pickle.loads",
            "scripts/b.py: torch.load without weights_only=True",
        },
    ),
    (
        remote_code,
        {"rft/a.py": "AutoConfig.from_pretrained(a)\nAutoTokenizer.from_pretrained(a, trust_remote_code=False)"},
        {"rft/a.py: AutoConfig.from_pretrained"},
    ),
    (
        names_of_algorithms,
        {
            "rft/algorithm/a.py": ADVANTAGE,
            "rft/config/algorithm/dpo.yaml": "",
            "rft/data/b.py": 'known = "group_mean"\n',
            "rft/data/c.py": '"""As in dpo."""\nraise ValueError(f"set algorithm=dpo, {known}")\n',
        },
        {"rft.data.b: group_mean", "rft.data.c: dpo"},
    ),
    (
        options_of_algorithms,
        {
            "rft/algorithm/a.py": OPTIONS,
            "rft/train/b.py": "algorithm.options.iteration\noptions.steps",
            "rft/train/c.py": "helpers['reference']",
            "rft/setup/d.py": "options.iteration",
        },
        {"rft.train.b: option iteration", "rft.train.c: role reference"},
    ),
    (
        backends,
        {
            "rft/rollout/vllm.py": "class VLLM: ...",
            "rft/rollout/a.py": '"""As vLLM does."""\n# vLLM\nimport vllm',
            "rft/b.py": "from rft.rollout.sglang import C",
        },
        {"rft.rollout.a: vllm", "rft.b: sglang"},
    ),
    (
        modalities,
        {"rft/data/encode/a.py": "image = 1", "rft/data/b.py": "# an image\n", "rft/c.py": "load_audio()\nimagine = 1"},
        {"rft.data.b: image", "rft.c: audio"},
    ),
    (processor_keys, {"rft/data/encode/a.py": "batch['pixel_values']"}, {"rft.data.encode.a: pixel_values"}),
    (metaphors, {"rft/a.py": "# A rank goes on.\n", "rft/b.py": "def mine_rows(): undermine = 1\n"}, {"rft.a"}),
]


@pytest.mark.parametrize(
    ("rule", "files", "found"), BROKEN, ids=lambda value: value.__name__ if callable(value) else ""
)
def test_a_rule_finds_what_breaks_it_and_nothing_else(rule, files, found, tmp_path):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert set(rule(tmp_path)) == found


def test_every_part_has_files():
    assert [part for part, files in files_of_parts(ROOT).items() if not files] == []


def test_no_folder_has_the_name_of_a_file_of_a_part():
    """Where the part is taken out, Python would import the folder as an empty package."""
    files = set().union(*files_of_parts(ROOT).values())
    assert [path for path in files if path.name != "__init__.py" and path.with_suffix("").exists()] == []


def test_a_part_imports_each_part_that_it_needs():
    known, of_parts = modules(ROOT), files_of_parts(ROOT)
    names = {path: name for name, path in known.items()}
    for part, needed in NEEDS.items():
        imported = {known[other] for path in of_parts[part] for other in imports(names[path], path, known)}
        assert [other for other in needed if not imported & of_parts[other]] == [], part


def test_a_wheel_has_every_file_of_the_package():
    """An editable installation has them anyway."""
    package = ROOT / "rft"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["rft"]
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    modules = {path for path in files if path.suffix == ".py"}
    assert files - modules == {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    assert [path for path in modules if not (path.parent / "__init__.py").exists()] == []


def test_every_rule_is_shown_to_fail():
    assert {rule for rule, _, _ in BROKEN} == set(RULES)
