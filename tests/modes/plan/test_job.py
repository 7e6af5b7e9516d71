"""What a run takes, gone through without numbers: every part of it follows from the config, byte by byte."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from transformers import Qwen3Config

import rft
from rft.modes.plan.memory_tracker import device_bytes
from rft.rollout.engine.kv_cache import capacity
from tests.conftest import ENDS_S
from tests.reward.models.test_scalar import save

pytestmark = [pytest.mark.slow, pytest.mark.suite]
ROOT = Path(rft.__file__).parent.parent
HERE = Path(__file__).parent
SMALL = (
    "plan.prompt_tokens=20",
    "rollout.max_new_tokens=12",
    "batch.prompts=8",
    "batch.minibatches=1",
    "algorithm.group_size=4",
    "warmup=none",
    "actor.model_config.hidden_size=64",
    "actor.model_config.intermediate_size=128",
    "actor.model_config.head_dim=16",
    "actor.micro_batch_tokens=256",
)
EXPERTS = ("actor.model_config.model_type=mixtral", "+actor.model_config.num_local_experts=8")
WIDE = ("plan.prompt_tokens=1", "algorithm.group_size=32", "actor.model_config.intermediate_size=4096")
CASES = {
    "plain": (),
    "two ranks": ("plan.ranks=2",),
    "four ranks": ("plan.ranks=4",),
    "a GPU that is not here": ("strategy.device=cuda", "strategy.dtype=float32"),
    "checkpoints": ("checkpoint.every=1",),
    "reference": ("algorithm/terms=[kl]",),
    "critic": ("algorithm=ppo", "algorithm.group_size=4"),
    "8 bit": ("actor.optimizer.name=adamw_8bit",),
    "adapters": ("actor/lora=lora", "actor.lora.rank=2", "algorithm/terms=[kl]"),
    "average": ("actor.ema=0.9",),
    "computed again": ("strategy.activation_checkpointing=full",),
    "bfloat16": ("strategy=bf16",),
    "two ranks in bfloat16": ("plan.ranks=2", "strategy=bf16"),
    "servers of two ranks": (
        "plan.ranks=2",
        "rollout=vllm_server",
        "rollout.engine.servers.count=0",
        "rollout.engine.servers.addresses=[here:1]",
    ),
    "an engine in float32": ("strategy=bf16", "rollout.engine.dtype=float32"),
    "offloaded parameters": ("strategy.param_offload=all",),
    "offloaded": (
        "strategy.param_offload=frozen",
        "strategy.optimizer_offload=true",
        "strategy.activation_offload=true",
        "algorithm/terms=[kl]",
    ),
    "small forwards": ("actor.micro_batch_tokens=100",),
    "padded": ("actor.packing=false",),
    "shared prefixes": ("actor.share_prefix=true",),
    "slices": ("plan.ranks=2", "strategy.context_parallel=2"),
    "split matrices": ("plan.ranks=4", "strategy.tensor_parallel=2"),
    "experts": ("plan.ranks=4", *EXPERTS),
    "split experts": ("plan.ranks=4", *EXPERTS, "strategy.expert_parallel=4"),
    "many updates": ("batch.minibatches=4", "batch.epochs=2", "algorithm.correction=null"),
    "torn groups": ("batch.minibatches=16",),
    "few rows at once": ("rollout.engine.max_rows=8",),
    "longer answers": ("rollout.max_new_tokens=60",),
    "wide steps": WIDE,
    "recorded steps": (*WIDE, "rollout.engine.cuda_graphs=true", "strategy.device=cuda", "strategy.dtype=float32"),
    "supervised": ("algorithm=sft", "batch.prompts=32"),
    "warm-up": ("warmup=supervised", "warmup.rows=8"),
    "redrawn": ("algorithm=dapo", "algorithm.group_size=4"),
    "more prompts": ("batch.prompts=64",),
}

SCORER = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
SCORED = {
    "a sharded reward model": (),
    "on two ranks": ("plan.ranks=2",),
    "in host memory": ("plan.ranks=2", "reward.offload=cpu"),
}
WRONG = {
    "no ranks": (("plan.ranks=0",), ["plan.ranks=0: it must be at least 1"]),
    "no prompt": (("plan.prompt_tokens=0",), ["plan.prompt_tokens=0: it must be at least 1"]),
    "all at once": (
        ("steps=0", "plan.ranks=3", "strategy.replicas=2"),
        [
            "steps=0: it must be at least 1",
            "strategy.replicas=2 does not divide the 3 processes; choose a divisor of them, or 1",
            "batch.prompts=8 does not divide over the 3 processes",
        ],
    ),
    "too long": (
        ("plan.prompt_tokens=120",),
        [
            "plan.prompt_tokens=120: with rollout.max_new_tokens=12 that is over the model's context of 128; "
            "lower one of them or choose another model"
        ],
    ),
    "data that is not there": (
        ("plan.prompt_tokens=null", "actor.tokenizer.alphabet=''"),
        ["actor.tokenizer.alphabet is empty: list every character of the task"],
    ),
    "a stream": (
        ("plan.prompt_tokens=null", "data.streaming=8"),
        [
            "data.streaming: data.train is a Symbolic, which cannot be streamed; set data.streaming=null",
            "plan.prompt_tokens=null: the rows of a stream are not counted; set it",
        ],
    ),
}


@pytest.fixture(scope="module")
def forecasts(resolved, tmp_path_factory):
    """Runs in a process of its own: here may be a process group already."""
    folder = tmp_path_factory.mktemp("forecasts")
    configs = {name: resolved("mode=plan", *SMALL, *overrides) for name, overrides in CASES.items()}
    configs |= {name: resolved("mode=plan", *SMALL, *overrides) for name, (overrides, _) in WRONG.items()}
    shape = Qwen3Config(**{k: v for k, v in configs["plain"]["actor"]["model_config"].items() if k != "model_type"})
    shape.vocab_size = len(configs["plain"]["actor"]["tokenizer"]["alphabet"]) + 3
    shape.save_pretrained(folder / "shape")  # no weights, no tokenizer
    path = [f"actor.path={folder / 'shape'}", "actor.model_config=null", "actor.tokenizer.alphabet=01"]
    configs["a path without weights"] = resolved("mode=plan", *SMALL, *path)
    save(folder / "scorer", **SCORER)
    model = ["reward/terms=[exact_match,model]", f"reward.terms.model.path={folder / 'scorer'}", "reward.shard=true"]
    model += ["reward.terms.model.micro_batch_tokens=64"]
    model += ["strategy.device=cuda", "strategy.dtype=float32"]
    for name, overrides in SCORED.items():
        configs[name] = resolved("mode=plan", *SMALL, *model, *overrides)
    data = [override for override in SMALL if not override.startswith("plan")]
    configs["data at hand"] = resolved("mode=plan", *data, "data.eval.heldout.count=64")
    (folder / "configs.json").write_text(json.dumps(configs))
    found = subprocess.run(
        [sys.executable, HERE / "forecasts.py", folder / "configs.json", folder / "forecasts.json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert not (folder / "outputs").exists()
    return json.loads((folder / "forecasts.json").read_text())


@pytest.fixture
def terms(forecasts):
    """The terms of one stage of a case; those that it does not have are 0."""
    return lambda name, stage="update": Counter(forecasts[name]["memory"][stage])


def test_a_rank_holds_its_share_of_what_trains(forecasts, terms):
    weights = forecasts["plain"]["parameters"] * 4
    for name, ranks in {"plain": 1, "two ranks": 2, "four ranks": 4}.items():
        assert forecasts[name]["parameters"] == forecasts["plain"]["parameters"] == forecasts[name]["trained"]
        held, rounding = terms(name), 1.0 if ranks == 1 else 1.05
        sizes = {"weights": weights, "optimizer": 2 * weights}
        if forecasts[name]["micro_batches"] > 1:  # in the only one's backward there are none at first
            sizes["gradients"] = weights
        for term, size in sizes.items():
            assert size / ranks <= held[term] <= size / ranks * rounding + 1024, (name, term)
        assert forecasts[name]["rows"] == 32 / ranks
    assert (
        0.4 * terms("four ranks")["gathered"]
        < terms("split matrices")["gathered"]
        < 0.6 * terms("four ranks")["gathered"]
    )


def test_a_rank_gathers_its_share_of_the_experts(terms):
    whole, split = terms("experts"), terms("split experts")
    assert split["weights"] == pytest.approx(whole["weights"], rel=0.02)
    assert split["optimizer"] == pytest.approx(whole["optimizer"], rel=0.02)
    assert split["gathered"] < 0.5 * whole["gathered"]


def test_the_engine_has_its_copy_from_the_sync_to_the_end_of_the_rollout(forecasts, terms):
    weights = forecasts["plain"]["parameters"] * 4
    copies = {
        "two ranks": weights,
        "four ranks": weights,
        "bfloat16": weights / 2,
        "two ranks in bfloat16": weights / 2,
    }
    shared = {"plain": 0, "an engine in float32": 0, "a GPU that is not here": 0}  # with the only rank
    for name, size in (copies | shared).items():
        for stage in ("publish", "rollout"):  # the last tensor may come after the peak of a sync
            # by columns, while it samples on a CPU in 32 bits: beside the copy of several ranks
            columns = weights if stage == "rollout" and size != weights / 2 and name != "a GPU that is not here" else 0
            copied = size + columns
            assert 0.95 * copied <= terms(name, stage)["engine"] <= 1.1 * copied + 1024, (name, stage)
        for stage in ("columns", "update"):
            assert terms(name, stage)["engine"] < 1024, (name, stage)


def test_servers_have_no_copy_here_and_take_shards(terms):
    publish = terms("servers of two ranks", "publish")
    assert publish["engine"] == publish["gathered"] == 0 < terms("two ranks", "publish")["gathered"]


def test_the_device_of_the_run_need_not_be_here(forecasts):
    """Only what the engine holds while it samples depends on the device."""
    here, there = ({**forecasts[name]} for name in ("plain", "a GPU that is not here"))
    stages, others = here.pop("memory"), there.pop("memory")
    assert here == there and stages.keys() == others.keys()
    for stage in stages.keys() - {"rollout"}:
        own, other = ({term: size for term, size in found[stage].items() if size} for found in (stages, others))
        assert own == pytest.approx(other, abs=1024), stage


def test_a_path_and_a_new_model_are_planned_from_their_config_alone(forecasts):
    """Both take their shards, and one tensor after another that is read or drawn."""
    stored, drawn = forecasts["a path without weights"], forecasts["plain"]
    load, update = (drawn["memory"][stage] for stage in ("load", "update"))
    assert stored == drawn and load["loading"] < 1024
    assert 0 < load["loading (CPU)"] < load["weights"] == update["weights"] and update["loading (CPU)"] == 0


def test_models_beside_the_policy_are_counted_where_something_reads_them(terms):
    plain = terms("plain")
    assert plain["other models"] == 0
    assert terms("reference")["other models"] == plain["weights"]
    assert terms("reference")["optimizer"] == plain["optimizer"]
    critic = terms("critic")
    assert 0 < critic["other models"] < plain["weights"], "its head is smaller"
    assert critic["optimizer"] > 1.9 * plain["optimizer"]
    assert terms("adapters")["other models"] == 0, "the reference is the policy without what trains"


def test_what_an_option_saves_is_seen(forecasts, terms):
    plain = terms("plain")
    assert terms("8 bit")["optimizer"] < 0.4 * plain["optimizer"]
    assert terms("adapters")["gradients"] < 0.2 * plain["gradients"]
    assert forecasts["adapters"]["trained"] < forecasts["adapters"]["parameters"] / 5
    assert terms("average")["ema"] == plain["weights"] and plain["ema"] == 0
    assert terms("computed again")["activations"] < 0.8 * plain["activations"]
    assert terms("bfloat16")["activations"] < 0.8 * plain["activations"]
    assert terms("bfloat16")["weights"] == plain["weights"], "the master weights are float32"
    assert terms("small forwards")["activations"] < 0.5 * plain["activations"]
    few, many = (terms(name, "rollout")["kv cache"] for name in ("few rows at once", "plain"))
    assert few == pytest.approx(many / 4, rel=0.01)


def test_what_is_offloaded_is_host_memory_and_not_in_the_total(forecasts, terms):
    plain, parameters = terms("plain"), terms("offloaded parameters")
    for term in ("weights", "gradients", "optimizer"):
        assert parameters[f"{term} (CPU)"] == plain[term] > 0 == parameters[term], term
    columns = terms("plain", "rollout")["engine"]
    engine = terms("offloaded parameters", "rollout")["engine"]
    assert engine == plain["weights"] + columns, "the engine shares no weights"
    others, scalars = terms("offloaded"), 1024
    assert others["other models (CPU)"] == others["weights"] == plain["weights"] and not others["other models"]
    assert others["optimizer (CPU)"] >= plain["optimizer"] - scalars and others["optimizer"] < scalars
    assert others["activations (CPU)"] > 0.8 * plain["activations"]
    assert device_bytes(parameters) < device_bytes(plain) == sum(plain.values())
    assert device_bytes(others) < sum(others.values()) - others["activations (CPU)"] - others["optimizer (CPU)"]


def test_the_copies_of_a_checkpoint_stay(terms):
    """Of weights and AdamW's state; a stage that ends with the only checkpoint has none before."""
    weights = terms("plain")["weights"]
    assert terms("plain", "rollout")["checkpoint (CPU)"] == 0
    for name, stage in (("plain", "save"), *(("checkpoints", stage) for stage in ("update", "rollout", "save"))):
        assert terms(name, stage)["checkpoint (CPU)"] == pytest.approx(3 * weights, rel=0.01), (name, stage)
        written = terms(name, stage)["file (CPU)"]
        assert written == pytest.approx(2 * 3 * weights if stage == "save" else 0, rel=0.01), (name, stage)


