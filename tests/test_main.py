"""What the command line says: at once where nothing is to be trained, and in one message where something is wrong."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

import rft
from rft.errors import Stopped
from rft.main import HYDRA_FOLDER, check_names, main
from rft.modes import MODES, find_mode
from rft.setup.assembly import Job
from rft.setup.schema import Run
from tests.conftest import CONFIG, composed, plain

ROOT = Path(rft.__file__).parent.parent
SLOW = ("torch", "transformers", "tensordict", "datasets")


def stems(group):
    return sorted(path.stem for path in (ROOT / "rft" / "config" / group).glob("[!_]*.yaml"))


@pytest.fixture
def say(monkeypatch, capsys, tmp_path):
    """Runs the command line in this process, in an empty folder; returns exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rft", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(tmp_path)
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cfg", "job"],
        pytest.param(["--help"], marks=pytest.mark.slow),
        pytest.param(["--cfg", "job", "algorithm=ppo"], marks=pytest.mark.slow),
    ],
)
def test_composing_imports_nothing_slow(arguments, tmp_path):
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['rft', *{arguments!r}]\n"
        "try:\n"
        "    runpy.run_module('rft.main', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        f"assert not set({SLOW!r}) & set(sys.modules), set({SLOW!r}) & set(sys.modules)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "group_size: 8" in found.stdout
    if "--cfg" in arguments:  # Hydra itself; composing in tests keeps what it has read
        config = composed(tuple(arguments[2:]), CONFIG, "main")
        assert found.stdout.rstrip() == OmegaConf.to_yaml(config).rstrip()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_without_a_traceback(say, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "fit", interrupted)
    assert say() == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sed=1"], "sed: no such key; did you mean seed?"),
        (["algorithm.group_sise=4"], "algorithm.group_sise: no such key; did you mean algorithm.group_size?"),
        (
            ["algorithm.loss.clip_hgh=0.3"],
            "algorithm.loss.clip_hgh: no such key; did you mean algorithm.loss.clip_high?",
        ),
        (
            ["algorithm=grppo"],
            f"algorithm=grppo: no such option; did you mean grpo? (known: {', '.join(stems('algorithm'))})",
        ),
        (
            ["algorithm/loss=ppoclip"],
            "algorithm/loss=ppoclip: no such option; did you mean ppo_clip? "
            f"(known: {', '.join(stems('algorithm/loss'))})",
        ),
        (
            ["reward.terms.exact_match.call.workers=process"],
            "reward.terms.exact_match.call.workers: the yaml of this term does not have the key; add it with "
            "+reward.terms.exact_match.call.workers",
        ),
        (["actor=hf"], "actor.path is missing: set actor.path=<value>"),
        (["data=questions"], "data.eval.questions.path is missing: set data.eval.questions.path=<value>"),
        (["data=trl"], "data.train.path is missing: set data.train.path=<value>"),
        (
            ["warmup=none", "warmup.steps=3"],
            "warmup.steps: the selected options have no such key; another option of warmup has it",
        ),
        (
            ["plugins=[my_rewrads]"],
            "plugins: no module 'my_rewrads' is found; "
            "it is looked for beside the recipe (-cd <folder>) and on PYTHONPATH",
        ),
        (["steps=0"], "steps=0: it must be at least 1"),
        (
            ["algorithm=prime", "algorithm.source.redraw.between=[0.9,0.1]"],
            "algorithm.source.redraw.between=[0.9, 0.1]: expected [low, high] with 0 <= low < high, or null",
        ),
        (["steps=many"], "steps: expected whole number, got 'many'"),
        (
            ["mode=tain"],
            "mode: expected one of train, verify, plan, doctor, replay, inspect, serve, evaluate, generate, chat, got "
            "'tain'; did you mean train?",
        ),
    ],
)
def test_one_message_for_what_the_user_did_wrong(arguments, message, say, tmp_path):
    code, out, error = say(*arguments)
    assert (code, out) == (1, "")
    assert error == f"error: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_message_of_a_process_that_was_started_by_torchrun_names_its_rank(say, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert say("sed=1")[2].startswith("rank 1: error: sed: no such key")


