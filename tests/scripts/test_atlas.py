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
from reference import atlas_pages  # noqa: E402
from reference.atlas_pages import DOCS, Algorithm, algorithms, filled, metrics_table, pages  # noqa: E402
from reference.atlas_tables import CONFIG, REGISTRIES, selected  # noqa: E402


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


def test_a_metric_without_a_line_in_the_docs_is_an_error() -> None:
    measured = {"a": {"metrics": ["reward/mean", "new/thing"]}, "b": {"metrics": ["reward/mean"]}}
    with pytest.raises(ValueError, match=r"docs/metrics.md says nothing of 'new/thing'"):
        metrics_table("a", measured)


@pytest.mark.slow
def test_it_measures_and_goes_on_where_it_stopped(tmp_path, sized, monkeypatch) -> None:
    out = tmp_path / "results.json"
    tiny = [*sized(), "warmup.steps=2", "eval.every=1"]
    settings = [override for override in tiny if not override.startswith("warmup")]
    monkeypatch.setattr(atlas, "WARM_UP", tiny)
    monkeypatch.setattr(atlas, "SETTINGS", settings)
    arguments = argparse.Namespace(only="grpo", jobs=1, out=out, overrides=["algorithm.group_size=4"])
    atlas.measure(arguments, seeds=(0,))
    results = json.loads(out.read_text())
    assert set(results["algorithms"]) == {"grpo"}
    run = results["algorithms"]["grpo"]
    assert run["overrides"] == ["algorithm.group_size=4"]
    assert [step for step, _ in run["runs"]["0"]["accuracy"]] == [0, 1, 2, 3]
    assert len(run["runs"]["0"]["reward"]) == 3
    assert "loss/ppo_clip" in run["metrics"]
    with pytest.raises(ValueError, match="--only grpoo"):
        atlas.measure(argparse.Namespace(only="grpoo", jobs=1, out=out, overrides=[]))
    assert atlas.todo(results, [], (0,))[0] != ("grpo", 0)
    assert ("grpo", 0) not in atlas.todo(results, [], (0,)) and ("grpo", 1) in atlas.todo(results, [], (0, 1))
