"""A run folder that is damaged between two processes: the damage is found and named, and the newest good checkpoint is
used, so that the run ends as the one that was not damaged."""

import json
import re
import resource
import shutil
from functools import reduce
from operator import getitem

import pytest

from rft.logger.console import RunConsole
from rft.rollout.sampler import EngineSampler
from rft.setup.assembly import Job
from rft.train.checkpoint.manifest import describe, files_of, read_manifest, write_manifest
from rft.train.checkpoint.saved_state import STRUCTURE, SavedState, structure_of
from rft.train.trainer import Trainer
from tests.e2e.kills import contents
from tests.helpers import Interrupted, interrupt

pytestmark = pytest.mark.usefixtures("one_thread")
RUN = ("warmup.steps=1", "steps=3", "checkpoint.every=1", "checkpoint.keep_last=2", "trajectories.every=1",
       "eval.every=0", "eval.at_start=false", "strategy.device=cpu", "checkpoint.fallback=null")  # fmt: skip
BEFORE, NEWEST = "checkpoints/step_00000002", "checkpoints/step_00000003"
FILE = "shard-00001-model-00001-of-00001.safetensors"
SHARD = f"{NEWEST}/{FILE}"


# Kinds that differ from another one for the files alone, which tests/train/checkpoint reads, too.
SLOW = ("truncated weights", "missing weights", "a truncated state", "a missing manifest", "latest is missing",
        "a file among checkpoints", "an empty folder of a later step", "checkpoints is a file", "latest leads nowhere",
        "a link that leads nowhere", "a flipped bit in the manifest", "a copy under the name of a later step",
        "a file in the checkpoint", "a flipped bit in the export", "an empty folder",
        "weights of another checkpoint beside its own", "a checkpoint of a run with another seed",
        "a copy of the one before under its name", "a file where the next checkpoint will be")  # fmt: skip


