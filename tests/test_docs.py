"""What the pages say is so: commands compose, code runs, tables list what there is."""

import importlib.util
import itertools
import json
import re
import shlex
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

import rft
from rft.logger.mlflow import MLflow
from rft.logger.swanlab import SwanLab
from rft.logger.trackio import Trackio
from rft.logger.wandb import Wandb
from rft.main import check_recipe
from rft.modes.verify import verify
from rft.setup.assembly import Job
from rft.setup.schema import root_with_roles
from tests.e2e.faults import FAULTS, TEST

ROOT = Path(rft.__file__).parent.parent
CONFIG = ROOT / "rft" / "config"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
TITLE = re.compile(r"# (mine/\S+)\n")  # a block that is the file of this name
IN_DOCS = [page for page in PAGES if "recipes" not in page.parts]


@cache
def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list:
    """(what follows `-m rft.main`) of every command line of every page; those of docs/ and recipes/ are slow."""
    found = []
    for page in PAGES:
        marks = [] if page.parent == ROOT else [pytest.mark.slow]
        for line in "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
            for command in line.split("&&"):
                words = shlex.split(command, comments=True)
                if "rft.main" in words:
                    arguments = words[words.index("rft.main") + 1 :]
                    name = f"{page.relative_to(ROOT)}: {shlex.join(arguments)}"
                    found.append(pytest.param(arguments, id=name, marks=marks))
    return found


