"""Where values come from: the command line, a recipe, an option's file, another value."""

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path

from rft.modes.plan.config_origin import Origin, origins
from tests.conftest import CONFIG


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """The origins of a config, by key; recipes are looked for in a folder beside, as with -cd."""
    monkeypatch.chdir(tmp_path)

    def found(name, *overrides):
        places = create_config_search_path(f"file://{CONFIG}")
        places.prepend("command-line", f"file://{tmp_path}", anchor="schema")
        return {origin.key: origin for origin in origins(ConfigLoaderImpl(places), name, overrides)}

    return found


def recipe(folder, body, **options):
    (folder / "run.yaml").write_text(body)
    for place, text in options.items():
        file = folder / f"{place.replace('__', '/')}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_the_default_run_has_nothing_to_say(ask):
    assert ask("main") == {}


def test_a_value_of_the_command_line(ask):
    found = ask("main", "seed=3", "algorithm.loss.clip_high=0.3", "+data.train.note={by: me}")
    assert found["seed"] == Origin("seed", "3", "0", "command line")
    assert found["algorithm.loss.clip_high"] == Origin("algorithm.loss.clip_high", "0.3", "0.2", "command line")
    assert found["data.train.note.by"] == Origin("data.train.note.by", "me", "", "command line")


def test_what_is_said_as_it_is_by_default_is_not_listed(ask):
    assert ask("main", "seed=0", "algorithm=grpo") == {}


def test_a_value_of_the_file_that_the_command_line_selects(ask):
    found = ask("main", "algorithm=gspo", "warmup=none")
    assert found["algorithm.name"] == Origin("algorithm.name", "gspo", "grpo", "rft/config/algorithm/gspo.yaml")
    assert found["algorithm.loss.name"].source == "rft/config/algorithm/loss/gspo.yaml"
    assert found["warmup"].value == "null" and found["warmup"].source == "rft/config/warmup/none.yaml"


def test_an_empty_node_comes_from_the_file_that_has_it(ask):
    paths = ("data=trl", "data.train.path=a", "data.eval.heldout.path=b")
    found = ask("main", *paths)
    assert found["data.train.columns"].value == "{}"
    assert found["data.train.columns"].source.startswith("rft/config/data/")
    named = ask("main", *paths, "+data.train.columns.prompt=q")
    assert named["data.train.columns.prompt"].source == "command line"


def test_a_value_that_follows_another_names_it(ask):
    found = ask("main", "actor.optimizer.lr=1e-3", "algorithm=ppo")
    assert found["actor.optimizer.lr"].source == "command line"
    assert found["critic.optimizer.lr"] == Origin("critic.optimizer.lr", "0.001", "0.0005", "${actor.optimizer.lr}")
    assert found["name"].source == "${data.name}-${algorithm.name}-seed${seed}"


def test_the_body_of_a_recipe_and_its_option_files(ask, tmp_path):
    recipe(
        tmp_path,
        "defaults: [main, {override algorithm/loss: wild}, _self_]\nbatch: {prompts: 7}\nname: mine-${seed}\n"
        "critic: {micro_batch_tokens: '${seed}'}\nlogger: {}\n",
        algorithm__loss__wild="name: ppo_clip\nclip_low: 0.9\nclip_high: 9.0\ndual_clip: null\n",
    )
    found = ask("run", "logger=[wandb]")
    assert found["batch.prompts"] == Origin("batch.prompts", "7", "32", "run.yaml")
    assert found["algorithm.loss.clip_low"].source == "algorithm/loss/wild.yaml"
    assert "algorithm.loss.dual_clip" not in found
    assert found["name"].source == "run.yaml", "its own text, not that of the default run"
    assert found["critic.micro_batch_tokens"].source == "run.yaml"
    assert found["logger.wandb.project"].source == "rft/config/logger/wandb.yaml", "an empty node takes nothing away"


def test_the_command_line_comes_behind_the_recipe(ask, tmp_path):
    recipe(tmp_path, "defaults: [main, _self_]\nseed: 3\nsteps: 4\n")
    found = ask("run", "seed=5")
    assert (found["seed"].value, found["seed"].source) == ("5", "command line")
    assert (found["steps"].value, found["steps"].source) == ("4", "run.yaml")


def test_a_value_of_an_environment_variable_is_not_shown(ask, monkeypatch):
    monkeypatch.setenv("RFT_TEST_SECRET", "sk-3141592653589793")
    found = ask("main", "name='run-${oc.env:RFT_TEST_SECRET}'")
    text = "run-${oc.env:RFT_TEST_SECRET}"
    assert found["name"] == Origin("name", text, "reverse-grpo-seed0", "command line")
    assert not any("sk-31" in origin.value for origin in found.values())
