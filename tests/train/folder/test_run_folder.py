"""Which folder a run gets, and what it starts from."""

import json

import pytest
from omegaconf import OmegaConf

from rft.train.folder.run_folder import RunCommand, choose_folder, finish_folder
from rft.train.folder.run_lock import RunLock

CONFIG = {
    "name": "run",
    "seed": 0,
    "steps": 4,
    "resume": "auto",
    "plugins": [],
    "warmup": None,
    "actor": {"path": None, "sizes": [1, 2.0], "optimizer": {"lr": 1e-6}, "lora": None},
    "cache": "some",
}
LR = {"actor": CONFIG["actor"] | {"optimizer": {"lr": 2e-6}}}
FREE = frozenset({"steps", "epochs"})


@pytest.fixture
def wanted(tmp_path):
    return tmp_path / "outputs" / "run"


def choose(wanted, unread=FREE, **changes):
    config = CONFIG | changes
    with RunLock() as lock:
        return choose_folder(RunCommand(wanted, config, config["steps"], unread), lock)


def checkpoint(run, step):
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    return folder.resolve()


def finish(run, steps):
    rows = [{"step": step, "stage": "train", "eval/accuracy": 0.5} for step in range(steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish_folder(run, {"eval/accuracy": 0.5})


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
def test_a_finished_run_with_a_damaged_result_is_continued(wanted, damage):
    choose(wanted)
    finish(wanted, 4)
    (wanted / "result.json").write_text(damage)
    found = choose(wanted)
    assert found.path == wanted and "holds an unfinished run" in found.messages[0]


def test_a_power_cut_leaves_no_run_without_its_config_and_no_result_without_its_numbers(wanted, disk_calls):
    choose(wanted)
    finish(wanted, 4)
    for name in ("config.yaml", "result.json"):
        at = disk_calls.index(("rename", str(wanted / name)))
        assert disk_calls[at - 1 : at + 2 : 2] == [("sync", str(wanted / f".{name}.partial")), ("sync", str(wanted))]
    made = disk_calls.index(("mkdir", str(wanted)))
    assert ("sync", str(wanted.parent)) in disk_calls[made : disk_calls.index(("rename", str(wanted / "config.yaml")))]


def test_a_folder_with_half_a_config_is_free(wanted):
    """The process was killed while it wrote the first file."""
    wanted.mkdir(parents=True)
    (wanted / ".config.yaml.partial").write_text("name: r")
    assert choose(wanted).path == wanted


def test_a_free_folder_is_taken_and_holds_the_config(wanted):
    found = choose(wanted)
    assert (found.path, found.messages, found.source) == (wanted, [], None)
    assert OmegaConf.to_container(OmegaConf.load(wanted / "config.yaml")) == CONFIG
    assert sorted(path.name for path in wanted.iterdir()) == ["config.yaml", "run.lock"]


def test_an_empty_folder_and_one_with_a_lock_alone_are_free(wanted):
    wanted.mkdir(parents=True)
    (wanted / "run.lock").touch()
    assert choose(wanted).path == wanted


def test_a_folder_with_an_evaluation_alone_is_free(wanted):
    wanted.mkdir(parents=True)
    (wanted / "evaluation.json").touch()
    (wanted / "answers.jsonl").touch()
    assert choose(wanted).path == wanted
    other = wanted.with_name("other")
    other.mkdir()
    (other / "completions.jsonl").touch()
    assert choose(other).path.name == "other-2"
    assert [path.name for path in other.iterdir()] == ["completions.jsonl"], "no lock in a folder of others"


@pytest.mark.parametrize("changes", [{}, {"cache": "another"}, {"steps": 9}, {"steps": 3}, {"logger": {"wandb": {}}}])
def test_an_unfinished_run_is_continued_if_no_key_that_changes_its_weights_differs(wanted, changes):
    choose(wanted)
    (wanted / "metrics.jsonl").write_text("{}")
    found = choose(wanted, **changes)
    assert found.path == wanted
    assert found.messages == [f"{wanted} holds an unfinished run of this config: continuing it"]
    assert (wanted / "metrics.jsonl").read_text() == "{}"
    assert OmegaConf.to_container(OmegaConf.load(wanted / "config.yaml")) == CONFIG | changes


def test_the_message_names_the_key_both_values_and_the_override(wanted):
    choose(wanted)
    found = choose(wanted, **LR)
    assert found.path == wanted.with_name("run-2")
    assert found.messages == [
        f"{wanted} holds an unfinished run with other values: actor.optimizer.lr (1e-06 there, 2e-06 here). To "
        f"continue it, add: actor.optimizer.lr=1e-06. This run is in {found.path}"
    ]
    assert choose(wanted, unread=FREE | {"actor.optimizer"}, **LR).path == wanted, "a run that does not read the key"


def test_steps_count_where_a_learning_rate_decays(wanted):
    choose(wanted)
    found = choose(wanted, unread=frozenset(), steps=9)
    assert found.path.name == "run-2"
    assert "steps (4 there, 9 here; a learning rate decays over the steps)" in found.messages[0]


def test_a_finished_run_is_continued_with_more_steps_and_is_unfinished_again(wanted):
    choose(wanted)
    finish(wanted, 4)
    assert choose(wanted).messages == [f"{wanted} holds a finished run. This run is in {wanted.with_name('run-2')}"]
    assert choose(wanted.with_name("run"), steps=3).path.name == "run-2", "which is unfinished"
    found = choose(wanted, steps=6)
    assert found.path == wanted and "a finished run with fewer steps: continuing it" in found.messages[0]
    assert not (wanted / "result.json").exists()
    finish(wanted, 6)
    found = choose(wanted, steps=8, seed=1)
    assert found.path.name == "run-3"
    assert "a finished run of 6 steps with other values: seed (0 there, 1 here)" in found.messages[0]


@pytest.mark.parametrize("reason", ["never", "someone else's", "a file"])
def test_a_taken_folder_is_left_alone(wanted, reason):
    if reason == "a file":
        wanted.parent.mkdir()
        wanted.write_text("mine")
    elif reason == "someone else's":
        wanted.mkdir(parents=True)
        (wanted / "thesis.tex").write_text("mine")
    else:
        choose(wanted)
    found = choose(wanted, resume="never" if reason == "never" else "auto")
    assert found.path == wanted.with_name("run-2")
    assert found.messages == [f"{wanted} is taken. This run is in {found.path}"]


def test_a_numbered_run_is_continued(wanted):
    choose(wanted)
    second = choose(wanted, seed=1).path
    assert choose(wanted, seed=2).path.name == "run-3"
    assert choose(wanted, seed=1).path == second == wanted.with_name("run-2")


def test_a_name_with_a_dot_keeps_it(tmp_path):
    wanted = tmp_path / "Qwen2.5-lr0.1"
    choose(wanted)
    assert choose(wanted, resume="never").path.name == "Qwen2.5-lr0.1-2"


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^output_dir: the folder .* cannot be made \(.*\); set output_dir$"):
        choose(tmp_path / "file" / "run")


def test_a_run_in_use_is_refused(wanted):
    with RunLock() as lock:
        choose_folder(RunCommand(wanted, CONFIG, 4, FREE), lock)
        with pytest.raises(ValueError, match=r"^output_dir: .* is in use by process \d+ on .*resume=never"):
            choose(wanted)
        assert choose(wanted, seed=1).path.name == "run-2", "another run takes another folder"
    assert choose(wanted).path == wanted


@pytest.mark.parametrize("damage", ["", "a: [1, {", "- 1\n- 2\n", None])
def test_a_damaged_config_beside_checkpoints_is_an_error(wanted, damage):
    choose(wanted)
    newest = checkpoint(wanted, 3)
    if damage is None:
        (wanted / "config.yaml").unlink()
    else:
        (wanted / "config.yaml").write_text(damage)
    with pytest.raises(ValueError, match=r"config.yaml is missing or damaged.*step_00000003.*fork.*never"):
        choose(wanted)
    assert not wanted.with_name("run-2").exists()
    found = choose(wanted, resume="fork")
    assert (found.path.name, found.source) == ("run-2", newest)


def test_a_fork_starts_from_the_newest_checkpoint_and_the_same_command_continues_it(wanted):
    choose(wanted)
    checkpoint(wanted, 2)
    newest = checkpoint(wanted, 3)
    found = choose(wanted, resume="fork", **LR)
    assert (found.path, found.source) == (wanted.with_name("run-2"), newest)
    checkpoint(wanted, 4)
    again = choose(wanted, resume="fork", **LR)
    assert (again.path, again.source) == (found.path, newest), "of the same checkpoint"
    assert choose(wanted, **LR).source == newest, "and so does resume=auto"
    assert choose(wanted, resume="fork").path.name == "run-3"


@pytest.mark.parametrize("named", ["run", "checkpoints", "checkpoint", "latest"])
def test_a_path_names_a_run_or_a_checkpoint(wanted, tmp_path, named):
    choose(wanted)
    first, second = checkpoint(wanted, 2), checkpoint(wanted, 3)
    (wanted / "checkpoints" / "latest").symlink_to(second.name)
    (wanted / "checkpoints" / "step_00000009").write_text("a file")
    (wanted / "checkpoints" / "step_x").mkdir()
    path, source = {"run": (wanted, second), "checkpoints": (first.parent, second), "checkpoint": (first, first),
                    "latest": (wanted / "checkpoints" / "latest", second)}[named]  # fmt: skip
    other = tmp_path / "other"
    found = choose(other, resume=str(path), **LR)
    assert (found.path, found.source) == (other, source)
    assert choose(other, resume=str(path), **LR).path == other
    assert choose(other, **LR).source == source


def test_what_cannot_be_started_from(wanted, tmp_path):
    with pytest.raises(ValueError, match=r"^resume=frok: there is no folder frok; did you mean fork\?"):
        choose(wanted, resume="frok")
    with pytest.raises(ValueError, match=r"^resume=fork: there is no folder .*run"):
        choose(wanted, resume="fork")
    assert not wanted.exists()
    choose(wanted)
    with pytest.raises(ValueError, match=r"^resume=fork: .*run has no checkpoint; .*resume=never"):
        choose(wanted, resume="fork")
    checkpoint(wanted, 3)
    with pytest.raises(ValueError, match=r"^resume=fork: .*step_00000003 does not fit this config: actor.lora.rank \("):
        choose(wanted, resume="fork", actor=CONFIG["actor"] | {"lora": {"rank": 4}})


def test_a_finished_run_has_its_numbers(wanted):
    choose(wanted)
    finish_folder(wanted, {"b": 2.0, "a": 1.0})
    assert json.loads((wanted / "result.json").read_text()) == {"a": 1.0, "b": 2.0}
    assert sorted(path.name for path in wanted.iterdir()) == ["config.yaml", "result.json", "run.lock"]