def table(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the text of their first cell; backticks are taken off."""
    section = re.search(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, f"{page} has no heading {heading!r}"
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", section[1], re.MULTILINE)
    ]
    assert len(rows) > 2, f"{page}: no table under {heading!r}"
    return {row[0].replace("`", ""): row[1:] for row in rows[2:]}


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture
def desk(tmp_path, monkeypatch, plugins_forgotten):
    """A folder with the files that the pages show, and the recipes."""
    for page in PAGES:
        for block in blocks(page, "yaml") + blocks(page, "python"):
            if title := TITLE.match(block):
                path = tmp_path / title[1]
                assert not path.exists(), f"{page} shows {title[1]} again"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RFT_GSM8K_DIR", str(tmp_path))
    for logger in (MLflow, SwanLab, Trackio, Wandb):  # their packages are extras
        monkeypatch.setattr(logger, "check", lambda self: None)
    find, extras = importlib.util.find_spec, ("liger_kernel", "reasoning_gym", "torchao", "verifiers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *given: name in extras or find(name, *given))
    for module in ("fp8", "fsdp2_options"):  # the commands of float8 and of Liger are for a GPU
        monkeypatch.setattr(f"rft.strategy.{module}.device_kind", lambda device: "cuda")
    return tmp_path


def test_there_is_something_to_test():
    assert len(commands()) > 80
    assert {page.name for page in PAGES} > {"README.md", "config.md", "metrics.md", "algorithms.md", "extending.md"}


def test_the_readme_opens_with_the_two_commands():
    """`.ci/run` runs them as they stand."""
    lines = "".join(blocks(ROOT / "README.md", "bash")).splitlines()
    assert lines[:2] == [
        "pip install -c constraints.txt -e . && python -m rft.main",
        'pip install -c constraints.txt -e ".[dev]" && pytest',
    ]


@pytest.mark.parametrize("arguments", commands())
def test_every_command_composes_into_a_config_that_is_accepted(arguments, desk, resolved):
    said = get_args_parser().parse_args(arguments)
    folder = Path(said.config_dir).resolve() if said.config_dir else CONFIG
    sys.path.insert(0, str(folder))
    where = {"folder": folder, "name": said.config_name} if said.config_name else {}
    extra = [] if said.config_name else [f"hydra.searchpath=[file://{folder}]"]  # -cd alone adds options to main
    if said.config_name:
        check_recipe(folder / f"{said.config_name}.yaml")
    choices = []
    for override in OverridesParser.create().parse_overrides(said.overrides):
        assert said.multirun or not override.is_sweep_override(), "several values, but no -m"
        key = override.get_key_element()
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else None
        choices.append([f"{key}={value}" for value in values] if values else [override.input_line])
    for overrides in itertools.product(*choices):
        Job(resolved(*overrides, *extra, **where))


@pytest.mark.parametrize("page", IN_DOCS, ids=lambda page: page.name)
def test_every_yaml_block_parses(page):
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict), block


@pytest.mark.parametrize(
    "block", [block for page in IN_DOCS for block in blocks(page, "python") if not TITLE.match(block)]
)
def test_every_python_block_runs(block, desk):
    exec(compile(block, "a page", "exec"), {"__name__": "a page"})


@pytest.mark.parametrize(
    "plugin", sorted((ROOT / "tests" / "e2e" / "plugins").glob("*.py")), ids=lambda path: path.stem
)
def test_the_page_on_extending_shows_every_plugin_of_the_tests_in_full(plugin):
    page = (ROOT / "docs" / "extending.md").read_text()
    assert f"```python\n# mine/{plugin.name}\n{plugin.read_text()}```\n" in page


def test_the_plugins_of_the_page_on_extending_train(desk, resolved):
    sys.path.insert(0, str(desk / "mine"))
    small = ["steps=1", "warmup.steps=1", "warmup.rows=8", "batch.prompts=4", "data.eval.heldout.count=8"]
    config = resolved(*small, folder=desk / "mine", name="everything")
    assert Job(config).fit("") >= 0.0
    last = json.loads((desk / config["output_dir"] / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"loss/soft_gate", "gate/moved", "reward/brevity", "eval/heldout/brevity"} <= set(last)


def test_the_plugins_of_the_page_on_extending_are_what_they_state(desk, resolved, capsys):
    sys.path.insert(0, str(desk / "mine"))
    config = resolved("algorithm/loss=above_average", folder=desk / "mine", name="everything")
    config["plugins"] = ["my_functions", "above_average"]
    assert verify(config, Console()) == 1.0
    said = " ".join(capsys.readouterr().out.split())
    assert "✓ loss above_average: as declared ✓" in said and "✓ advantage best_of: as declared ✓" in said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_lead_to_one(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_the_glossary_names_keys_that_there_are(resolved):
    for code in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?:=\w+)?`", (ROOT / "docs" / "glossary.md").read_text()):
        node = resolved()
        for word in code.split("."):
            assert word in node, code
            node = node[word]


# Runs in which, taken together, every part that logs something takes part.
RUNS = (
    (
        "algorithm=ppo",
        "algorithm/terms=[kl,entropy]",
        "algorithm/reward_kl=kl",
        "algorithm/shaping=[overlong,running_norm]",
        "algorithm.advantage_clip=1.0",
        "algorithm/source=dynamic_sampling",
        "eval.samples=4",
        "trajectories.every=1",
        "profile.steps=[5]",
        "strategy.dtype=float16",
        "strategy.peak_tflops=1",
        "faults.nonfinite=drop_rows",
    ),
    (
        "algorithm=prime",
        "algorithm/loss=kl_cov",
        "algorithm/correction=token_tis",
        "strategy.dtype=float16",
        "faults.nonfinite=drop_rows",
    ),
    ("algorithm=spo", "algorithm/loss=topr", "data.train.count=4"),  # every prompt comes again
    ("algorithm=remax", "algorithm/loss=clip_cov", "algorithm.group_size=4"),
    ("algorithm=m2po", "actor.share_prefix=true", "algorithm/advantage=teacher"),
    ("algorithm=scale_rl", "eval.samples=4", "eval.maj_k=[1,4]", "reward.accuracy=exact_match"),
    (
        "+reward.terms.even.function=tests.reward.user_functions:of_even_length",
        "+reward.terms.even.weight=1.0",
        "+reward.terms.even.call.failed=drop_row",
        "reward.accuracy=even",
        "reward.max_unscored=1.0",
    ),
    (
        "environment=guessing",
        "~environment.classes.guessing",
        f"+environment.classes.half._target_={__name__}.HalfFails",
        "environment.max_turns=2",
        "algorithm/advantage=rae",
        "warmup=none",
    ),
    ("algorithm=kto",),
    ("algorithm=reward_model",),
    ("algorithm=process_reward_model",),
    ("algorithm=sft", "algorithm.source.response=answer", "eval.loss=true", "rollout=none"),
    (
        "rollout.engine._target_=tests.e2e.older_weights.Newest",
        "rollout.staleness=1",
        "algorithm.old_logprobs=rollout",
        "warmup=none",
    ),
)
FORKS = """{% for message in messages %}{{ messages|length }}{{ message.content }}{% if message.role == "assistant" %}
{{- eos_token }}{% endif %}{% endfor %}"""
SUMS = (
    {"prompt": "1=", "answer": "1", "chosen": "1", "rejected": "2", "data_source": "odd"}
    | {"completions": ["1", "2"], "labels": [True, False]},
    {"prompt": "2=", "answer": "2", "chosen": "2", "rejected": "1", "data_source": "even"}
    | {"completions": ["2", "1"], "labels": [True, False]},
)


class HalfFails:
    """A game of which half of the episodes fail."""

    def reset(self, answer, **row):
        if int(answer) % 2:
            raise ValueError("odd")

    def step(self, action):
        return "1", 0.0, False, False, {}


@pytest.mark.slow
def test_the_page_on_metrics_lists_what_runs_log_and_the_page_on_runs_what_one_writes(tiny, tmp_path):
    logged: set[str] = set()
    stand_for: dict[str, set[str]] = {
        "loss": {"nll"},
        "number": {"accuracy", "length", "margin", "mean@4", "first_error", "probability_good", "probability_bad"},
        "rule": set(),
        "shaping": set(),
        "term": {"episode"},
        "name": {"length"},
        "reason": {"ValueError", "user"},
        "agent": {"0"},
    }
    stand_for |= {"set": {"heldout", "sums", "sums/odd", "sums/even"}, "source": {"odd", "even"}}
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    for number, overrides in enumerate(RUNS):
        config = tiny(*overrides, f"output_dir={tmp_path / str(number)}")
        sums = {"_target_": "rft.data.rows.sources.FileRows", "columns": {}, "schema": None, "limit": None}
        config["data"]["eval"]["sums"] = sums | {"path": str(tmp_path / "sums.jsonl")}
        if config["environment"] is not None:
            (tmp_path / "forks.jinja").write_text(FORKS)
            config["data"]["template"] = str(tmp_path / "forks.jinja")
        if number == 0:
            config["reward"]["canary"] |= {"path": str(tmp_path / "sums.jsonl"), "every": 1, "bound": 1.0}
        algorithm = config["algorithm"]
        losses = [algorithm[key]["name"] for key in ("loss", "critic_loss", "prm_loss") if algorithm[key] is not None]
        stand_for["loss"] |= {*losses, *algorithm["terms"]}
        stand_for["rule"] |= set((algorithm["correction"] or {"rules": {}})["rules"])
        stand_for["term"] |= set(config["reward"]["terms"])
        stand_for["shaping"] |= set(algorithm["shaping"])
        stand_for |= {"n": {"0", "1", "4"}, "k": {"1", "2", "4"}}
        Job(config).fit("")
        rows = [json.loads(line) for line in (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()]
        logged |= {name for row in rows for name in row} - {"step", "stage"}
    stand_for["number"] |= {*stand_for["term"], "score", *(f"{term}/length" for term in stand_for["term"])}
    stand_for["number"] |= {*(f"{kind}@{k}" for kind in ("pass", "maj") for k in stand_for["k"])}

    patterns = [
        re.sub(r"<(\w+)>", lambda found: "(?:" + "|".join(map(re.escape, stand_for[found[1]])) + ")", name)
        for part in ("Training", "Time, in seconds", "Evaluation")
        for name in table("docs/metrics.md", part)
    ]
    assert {name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns)} == set()
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in logged)] == []

    folder = tmp_path / "0"
    shown = re.search(
        r"^## The folder\n.*?```text\n\S+\n(.*?)```", (ROOT / "docs/runs.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert shown
    of_some_runs = ("diverged/", "media/", "stopped.json", "warnings.txt")
    for line in shown[1].splitlines():
        path = line.split()[0]
        assert path in of_some_runs or list(folder.glob(path.replace("00000210", "*"))), path


def test_every_fault_of_the_page_on_runs_has_a_test():
    assert table("docs/runs.md", "Faults").keys() == FAULTS.keys()
    for test in FAULTS.values():
        file, name, kind = TEST.fullmatch(test).groups(default="")
        text = (ROOT / "tests" / file).read_text()
        assert f"def {name}(" in text and kind in text, test


def test_the_table_of_the_readme_is_that_of_the_yamls(resolved):
    for name, (advantage, loss, aggregation, *_) in table("README.md", "Algorithms").items():
        algorithm = resolved(f"algorithm={name}")["algorithm"]
        chosen = {part: (algorithm[part] or {"name": "none"})["name"] for part in ("advantage", "loss", "aggregation")}
        cells = {"advantage": advantage, "loss": loss, "aggregation": aggregation}
        assert {part: cell.strip("`") for part, cell in cells.items()} == chosen, name


def test_the_page_on_the_config_lists_every_key_and_option():
    assert set(table("docs/config.md", "Root keys")) == {field.name for field in fields(root_with_roles())}
    groups = {group: set(codes(cells[0])) for group, cells in table("docs/config.md", "Groups").items()}
    found: dict[str, set[str]] = {}
    for path in CONFIG.rglob("*/[!_]*.yaml"):  # what others build on begins with an underscore
        found.setdefault(str(path.parent.relative_to(CONFIG)), set()).add(path.stem)
    assert groups == found