@pytest.mark.parametrize(("variables", "status"), [({}, 75), ({"TORCHELASTIC_RUN_ID": "none"}, 0)])
def test_a_run_that_can_be_continued_has_an_exit_status_of_its_own_except_under_torchrun(
    variables, status, say, monkeypatch
):
    """torchrun restarts a process that ends with another status than 0."""
    monkeypatch.setattr(rft.main, "run", lambda: (_ for _ in ()).throw(Stopped(4, "SIGUSR1")))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert say() == (status, "", "")


def test_our_own_mistakes_keep_their_traceback(say, monkeypatch):
    monkeypatch.setattr(Job, "__init__", lambda *_: {}["a mistake"])
    with pytest.raises(KeyError, match="a mistake"):
        say()


@pytest.mark.slow
def test_the_program_ends_with_code_1_and_no_traceback(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rft.main", "algoritm=grpo"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == "error: algoritm: no such key; did you mean algorithm?\n"


# Recipes


def recipe(folder, body, name="run"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.yaml").write_text("defaults:\n  - main\n  - _self_\n" + body)
    return folder


def test_a_value_that_cannot_be_read_is_named(say, tmp_path):
    code, _, error = say("-cd", recipe(tmp_path / "mine", "steps: ${oc.env:A,~b}\n"), "-cn", "run")
    assert (code, error) == (1, "error: steps: token recognition error at: '~'\n")


@pytest.mark.parametrize("part", ["loss", "advantage"])
@pytest.mark.parametrize("name", ["run", "run.yaml"])
def test_a_recipe_whose_body_sets_numbers_of_a_loss_is_refused(part, name, say, tmp_path):
    folder = recipe(tmp_path / "mine", f"algorithm:\n  {part}:\n    clip: 0.1\n")
    code, _, error = say("-cd", folder, "-cn", name)
    assert code == 1
    assert error.startswith(
        f"error: {folder / 'run.yaml'}: the body sets algorithm.{part}; the value would apply to any {part}"
    )
    assert f"algorithm/{part}/<name>.yaml" in error


def test_a_typed_value_that_the_run_does_not_read_is_refused_with_its_place(say, tmp_path):
    folder = recipe(tmp_path / "mine", "critic:\n  micro_batch_tokens: 7\n")
    code, _, error = say("-cd", folder, "-cn", "run", "eval.temperature=0.5")
    assert (code, error) == (
        1,
        f"error: 2 mistakes\n1. {folder / 'run.yaml'}: critic.micro_batch_tokens: this run does not read it (the "
        "algorithm reads no values, so there is no such model); take it out\n2. eval.temperature: this run does not "
        "read it (eval.samples=0); take it out\n",
    )


def test_a_misspelt_key_in_a_recipe_is_refused(say, tmp_path):
    code, _, error = say("-cd", recipe(tmp_path / "mine", "batch:\n  promts: 4\n"), "-cn", "run")
    assert (code, error) == (
        1,
        "error: batch.promts: Batch takes prompts, minibatches, epochs, balance; did you mean prompts?\n",
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (b"data:\n\tname: x\n", " line 5: while scanning for the next token, found character '\\t' that cannot"),
        (
            b"name: a\nname: b\n",
            " line 5: while constructing a mapping, found duplicate key name; remove one of the two",
        ),
        (b"seed: 1\0\n", " line 4: the character U+0000 is no part of yaml; remove it"),
        (b"seed: !foo 1\n", " line 4: could not determine a constructor for the tag '!foo'; yaml of a config has no"),
        (b"a: caf\xe9\n", " line 4: not UTF-8 (byte 0xe9); save the file in UTF-8"),
        (b"a: " + b"[" * 500, ": lists and mappings are nested too deeply; write a flatter file"),
        (b"a: *b\n", " line 4: found undefined alias 'b'; quote a text that begins with '*'"),
    ],
)
@pytest.mark.parametrize("option", [False, True])
def test_a_yaml_file_that_cannot_be_read_is_named_with_its_line(option, more, message, say, tmp_path):
    folder = tmp_path / "mine"
    path = folder / "data" / "own.yaml" if option else folder / "run.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"defaults:\n  - main\n  - _self_\n" + more)
    code, out, error = say("-cd", folder, *(["data=own"] if option else ["-cn", "run"]))
    assert (code, out) == (1, "") and error.startswith(f"error: {path}{message}") and error.count("\n") == 1


@pytest.mark.parametrize("flag", [["-cd", "{}"], ["--config-dir", "{}"], ["--config-dir={}"]])
def test_a_plugin_beside_the_recipe_is_found(flag, say, tmp_path, request):
    """Its ValueError passes through main: the module was imported."""
    folder = recipe(tmp_path / "mine", "")
    module = f"plugin_{abs(hash(request.node.name))}"
    (folder / f"{module}.py").write_text("raise ValueError('imported')\n")
    code, _, error = say(*[part.format(folder) for part in flag], "-cn", "run", f"plugins=[{module}]")
    assert code == 1 and error.endswith(".py:1: ValueError: imported\n"), error


def test_a_folder_of_options_alone_needs_no_recipe(say, tmp_path):
    options = tmp_path / "mine" / "algorithm" / "loss"
    options.mkdir(parents=True)
    (options / "wild.yaml").write_text("name: ppo_clip\nclip_low: 0.9\nclip_high: 9.0\ndual_clip: null\n")
    code, _, error = say("-cd", tmp_path / "mine", "algorithm/loss=wild", "steps=0")
    assert (code, error) == (1, "error: steps=0: it must be at least 1\n")


@pytest.mark.parametrize("place", range(3))
def test_flags_stand_anywhere_among_the_overrides(place, say, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.yaml").write_text("defaults: [main, _self_]\nsteps: 7\n")
    overrides = ["seed=-1", "batch.prompts=0"]
    arguments = [*overrides[:place], "-cn", "run", "-cd", tmp_path / "mine", *overrides[place:], "--cfg=job"]
    code, out, error = say(*arguments)
    assert (code, error) == (0, "") and "\nsteps: 7\n" in out and "\nseed: -1\n" in out and "  prompts: 0\n" in out


def test_verify_prints_the_certificate_and_trains_nothing(say, tmp_path):
    code, out, error = say("mode=verify", "algorithm=gspo")
    assert (code, error) == (0, "")
    assert "✓ loss gspo: as declared" in out and list(tmp_path.iterdir()) == []


def test_verify_of_a_recipes_loss_that_is_not_what_it_states(say, tmp_path, plugins_forgotten):
    (tmp_path / "mine" / "algorithm" / "loss").mkdir(parents=True)
    (tmp_path / "mine" / "algorithm" / "loss" / "upside_down.yaml").write_text("name: upside_down\n")
    (tmp_path / "mine" / "run.yaml").write_text(
        "defaults: [main, {override algorithm/loss: upside_down}, _self_]\nplugins: [upside_down]\nmode: verify\n"
    )
    (tmp_path / "mine" / "upside_down.py").write_text(
        "from rft.algorithm import LOSSES, Gradient\n"
        "@LOSSES.register('upside_down', reads=('advantages',), gradient=Gradient('exact'))\n"
        "def upside_down(logprobs, batch):\n    return batch['loss_mask'] * batch['advantages'] * logprobs, {}\n"
    )
    code, out, error = say("-cd", tmp_path / "mine", "-cn", "run")
    assert code == 1 and "✗ loss upside_down: is not what it declares" in out
    assert error == "error: mode=verify: a part of the algorithm is not what it declares; see the lines marked ✗\n"


def test_every_mode_of_the_config_has_a_function_and_an_unknown_one_is_that_of_training():
    assert tuple(MODES) == get_args(get_type_hints(Run)["mode"])
    assert find_mode("tain") is find_mode("train") and find_mode(None) is find_mode("train")
    assert {find_mode(name) for name in MODES} == {vars(sys.modules[module])[name] for module, name in MODES.values()}


def test_a_mode_that_is_taken_out_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(MODES, "plan", ("rft.modes.not_here", "plan_run"))
    with pytest.raises(ValueError, match=r"^mode=plan: rft\.modes\.not_here is not in this package"):
        find_mode("plan")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("steps=3", "algorithm=ppo", "+rollout.engine_args.max_model_len=9", "rollout=vllm"),
        ("~data.eval.heldout", "hydra.run.dir=x", "logger=[tensorboard]", "algorithm.loss.clip_high=0.5"),
    ],
)
def test_configs_of_tests_are_those_of_the_command_line(overrides, resolved):
    """Tests share what they compose."""
    assert resolved(*overrides) == plain(composed(overrides, CONFIG, "main"))