def test_the_cache_of_the_engine_is_as_large_as_it_gets(forecasts, terms):
    rows, layers, heads, width = 32, 2, 4, 16
    for name, answer in {"plain": 12, "longer answers": 60}.items():
        size = rows * layers * 2 * heads * width * 4 * capacity(20, answer)
        assert size <= terms(name, "rollout")["kv cache"] < 1.15 * size  # rows are gathered one layer after another
    assert terms("plain", "update")["kv cache"] == 0


def test_a_decode_step_of_many_samples_of_a_prompt_is_counted(terms):
    """It takes more than the prompts, and no less if a GPU records it."""
    rows, prompts, width = 8 * 32, 8, 4096 * 4
    for name in ("wide steps", "recorded steps"):
        rollout = terms(name, "rollout")
        assert rollout["activations"] > 2 * rows * width > 10 * prompts * width, name
    assert terms("recorded steps", "rollout")["kv cache"] == terms("wide steps", "rollout")["kv cache"]


@pytest.mark.parametrize(
    ("name", "fullest", "micro_batches"),
    [
        ("plain", 256, 4),  # eight rows of 32
        ("small forwards", 100, 11),  # four of 25, although three of 32 are not 100
        ("padded", 256, 4),
        ("longer answers", 256, 11),  # four of 64
        ("many updates", 256, 1),
        ("torn groups", 64, 1),  # two rows of 32 in an optimizer step
        ("supervised", 256, 4),
    ],
)
def test_forwards_are_as_full_as_rows_of_any_length_make_them(name, fullest, micro_batches, forecasts):
    assert (forecasts[name]["fullest"], forecasts[name]["micro_batches"]) == (fullest, micro_batches)