def parameters(kinds):
    return [
        pytest.param(*kind, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, kind in kinds.items()
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Folders that all tests share: the whole run, and one that was interrupted."""
    return tmp_path_factory.mktemp("damage")


@pytest.fixture
def run(kept, tiny, tmp_path, monkeypatch, request):
    """The folder of the run that was interrupted after step 3; its newest checkpoints are those of steps 2 and 3."""
    folder = tmp_path / "run"
    if "another seed" in request.node.name:
        interrupted(tiny(*RUN, "seed=1"), monkeypatch)
        folder.rename(tmp_path / "other")
    if not (kept / "interrupted").exists():
        Job(tiny(*RUN)).fit("")
        folder.rename(kept / "whole")
        interrupted(tiny(*RUN), monkeypatch)
        folder.rename(kept / "interrupted")
    shutil.copytree(kept / "interrupted", folder, symlinks=True)
    return folder


def interrupted(config, monkeypatch):
    """Makes the folder of a run that is interrupted after step 3."""
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Interrupted):
            Job(config).fit("")


@pytest.fixture
def ends_well(kept, tiny, tmp_path):
    """Runs the command; apart from the files named the run ends as the whole one. Returns its warnings."""

    def end(*apart):
        run, whole = tmp_path / "run", contents(kept / "whole")
        Job(tiny(*RUN)).fit("")
        assert not (tmp_path / "run-2").exists()
        for path in (run / "checkpoints").glob("damaged_*"):
            shutil.rmtree(path)
        found = contents(run)
        whole["config.yaml"] = found["config.yaml"]  # it has the name of the folder
        assert [name for name in {**whole, **found} if found.get(name, "") != whole.get(name, "")] == list(apart)
        return (run / "warnings.txt").read_text() if (run / "warnings.txt").exists() else ""

    return end


def flip(path):
    """Changes one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    """Leaves the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil(path):
    """Puts a line in front that is no object."""
    path.write_text(f"3\n{path.read_text()}")


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def dangle(path):
    path.unlink()
    path.symlink_to("nowhere")


# What is done to the run, and the warning about the checkpoint of step 3, which the run renames.
NEWEST_IS_LOST = {
    "a flipped bit in the weights": (lambda run: flip(run / SHARD), "shard-.* has changed since it was written"),
    "a flipped bit in the state": (lambda run: flip(run / NEWEST / "state.json"), "state.json has changed"),
    "a flipped bit in the export": (lambda run: flip(run / NEWEST / "actor" / "model.safetensors"), "actor/.* changed"),
    "a flipped bit in the manifest": (lambda run: flip(run / NEWEST / "MANIFEST.json"), "MANIFEST.json "),
    "a truncated state": (lambda run: cut(run / NEWEST / "state.json"), "state.json has changed"),
    "truncated weights": (lambda run: cut(run / SHARD), "shard-.* has changed"),
    "missing weights": (lambda run: (run / SHARD).unlink(), "shard-.* is missing"),
    "a link that leads nowhere": (lambda run: dangle(run / SHARD), "shard-.* is missing"),
    "a missing manifest": (lambda run: (run / NEWEST / "MANIFEST.json").unlink(), "MANIFEST.json is missing"),
    "an empty folder": (lambda run: empty(run / NEWEST), "MANIFEST.json is missing"),
    "weights of another checkpoint beside its own": (
        lambda run: shutil.copy(run / BEFORE / FILE, run / NEWEST / "x.safetensors"),
        "x.safetensors is not one of its files",
    ),
    "a checkpoint of a run with another seed": (
        lambda run: (shutil.rmtree(run / NEWEST), shutil.copytree(run.parent / "other" / NEWEST, run / NEWEST)),
        r"it is of another run: seed \(1 there, 0 here\)",
    ),
    "a copy of the one before under its name": (
        lambda run: (shutil.rmtree(run / NEWEST), shutil.copytree(run / BEFORE, run / NEWEST)),
        "it is the checkpoint of step 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "text"), parameters(NEWEST_IS_LOST))
def test_of_a_damaged_checkpoint_the_one_before_is_used(damage, text, run, ends_well):
    damage(run)
    warnings = ends_well("warnings.txt")
    assert re.search(rf"the checkpoint {run}/{NEWEST} is damaged: {text}.*renamed to damaged_step_00000003$", warnings)


# What is done to the run, which still continues from step 3; the warning; the names that differ at the end.
NOTHING_IS_LOST = {
    "latest is missing": (lambda run: (run / "checkpoints/latest").unlink(), "", ()),
    "latest leads nowhere": (lambda run: dangle(run / "checkpoints/latest"), "", ()),
    "latest is a folder": (
        lambda run: ((run / "checkpoints/latest").unlink(), shutil.copytree(run / NEWEST, run / "checkpoints/latest")),
        "latest is a folder, not a link to the newest checkpoint; it is renamed to damaged_latest",
        ("warnings.txt",),
    ),
    "a file in the checkpoint": (lambda run: (run / NEWEST / "notes.txt").write_text("x"), "",
                                 (f"{NEWEST}/notes.txt",)),
    "a file among checkpoints": (lambda run: (run / "checkpoints/notes.txt").write_text("x"), "",
                                 ("checkpoints/notes.txt",)),
    "a file where the next checkpoint will be": (
        lambda run: (run / "checkpoints/step_00000004").write_text("x"), "", ()
    ),
    "an empty folder of a later step": (
        lambda run: (run / "checkpoints/step_00000009").mkdir(), "step_00000009 is damaged", ("warnings.txt",)
    ),
    "a copy under the name of a later step": (
        lambda run: shutil.copytree(run / BEFORE, run / "checkpoints/step_00000009"),
        "step_00000009 is damaged: it is the checkpoint of step 2", ("warnings.txt",),
    ),
    "an empty result": (lambda run: (run / "result.json").write_text(""), "", ()),
    "half of the metrics": (
        lambda run: cut(run / "metrics.jsonl"), r"metrics.jsonl has no lines of steps \d to 3",
        ("metrics.jsonl", "warnings.txt"),
    ),
    "a damaged line of each log": (
        lambda run: [spoil(path) for path in (run / "metrics.jsonl", run / "worst_tokens.jsonl",
                                              run / "trajectories" / "step_00000003.jsonl")],
        "metrics.jsonl: line 1 is damaged and left out; metrics.jsonl.damaged is the file as it was\n"
        "worst_tokens.jsonl: line 1 is damaged and left out; worst_tokens.jsonl.damaged is",
        ("trajectories/step_00000003.jsonl", "metrics.jsonl.damaged", "warnings.txt", "worst_tokens.jsonl.damaged"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "text", "apart"), parameters(NOTHING_IS_LOST))
def test_other_damage_loses_no_step(damage, text, apart, run, ends_well, monkeypatch):
    damage(run)
    steps, update = [], Trainer.update
    monkeypatch.setattr(
        Trainer, "update", lambda trainer, *given: (steps.append(trainer.step), update(trainer, *given))
    )
    assert re.search(text, ends_well(*apart)) and steps == [4]


def flip_all(run):
    for path in (run / "checkpoints").glob("step_*/state.json"):
        flip(path)


# What ends the command before it trains, and its message.
REFUSED = {
    "all checkpoints are damaged": (flip_all, r"every checkpoint in .* is damaged \(step_00000003: state.json has .*; "
                                    r"step_00000002: .*restore one, or set resume=never"),
    "checkpoints is a file": (
        lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").write_text("")),
        "checkpoints is not a folder",
    ),
    "checkpoints is on a disk that is not there": (
        lambda run: (shutil.rmtree(run / "checkpoints"), (run / "checkpoints").symlink_to("/nowhere")),
        "checkpoints is not a folder, or links to a folder that is not there",
    ),
    "an empty config": (lambda run: (run / "config.yaml").write_text(""), "config.yaml is missing or damaged"),
    "a damaged config": (lambda run: (run / "config.yaml").write_bytes(b"\xff"), "config.yaml is missing or damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "text"), parameters(REFUSED))
def test_damage_that_a_person_has_to_mend_is_named(damage, text, run, tiny, tmp_path):
    damage(run)
    before = contents_of_checkpoints(run)
    with pytest.raises(ValueError, match=text):
        Job(tiny(*RUN)).fit("")
    assert contents_of_checkpoints(run) == before and not (tmp_path / "run-2").exists()


CONTENT = {
    "no step of the stage": lambda state: state.pop("stage_step"),
    "no weights of the model that trains": lambda state: state["actors"].pop("actor"),
    "weights of another name": lambda state: next(iter(state["actors"]["actor"]["network"].values())).update(
        {"$tensor": "x"}
    ),
    "no position of the source": lambda state: state["source"].pop("position"),
}


@pytest.mark.parametrize("edit", CONTENT.values(), ids=CONTENT)
def test_a_checkpoint_of_another_version_is_named(edit, run, tiny, tmp_path):
    """Its hashes are right."""
    folder = run / NEWEST
    facts, state = read_manifest(folder), json.loads((folder / "state.json").read_text())
    del facts["files"]
    edit(state)
    facts[STRUCTURE] = structure_of(state)
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder, {name: describe(folder / name) for name in files_of(folder)}, facts)
    before = contents_of_checkpoints(run)
    with pytest.raises(ValueError, match=rf"^the checkpoint {folder} has another content than this program reads"):
        Job(tiny(*RUN)).fit("")
    assert contents_of_checkpoints(run) == before and not (tmp_path / "run-2").exists()


OTHERS = (None, True, 3, 0.5, "3", [], {})  # a value of every type of JSON


def places(node, place=()):
    """The places of all values of a state, and of its empty lists and mappings."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [leaf for key, item in pairs for leaf in places(item, (*place, key))] or [place]


def test_a_state_in_which_any_value_has_another_type_is_refused_before_it_is_used(run):
    """Whether the manifest has the hash of the edited file does not matter."""
    folder = run / NEWEST
    state = json.loads((folder / "state.json").read_text())
    found = places(state)
    assert ("source", "position") in found and any(place[0] == "ledger" for place in found)
    for number, (*outer, key) in enumerate(found):
        node = reduce(getitem, outer, state)
        value, others = node[key], [other for other in OTHERS if type(other) is not type(node[key])]
        node[key] = others[number % len(others)]
        (folder / "state.json").write_text(json.dumps(state))
        part = found[number][0]
        with pytest.raises(ValueError, match=rf"^the checkpoint {folder} has another content .*Error: {part}: a value"):
            SavedState(folder)
        node[key] = value
    (folder / "state.json").write_text(json.dumps(state))
    assert SavedState(folder)["step"] == 3


def contents_of_checkpoints(run):
    return {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}


@pytest.fixture
def full_disk(monkeypatch):
    """While the checkpoint of a step is written for the first time, a file can have no more than 100 kB."""
    save, limits = Trainer.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step):
        steps = []

        def saved(trainer, *given):
            steps.append(trainer.step)
            if trainer.step == step and steps.count(step) == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            save(trainer, *given)
            trainer.checkpoints._writing.exception()  # its thread has ended
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        monkeypatch.setattr(Trainer, "save", saved)

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_while_a_checkpoint_is_written_ends_nothing(run, ends_well, full_disk):
    assert (run / SHARD).stat().st_size > 100_000 > (run / NEWEST / "actor" / "model.safetensors").stat().st_size
    shutil.rmtree(run)
    full_disk(2)
    warnings = ends_well("warnings.txt")
    assert re.search(
        r"the checkpoint of step 2 could not be written \(.*\); .*_00000001 stays .*, and the run continues", warnings
    )


def test_a_full_disk_at_the_end_leaves_the_last_checkpoint_in_the_fallback(run, ends_well, full_disk, tiny, tmp_path):
    full_disk(4)
    with pytest.raises(ValueError, match=r"could not be written to .* \(.*File too large.* and is in "):
        Job(tiny(*RUN, f"checkpoint.fallback={tmp_path}/else")).fit("")
    assert not (run / "result.json").exists()
    [saved] = (tmp_path / "else").glob("run-*/step_00000004")
    shutil.move(saved, run / "checkpoints")
    full_disk(None)
    assert "step_00000003 stays the newest" in ends_well("warnings.txt")


@pytest.mark.parametrize("step", [3, 4])
def test_a_run_folder_that_is_renamed_ends_the_run_at_its_next_checkpoint(step, run, tiny, tmp_path, monkeypatch):
    """Step 4 is the last one."""
    shutil.rmtree(run)
    update = Trainer.update

    def rename(trainer, *given):
        if trainer.step == step:
            run.rename(tmp_path / "elsewhere")
        update(trainer, *given)

    monkeypatch.setattr(Trainer, "update", rename)
    with pytest.raises(ValueError, match=rf"{run} was removed or renamed while the run wrote .* and is in "):
        Job(tiny(*RUN, f"checkpoint.fallback={tmp_path}/else")).fit("")
    assert not run.exists() and len(list((tmp_path / "else").glob(f"run-*/step_0000000{step}"))) == 1


def test_after_a_full_disk_at_the_end_the_same_command_writes_the_last_checkpoint(run, ends_well, full_disk, tiny):
    full_disk(4)
    with pytest.raises(ValueError, match=r"the last checkpoint could not be written to .* same command again"):
        Job(tiny(*RUN)).fit("")
    assert not (run / "result.json").exists() and (run / NEWEST).exists()
    full_disk(None)
    assert "step_00000003 stays the newest" in ends_well("warnings.txt")


def test_an_error_after_the_last_step_is_a_warning_and_the_run_has_its_result(run, ends_well, monkeypatch):
    """The report cannot be written, as a folder has its name, and the engine and the table of the end fail."""
    (run / "report.html").unlink()
    (run / "report.html").mkdir()

    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(EngineSampler, "close", fail)
    monkeypatch.setattr(RunConsole, "summary", fail)
    warnings = ends_well("report.html", "warnings.txt").splitlines()
    assert [text.partition(" failed; training does not depend on it: ")[0] for text in warnings] == [
        "closing the sampler", "the report", "the summary"
    ]  # fmt: skip
    assert (run / "result.json").exists()