def test_a_recipe_adds_options_under_names_that_the_package_has_not(say, tmp_path):
    file = tmp_path / "recipe" / "algorithm" / "loss" / "wide.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("name: gspo\nclip_low: 9.0\nclip_high: 9.0\n")
    chosen = ("-cd", tmp_path / "recipe", "algorithm/loss=wide")
    code, out, _ = say(*chosen, "--cfg", "job", "--package", "algorithm.loss")
    assert (code, OmegaConf.create(out).clip_low) == (0, 9.0)


@pytest.mark.parametrize(
    ("folder", "name", "chosen"),
    [
        (CONFIG, "algorithm/loss/gspo.yaml", ["algorithm/loss=gspo", "-m"]),
        (CONFIG, "data/_base.yaml", ["--help"]),
        (CONFIG, "main.yaml", ["-cn", "main"]),
        (HYDRA_FOLDER, "hydra/output/default.yaml", []),
    ],
)
def test_a_file_of_a_recipe_that_hydra_would_not_read_is_refused(folder, name, chosen, say, tmp_path):
    """Hydra reads the file of the first folder of its search path, even if the recipe's cannot be read."""
    file = tmp_path / "recipe" / name
    file.parent.mkdir(parents=True)
    file.write_text("name: [")
    code, out, error = say("-cd", "recipe", *chosen)
    assert (code, out) == (1, "")
    assert error == (
        f"error: recipe/{name}: Hydra would read {folder / name} in its place, which has the same name; rename your "
        "file\n"
    )