def test_rows_that_share_a_forward_or_their_prompt_fill_it_too(forecasts):
    for name in ("slices", "split matrices", "shared prefixes"):
        assert 0.8 * 256 < forecasts[name]["fullest"] <= 256
    assert forecasts["shared prefixes"]["micro_batches"] < forecasts["plain"]["micro_batches"]


def test_more_rows_take_no_more_memory_in_a_forward(terms):
    more, plain = terms("more prompts"), terms("plain")
    assert plain["activations"] <= more["activations"] < 1.1 * plain["activations"]
    assert more["batch"] == pytest.approx(8 * plain["batch"], rel=0.05)


def test_stages_that_are_there(forecasts):
    start, steps, end = ["load", "begin"], ["columns", "update", "publish"], ["export", "save"]
    assert list(forecasts["plain"]["memory"]) == [*start, *steps, "rollout", *end]
    assert list(forecasts["supervised"]["memory"]) == [*start, *steps, *end], "nothing is sampled, nor held out"
    assert list(forecasts["warm-up"]["memory"]) == [*start, "warmup", *steps, "rollout", *end]
    assert list(forecasts["data at hand"]["memory"]) == [*start, *steps, "rollout", "evaluate", *end]
    redrawn, plain = (sum(forecasts[name]["memory"]["update"].values()) for name in ("redrawn", "plain"))
    assert redrawn == pytest.approx(plain, rel=0.01)


