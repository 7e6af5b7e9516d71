"""`mode=doctor`: a sound run is told so, and of engines that are broken on purpose the cause is named."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

import rft
from rft.modes.doctor.run import run
from rft.rollout.engine.expanded import OtherPrompt
from rft.strategy.fp8 import can_convert
from tests.conftest import ENDS_S

BROKEN = "tests.modes.doctor.broken"
RUN = ("warmup=none", "mode=doctor", "rollout.temperature=0.7")


@pytest.fixture
def examined(tiny, capsys):
    """The largest gap or what is raised, and what is printed, in one line."""

    def examine(*overrides):
        try:
            found = run(tiny(*RUN, *overrides), Console())
        except ValueError as error:
            found = str(error)
        return found, " ".join(capsys.readouterr().out.split())

    return examine


def test_a_sound_run(examined, tmp_path):
    gap, text = examined()
    assert 0 <= gap < 1e-5
    for check in ("agreement", "weights", "tensors", "drift", "padding and packing", "prompt", "temperature, template"):
        assert f"✓ {check}" in text
    assert "✗" not in text and "• seeds: sampled again, 16 of 16 rows have the same tokens" in text
    assert "'reve" in text, "the prompt is shown"
    assert list(tmp_path.iterdir()) == [], "nothing stays"


@pytest.mark.parametrize(
    ("engine", "check", "cause"),
    [
        (
            "ForgetsTemperature",
            "temperature",
            "samples at temperature 1, not at rollout.temperature=0.7: set rollout.t",
        ),
        (
            "KeepsFirstWeights",
            "weights",
            "has stale weights, it does not use the weights that it receives: fix update_weights",
        ),
        pytest.param(
            "KeepsOneTensor",
            "tensors",
            "not take over all tensors (model.layers.1.self_attn.q_proj.weight): fix update_",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "OneVersionBehind",
            "weights",
            "has stale weights, it does not return to the policy's weights",
            marks=pytest.mark.slow,
        ),
        ("DriftsWithEveryUpdate", "drift", "an update at learning rate 0 changes the gap"),
        pytest.param(
            "DoublesFirstToken", "template", "the engine repeats the first token of a prompt", marks=pytest.mark.slow
        ),
        ("DropsFirstToken", "template", "the engine drops the first token of a prompt"),
        ("Rounds", "rounding", "rounds its log-probabilities to float16: set rollout.engine_args"),
        pytest.param(
            "ComputesInBfloat16",
            "dtype",
            "computes in bfloat16, the trainer in strategy.dtype=float32: set rollout.engi",
            marks=pytest.mark.slow,
        ),
        ("Lies", "agreement", "no known cause explains the gap; see the worst tokens"),
    ],
)
def test_the_cause_of_a_gap_is_named(engine, check, cause, examined):
    said, text = examined(f"rollout.engine._target_=tests.modes.doctor.broken.{engine}")
    assert cause in str(said)
    failed = {line.split(":")[0] for line in text.split("✗ ")[1:]}
    others = set() if engine == "OneVersionBehind" else {"temperature", "template", "rounding", "dtype", "drift"}
    assert check in failed and not (others - {check}) & failed, text


@pytest.mark.parametrize("scaled", [False, True], ids=["each token", "all tokens"])
def test_float8_of_the_trainer_is_named(scaled, examined, monkeypatch):
    """Without torchao: what the layers of a model that trains read is rounded to float8, with a scale or without."""

    def rounds(module, inputs):
        scale = inputs[0].abs().max() / 100 if scaled else 1.0
        return ((inputs[0] / scale).to(torch.float8_e4m3fn).to(inputs[0].dtype) * scale, *inputs[1:])

    def use_fp8(block, recipe):
        for name, module in block.named_modules():
            if can_convert(module, name):
                module.register_forward_pre_hook(rounds)

    monkeypatch.setattr("rft.strategy.fp8.use_fp8", use_fp8)
    monkeypatch.setattr("rft.strategy.fp8.fp8_errors", lambda *given: [])
    said, text = examined("strategy.fp8=rowwise")
    cure = "the trainer computes with strategy.fp8=rowwise, and the engine does not: choose a correction of the gap"
    rows = "the other rows: set strategy.fp8=null, or actor.packing=false and actor.share_prefix=false"
    assert (rows if scaled else cure) in said
    assert "✗ options: the trainer without strategy.fp8=rowwise" in text and "dtype:" not in text
    assert ("✗ padding and packing" in text) is scaled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "cause"),
    [
        ("GoesOn", None),
        ("StampsAnswersWithTheLastVersion", "stamps tokens with weights that did not sample them"),
        ("GoesOnWithOlderWeights", "continues with keys and values of older weights behind an update"),
    ],
)
def test_weights_that_arrive_while_answers_are_sampled(engine, cause, examined):
    ahead = ("rollout.staleness=1", "algorithm.old_logprobs=rollout", "batch.prompts=2")
    said, text = examined(f"rollout.engine._target_=tests.modes.doctor.broken.{engine}", *ahead)
    failed = {line.split(":")[0] for line in text.split("✗ ")[1:]}
    if cause is None:
        assert said < 1e-5 and not failed, text
        assert "behind the first update of an answer" in text
    else:
        assert cause in str(said) and failed == {"versions"}, text


def test_an_engine_that_heeds_no_seeds_is_not_blamed_for_it(examined):
    said, text = examined("rollout.engine._target_=tests.modes.doctor.broken.HeedsNoSeeds")
    assert said < 1e-5 and "✗" not in text and "16 of 16 rows" not in text


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_cause_of_a_gap_is_named_where_no_two_samples_are_the_same(seed, examined):
    engine = "rollout.engine._target_=tests.modes.doctor.broken.HeedsNeitherSeedsNorTemperature"
    said, text = examined(engine, f"seed={seed}")
    assert "samples at temperature 1, not at rollout.temperature=0.7" in str(said)
    assert {line.split(":")[0] for line in text.split("✗ ")[1:]} == {"agreement", "temperature"}, text


def test_truncation_is_told_and_not_blamed(examined):
    gap, text = examined("rollout.top_k=3")
    assert gap < 1e-5
    assert (
        "• truncation: rollout.top_p, top_k, min_p or first_token change the sampled distribution, which makes a gap of"
        in text
    )
    assert text.index("as training samples") < text.index("without truncation") and "✗" not in text


@pytest.mark.parametrize("truncation", [(), ("rollout.top_k=3",)])
def test_an_engine_that_sleeps_is_not_asked_to_sample(truncation, examined):
    gap, text = examined("rollout.engine._target_=tests.modes.doctor.broken.SamplesOnlyAwake", *truncation)
    assert gap < 1e-5 and "✗" not in text


@pytest.mark.slow
def test_the_first_token_that_an_engine_expands_otherwise_is_named(resolved, capsys):
    small = ("data.train.count=16", "data.eval.heldout.count=8", "batch.prompts=2", "algorithm.group_size=2")

    def examine(engine):
        config = resolved(
            "actor=tiny_vision", "data=shapes", *RUN, *small, f"rollout.engine._target_={BROKEN}.{engine}"
        )
        return run(config, Console()), " ".join(capsys.readouterr().out.split())

    gap, text = examine("ExpandsItself")
    assert gap < 1e-4 and "✓ media: the engine has expanded all prompts to the tokens that the trainer reads" in text
    with pytest.raises(OtherPrompt, match=r"prompt 0: .*The first difference is at position \d+, .* in all\)\."):
        examine("ExpandsToOneLess")


def test_an_algorithm_that_samples_nothing_is_refused(tiny):
    with pytest.raises(ValueError, match="mode=doctor: algorithm=sft has no step with sampled texts only"):
        run(tiny("mode=doctor", "algorithm=sft"), Console())


def called(folder, command, *overrides):
    """What the main program says of itself, in one line, and whether it ended well."""
    root = str(Path(rft.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = [sys.executable, *command, "-m", "rft.main", f"output_dir={folder}/run", "strategy.device=cpu", *overrides]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=ENDS_S)
    return " ".join(f"{done.stdout} {done.stderr}".split()), done.returncode == 0


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
def test_two_processes_are_examined_together(sized, tmp_path):
    small = sized(*RUN, "strategy.dtype=bfloat16")
    text, well = called(tmp_path, TWO, *small, "algorithm=ppo", "rollout.top_p=0.9")
    assert well and text.count("✓ agreement") == 1 and "✗" not in text and "8 of 8 rows" not in text
    text, well = called(
        tmp_path, TWO, *sized(*RUN), "rollout.engine._target_=tests.modes.doctor.broken.ComputesInBfloat16"
    )
    assert not well and "rank 1: error: mode=doctor: the engine computes in bfloat16" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_vllm_is_sound(temperature, sized, tmp_path):
    engine = (
        "rollout=vllm",
        "+rollout.engine_args.enforce_eager=true",
        "rollout.engine_args.gpu_memory_utilization=0.1",
    )
    small = [word for word in sized("warmup=none") if "head_dim" not in word]
    own = ("mode=doctor", "actor.model_config.head_dim=32", f"rollout.temperature={temperature}")
    text, well = called(tmp_path, (), *engine, *small, *own)
    assert well and "✗" not in text, text
    for check in ("agreement", "weights", "drift"):
        assert f"✓ {check}" in text