def test_a_folder_that_takes_the_place_of_the_package_has_names_of_its_own(say, tmp_path):
    for folder in ("first", "second"):
        recipe(tmp_path / folder, "").joinpath("run.yaml").write_text(f"chosen: {folder}\n")
    (tmp_path / "second" / "main.yaml").touch()
    code, _, error = say("-cp", tmp_path / "first", "-cd", tmp_path / "second", "-cn", "run")
    assert (code, str(tmp_path / "second" / "run.yaml") in error, "main.yaml" in error) == (1, True, False)
    code, out, _ = say("-cd", CONFIG, "--cfg", "job")
    assert (code, "\nseed: 0\n" in out) == (0, True)


@pytest.mark.parametrize("folder", sorted(folder.name for folder in (ROOT / "recipes").iterdir() if folder.is_dir()))
def test_every_file_of_a_recipe_is_read(folder):
    check_names((HYDRA_FOLDER, CONFIG), ROOT / "recipes" / folder)


def test_the_first_mode_of_a_process_excludes_its_imports_from_garbage_collection():
    """A later mode excludes nothing more: in a sweep, that would be the garbage of the job before. Here the modes are
    replaced by a light module, and a name in sys.modules stands for torch, which the modes of runs import."""
    code = (
        "import gc, sys; from rft.modes import MODES, find_mode; before = gc.get_freeze_count(); "
        "MODES['train'] = MODES['evaluate'] = ('asyncio', 'run'); find_mode('train'); frozen = gc.get_freeze_count(); "
        "kept = [[] for _ in range(50_000)]; sys.modules['torch'] = gc; find_mode('train'); find_mode('evaluate'); "
        "print(gc.isenabled(), frozen > before + 10_000, gc.get_freeze_count() <= frozen)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.split() == ["True"] * 3, found.stderr


def test_an_error_has_no_codes_of_a_terminal(say):
    code, _, error = say("data.template='\x1b[31m[/b]'")
    assert code == 1 and "data.template= [31m[/b]: " in error and "\x1b" not in error