def test_the_longest_prompt_is_read_from_data_at_hand(forecasts, resolved):
    """The built-in task: a template around at most so many digits."""
    assert 10 < forecasts["data at hand"]["prompt_tokens"] < 20 == forecasts["plain"]["prompt_tokens"]


@pytest.mark.slow
def test_a_rank_that_is_pretended_takes_what_a_real_one_takes(torchrun, tmp_path):
    """Nearly: a real collective holds its tensors until it is done, and a pretended one fills up the last shard."""
    torchrun(HERE / "trackers_on_ranks.py", tmp_path / "found.json")
    real, pretended = json.loads((tmp_path / "found.json").read_text())
    updates = dict.fromkeys(("update 0", "update 1"), (0.95, 1.02))  # gloo may still hold what it has gathered
    slacks = updates | dict.fromkeys(("weights", "publish", "another publish", "asleep"), (0.9, 1.1))
    for stage, (least, most) in slacks.items():
        assert least < sum(pretended[stage].values()) / sum(real[stage].values()) < most, stage


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_planned(name, forecasts):
    assert forecasts[name] == WRONG[name][1]


def test_a_sharded_reward_model_is_counted_where_it_is(forecasts, terms):
    """The head has one row, which is on rank 0."""
    layer = 4 * (3 * 64 * 256 + 2 * 64 * 16 + 2 * 64 * 8 + 2 * 64 + 2 * 4)
    whole = 4 * layer + 4 * (14 * 64 + 64 + 64)  # and embedding, norm, score
    alone, shared, host = (partial(terms, name) for name in SCORED)
    for stage in ("reward", "columns", "update", "rollout", "save"):
        assert alone(stage)["reward models"] == whole
        assert shared(stage)["reward models"] == host(stage)["reward models (CPU)"] == whole // 2 + 4 * 32
        assert host(stage)["reward models"] == 0
    assert alone("load")["reward models"] == alone("begin")["reward models"] == 0
    assert 2 * layer < shared("reward")["gathered"] < 2.1 * layer
    assert alone("reward")["optimizer"] > 0 and "reward" not in forecasts["plain"]["memory"]
