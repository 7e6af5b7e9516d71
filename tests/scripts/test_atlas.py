"""The atlas: its pages are current, its tables are complete, and it measures."""

import argparse
import json
import re
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import atlas  # noqa: E402
import atlas_pages  # noqa: E402
from atlas_pages import DOCS, Algorithm, algorithms, filled, metrics_table, pages, picture  # noqa: E402
from atlas_tables import CONFIG, REGISTRIES, mark, numbers, papers, rules, say, selected  # noqa: E402

from rft.algorithm.gradient import Gradient  # noqa: E402

RUNS = {
    "0": {"accuracy": [[0, 0.1], [4, 0.5]], "reward": [[1, 0.2], [2, 0.4]]},
    "1": {"accuracy": [[0, 0.2], [4, 0.9]], "reward": [[1, 0.4], [2, 0.6]]},
}


@pytest.mark.slow
def test_the_committed_pages_are_current() -> None:
    stale = [str(path) for path, text in pages().items() if not path.exists() or path.read_text() != text]
    assert not stale, "run: python scripts/atlas.py pages"


def test_every_algorithm_has_a_page_of_its_own_and_no_page_is_left_over() -> None:
    found = {path.stem: path.read_text() for path in (DOCS / "algorithms").glob("*.md")}
    assert set(found) == set(algorithms())
    for name, text in found.items():
        assert re.findall(r"^<!-- atlas: (\w+) -->$", text, re.MULTILINE) == ["facts", "metrics", "measured"], name
        assert text.startswith(f"# `{name}`: "), name
        assert "```text\n" in text and "## The paper's setting\n" in text, f"{name}: the formula, the setting"
        assert f"algorithm={name}" in text, f"{name}: a command"


def test_every_function_stands_in_a_table() -> None:
    """By its option file: the tables list those."""
    named: dict[int, set[str]] = {}
    for group, registry in REGISTRIES.items():
        for path in (CONFIG / "algorithm" / group).glob("*.yaml"):
            node = OmegaConf.to_container(OmegaConf.load(path))
            assert isinstance(node, dict)
            inner = [node, *(value for value in node.values() if isinstance(value, dict))]
            named.setdefault(id(registry), set()).update(part["name"] for part in inner if "name" in part)
    for group, registry in REGISTRIES.items():
        ours = {name for name in registry.names() if registry.function(name).__module__.startswith("rft.")}
        assert ours <= named[id(registry)], group
    shown = set(re.findall(r"^<!-- atlas: (\w+) -->$", (DOCS / "algorithms.md").read_text(), re.MULTILINE))
    assert set(REGISTRIES) - {"prm_loss"} <= shown  # whose one entry stands on its algorithm's page


def test_what_an_algorithm_selects_is_what_it_adds_to_what_it_builds_on() -> None:
    found = selected("dapo")
    assert found["loss"] == "ppo_clip_higher"  # its own
    assert found["advantage"] == "group_norm"  # of grpo
    assert found["shaping"] == ["overlong"]
    assert selected("fire")["rollout/first_token"] == "high_temperature"


def test_columns_that_an_algorithm_writes_are_not_among_those_it_reads() -> None:
    assert atlas_pages.reads(Algorithm.read("ppo").job) == ["old_logprobs", "values"]


def test_a_part_that_nothing_generates_is_an_error(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- atlas: this -->\nold\n<!-- /atlas -->\nafter\n")
    assert filled(page, {"this": "new"}) == "before\n<!-- atlas: this -->\n\nnew\n\n<!-- /atlas -->\nafter\n"
    with pytest.raises(ValueError, match="'this'"):
        filled(page, {"other": "new"})


def test_a_gradient_in_words() -> None:
    assert say(Gradient("exact")) == "exact"
    assert say(Gradient("scaled", factor=lambda n: (n - 1) / n)) == "0.875 of it at n = 8"
    assert say(Gradient("scaled", factor=lambda n: 1 / 16)) == "0.0625 of it"
    assert say(Gradient("none")) == "zero"
    assert say(Gradient("near", target="kl", cosine=0.95)) == "cosine 0.95 (kl)"
    assert say(None) == ""


def test_text_in_cells() -> None:
    assert mark("a | b * c `d | e`") == "a \\| b \\* c `d \\| e`"
    assert numbers({"name": "x", "gamma": 1.0, "clip": None, "coef": {"name": "fixed", "initial": 2}}) == (
        "`gamma=1.0` `clip=null` `coef`: fixed (`initial=2`)"
    )
    assert papers("one (2402.03300), two 2402.03300") == "[2402.03300](https://arxiv.org/abs/2402.03300)"
    rule = {"metric": "ratio", "level": "token", "aggregate": None, "action": "zero", "sign": "negative"}
    node = {"normalize": True, "rules": {"x": {**rule, "low": None, "high": 2.0}}}
    assert rules(node) == "token ratio in [-∞, 2], else zero (A negative); weights divided by their mean"


def test_metrics_beyond_those_of_all_with_their_meaning() -> None:
    shared = ["reward/mean", "entropy"]
    measured = {"a": {"metrics": [*shared, "clip/low", "loss/x"]}, "b": {"metrics": shared}}
    found = metrics_table("a", measured)
    assert "| `clip/low` | share of trained tokens" in found
    assert "| `loss/x` | the loss" in found
    assert "entropy" not in found
    assert metrics_table("b", measured).startswith("None in addition to")
    with pytest.raises(ValueError, match=r"docs/metrics.md says nothing of 'new/thing'"):
        metrics_table("a", {"a": {"metrics": [*shared, "new/thing"]}, "b": {"metrics": shared}})


def test_a_picture_holds_every_seed_and_the_mean_reward() -> None:
    text = picture("x", RUNS)
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"') and text.endswith("</svg>\n")
    assert [f'class="line k{i}"' in text for i in range(4)] == [True, True, True, False]
    assert text.count("<circle") == 4


@pytest.mark.slow
def test_it_measures_and_goes_on_where_it_stopped(tmp_path, sized, monkeypatch) -> None:
    out = tmp_path / "results.json"
    tiny = [*sized(), "warmup.steps=2", "eval.every=1"]
    settings = [override for override in tiny if not override.startswith("warmup")]
    monkeypatch.setattr(atlas, "WARM_UP", tiny)
    monkeypatch.setattr(atlas, "SETTINGS", settings)
    arguments = argparse.Namespace(only="grpo,rloo", jobs=1, out=out, overrides=["algorithm.group_size=4"])
    atlas.measure(arguments, seeds=(0,))
    results = json.loads(out.read_text())
    assert set(results["algorithms"]) == {"grpo", "rloo"}
    run = results["algorithms"]["grpo"]
    assert run["overrides"] == ["algorithm.group_size=4"]
    assert [step for step, _ in run["runs"]["0"]["accuracy"]] == [0, 1, 2, 3]
    assert len(run["runs"]["0"]["reward"]) == 3
    assert "loss/ppo_clip" in run["metrics"]
    with pytest.raises(ValueError, match="--only grpoo"):
        atlas.measure(argparse.Namespace(only="grpoo", jobs=1, out=out, overrides=[]))
    assert atlas.todo(results, [], (0,))[0] != ("grpo", 0)
    assert ("grpo", 0) not in atlas.todo(results, [], (0,)) and ("grpo", 1) in atlas.todo(results, [], (0, 1))
