"""The benchmark: every section once, as small as it goes, and by hand what its numbers mean."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
from bench import (  # noqa: E402
    asynchronous,
    balance,
    checkpoint,
    logprob,
    logprob_side,
    model_io,
    reward_models,
    staleness,
    update_side,
)
from bench.staleness import LONGEST, PROMPTS, SYMBOLS, Task, method_of, outputs, policy_losses, train  # noqa: E402
from bench.step import checked, summary  # noqa: E402
from bench.workload import GROUP, Lengths, Workload, equal, skewed  # noqa: E402

from tests.reward.sandbox.test_sandbox_attacks import start  # noqa: E402
from tests.rollout.server.real_servers import interpreter  # noqa: E402

HAS_TRL = importlib.util.find_spec("trl") is not None  # the extra `bench`
BESIDE = ("trl",) if HAS_TRL else ()


@pytest.fixture
def section(run_script, tmp_path):
    """Runs a section; returns the numbers that it wrote."""

    def run(name, *options):
        out = tmp_path / "numbers" / f"{name}.json"
        assert run_script(benchmark.main, name, *options, "--out", out)[0] == 0
        return json.loads(out.read_text())

    return run


# What all sections share


def test_lengths_are_log_normal_in_whole_groups_and_found_by_their_prompt(tmp_path):
    from transformers import AutoTokenizer

    lengths = torch.tensor(skewed(64, 256)).flatten().double()
    assert (lengths.min(), lengths.max()) == (8, 256) and 50 < lengths.mean() < 55
    assert lengths.log().std() == pytest.approx(0.78, abs=0.05)
    for make in (skewed, equal):
        with pytest.raises(ValueError, match=r"--rows 20.*multiple of 8"):
            make(20, 32)
    workload = Workload("tiny", skewed(16, 40))
    workload.write(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    assert [Lengths(tmp_path, tokenizer).of(prompt) for prompt in prompts] == workload.lengths
    assert tokenizer.eos_token_id not in prompts[0] + prompts[1]


@pytest.mark.parametrize(
    "options",
    [
        "step --repeats 0",
        "packing --forward-rows 0",
        "prefix --groups 1",
        "balance --rank-rows 24",
        "startup --repeats 0",
        "logprob --tokens 10000000",
        "rollout --rows 12",
        "asynchronous --steps 2",
        "reward --calls 0",
        "reward_models --layers 0",
        "checkpoint --repeats 0",
        "load --ranks 0",
        "data --rows 0",
        "staleness --losses ppo",
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options, run_script):
    code, error = run_script(benchmark.main, *options.split())
    name, value = options.split()[1:]
    assert code == 1 and f"{name} {value}: " in error


# step


def side(tokens, *totals):
    return {"tokens": [tokens] * len(totals), "steps": [{"rollout": t / 2, "total": t} for t in totals]}


def test_medians_leave_the_first_step_out_and_other_tokens_are_refused():
    workload = Workload("tiny", equal(8, 10))
    numbers = summary(workload, 1, {"rft": checked("x", side(80, 100.0, 2.0, 4.0, 3.0), workload, 4)})
    assert numbers["sides"]["rft"]["median_s"] == {"rollout": 1.5, "total": 3.0}
    assert numbers["sides"]["rft"]["tokens_per_s"] == pytest.approx(80 / 3)
    with pytest.raises(RuntimeError, match="79"):
        checked("x", side(79, 1.0, 1.0), workload, 2)


@pytest.mark.slow
def test_step(section):
    numbers = section("step", *["--size", "tiny", "--rows", "16", "--longest", "16", "--repeats", "1"])
    assert set(numbers["sides"]) == {"rft", *BESIDE}
    for measured in numbers["sides"].values():
        assert measured["tokens"] == [numbers["workload"]["sampled_tokens"]] * 2
    stages = numbers["sides"]["rft"]["median_s"]
    assert min(stages["rollout"], stages["update"]) > 0
    assert sum(seconds for stage, seconds in stages.items() if stage not in ("total", "cpu")) <= stages["total"]


# packing, prefix


def off(gradient, other):
    largest = max(entry.abs().max() for entry in other.values())
    return float(max((gradient[name] - other[name]).abs().max() for name in other) / largest)


def test_packed_sorted_and_plain_updates_are_one_gradient_with_less_padding_each(
    tmp_path, monkeypatch, plugins_forgotten
):
    monkeypatch.delitem(sys.modules, "bench.rft_side", raising=False)
    workload = Workload("tiny", skewed(16, 40))
    workload.write(tmp_path)

    def update(kind, *options):
        update_side.main(tmp_path, "side", 0, kind, list(options))
        return json.loads((tmp_path / "side.json").read_text()), torch.load(tmp_path / "side.pt")

    cap = "actor.micro_batch_tokens=200"
    plain, reference = update("plain", "4")
    ordered, in_order = update("rft", cap, "actor.packing=false")
    packed, dense = update("rft", cap, "actor.packing=true")
    real = 16 * workload.prompt + workload.sampled
    assert plain["tokens"] == ordered["tokens"] == packed["tokens"] == real
    assert packed["computed"] == real < ordered["computed"] < plain["computed"] == 16 * (workload.prompt + 40)
    assert reference.keys() == in_order.keys() == dense.keys()
    assert max(off(in_order, reference), off(dense, reference)) < 1e-5
    other = reference | {"model.norm.weight": 1.01 * reference["model.norm.weight"]}
    assert off(other, reference) > 1e-5


@pytest.mark.slow
@pytest.mark.suite
def test_prefix(section):
    """`packing` differs from it in its options alone."""
    options = "--size tiny --groups 2 --prompts 1 --prompt 6 --response 5 --plain --repeats 1"
    sides = section("prefix", *options.split())["groups"]["2"]["sides"]
    assert [side["computed"] for side in sides.values()] == [16, 22, 22]
    assert all(side["gradient_difference"] < 1e-5 for side in sides.values())


# balance


def test_imbalance_by_hand(monkeypatch):
    monkeypatch.setattr(balance, "COST", balance.Cost(linear=1.0, quadratic=0.0, head=0.0))
    found = balance.imbalances([[1] * GROUP, [3] * GROUP], 2)
    assert found == {"as sampled": pytest.approx(24 / 16), **dict.fromkeys([*balance.ASSIGNMENTS][1:], 1.0)}
    assert balance.greedy([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]


@pytest.mark.slow
@pytest.mark.suite
def test_balance_on_two_ranks(section):
    options = "--size tiny --rows 16 --longest-row 24 --ranks 2 --plan 64 4 --repeats 1"
    numbers = section("balance", *options.split())
    off, on = numbers["update"]["false"], numbers["update"]["true"]
    assert off["before"] == off["after"] == on["before"] > on["after"]
    assert set(numbers["imbalance"]["2"]) == set(numbers["planning"]["seconds"]) == set(balance.ASSIGNMENTS)


# logprob


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", ["rft", "plain", *(("trl_fused", "trl_whole") if HAS_TRL else ())])
def test_every_way_computes_log_probabilities_and_entropy(way, entropy):
    hidden, weight = torch.randn(16, 8), torch.randn(300, 8)
    targets = torch.randint(300, (16,))
    logprobs, entropies = logprob_side.WAYS[way](hidden, weight, targets, entropy)
    logp = (hidden.double() @ weight.double().T).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), logp[torch.arange(16), targets], rtol=1e-5, atol=1e-5)
    if entropy:
        torch.testing.assert_close(entropies.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)


def test_bytes_are_counted_with_and_without_what_every_way_needs():
    side = {"first": 9.0, "seconds": [3.0, 2.0], "cpu": [4.0, 5.0], "grown": 100, "inputs": 30, "gradients": 20}
    found = logprob.summary(side)
    assert found == {"first": 9.0, "seconds": 2.0, "cpu": 4.0, "above": 80, "total": 130}


@pytest.mark.slow
def test_logprob(section, monkeypatch):
    monkeypatch.setattr(logprob, "can_compile", lambda console: False)  # tests/actor/test_logprobs.py compiles
    numbers = section("logprob", *["--tokens", "3000", "--vocab", "12000", "--hidden", "8"])
    ours, plain = numbers["sides"]["rft"], numbers["sides"]["plain"]
    assert 2 < plain["above"] / (4 * 3000 * 12000) < 4 and ours["above"] < 0.2 * plain["above"]
    assert all(side["gradient_difference"] < 1e-5 for side in numbers["sides"].values())


# staleness


@pytest.fixture
def task():
    made = Task(seed=0)
    made.lengths[:] = 3
    made.strings[:] = torch.tensor([2, 5, 0, 0, 0, 0])
    return made


def random_table():
    return torch.randn(PROMPTS, LONGEST, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(1))


def test_the_expected_reward_is_exact(task):
    p = random_table().softmax(-1)
    first, second, third = p[:, 0, 0, 2], p[:, 1, 2, 5], p[:, 2, 5, 0]
    by_hand = ((first + first * second + first * second * third) / 3).mean().item()
    assert task.expected(random_table()) == pytest.approx(by_hand)
    sampled = [task.scores(task.sample(random_table())[0]).mean().item() for _ in range(200)]
    assert sum(sampled) / len(sampled) == pytest.approx(by_hand, abs=0.01)


def test_outputs_are_those_of_the_prefix():
    found = outputs(random_table(), torch.tensor([3]), torch.tensor([[4, 1, 0, 0, 0, 0]]))
    p = random_table()[3, 1, 4].softmax(-1)
    by_hand = {"logprobs": p[1].log(), "entropy": -(p * p.log()).sum(), "sum_p_squared": (p**2).sum()}
    torch.testing.assert_close({name: column[0, 1] for name, column in found.items()}, by_hand)


def test_samples_come_from_the_policy_of_that_age(monkeypatch):
    sampled, trained = [], []
    sample, forward = Task.sample, staleness.outputs
    monkeypatch.setattr(Task, "sample", lambda self, table: sampled.append(table.clone()) or sample(self, table))

    def watched(table, *arguments):
        if table.requires_grad:
            trained.append(table.detach().clone())
        return forward(table, *arguments)

    monkeypatch.setattr(staleness, "outputs", watched)
    train(method_of("ppo_clip"), 2, seed=0, updates=5)
    assert len(sampled) == len(trained) == 5 and not torch.equal(trained[0], trained[1])
    assert all(torch.equal(table, trained[max(0, update - 2)]) for update, table in enumerate(sampled))


def test_a_loss_has_the_advantage_and_the_aggregation_of_its_algorithm():
    assert staleness.described(method_of("ppo_clip_higher"))["aggregation"] == "token_mean"  # dapo names it
    assert "ppo_dual_clip" in policy_losses() and "nll" not in policy_losses()
    assert staleness.described(method_of("ppo_dual_clip")) == {  # no algorithm names it
        "advantage": "group_norm",
        "terms": [],
        "aggregation": "seq_mean_token_mean",
    }


@pytest.mark.slow
@pytest.mark.suite
def test_staleness_of_every_loss(section):
    rewards = section("staleness", *["--staleness", "0", "1", "--updates", "3", "--seeds", "1"])["rewards"]
    start = Task(0).expected(torch.zeros(PROMPTS, LONGEST, SYMBOLS, SYMBOLS))
    assert set(rewards) == set(policy_losses())
    assert [name for name, ages in rewards.items() if ages["1"][0] <= start] == [], "every loss moves the policy up"
    assert rewards["gspo"]["0"] != rewards["gspo"]["1"]


# asynchronous


def test_an_interval_of_an_accuracy_by_hand():
    """5 of 10: 0.5 in the middle, and 1.96 / 1.38416 * sqrt(0.25 / 10 + 3.8416 / 400) to each side."""
    assert asynchronous.wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert asynchronous.wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.skipif(not interpreter("vllm"), reason="RFT_VLLM_PYTHON names no interpreter, and this one has no vllm")
def test_a_server_samples_ahead_of_the_steps(section):
    found = section("asynchronous", "--staleness", "2", "--seeds", "1", "--steps", "5")
    [numbers] = found["steps"]["2"]
    assert 0 < numbers["staleness/mean"] <= 2
    assert numbers["length/max"] > 2 * numbers["length/mean"], "a step would wait for its longest answer"
    assert len(found["accuracy"]["2"]) == 1


# The others


def test_dialogue(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *["dialogue", "--dialogues", "3", "--turns", "2"]])
    benchmark.main()
    said = " ".join(capsys.readouterr().out.split())
    assert "turns/s (3 dialogues of 2)" in said and "times the slowest dialogue's sleep" in said


@pytest.mark.slow
@pytest.mark.suite
def test_reward(section):
    start().close()  # skips where a layer of the sandbox is missing
    numbers = section("reward", *["--calls", "1100", "--isolated", "10", "--repeats", "1"])
    sides = {"inline", "workers", "sandbox", "programs", "workers, faults", "plain pool", "server", "plain posts"}
    assert set(numbers["calls_per_s"]) == sides and numbers["server_to_plain_posts"] > 0
    assert all(rate > 0 for rate in numbers["calls_per_s"].values()) and numbers["ratio"]["plain pool"] == 1.0


@pytest.mark.slow
@pytest.mark.suite
def test_offloaded_reward_models_take_less_memory(section):
    numbers = section("reward_models", *["--responses", "8", "--length", "8", "--layers", "2", "--repeats", "1"])
    sides, sizes = numbers["sides"], numbers["bytes"]
    assert set(sides) == set(reward_models.SIDES) and sides["device"]["peak"] > sum(sizes) > sides["disk"]["peak"]
    assert sides["disk"]["after"] < min(sizes) < sides["device"]["after"] and numbers["ratio"]["peak"] < 1


@pytest.mark.slow
@pytest.mark.suite
def test_startup(section):
    numbers = section("startup", "--repeats", 1)
    assert set(numbers["median_s"]) == {"rft", *BESIDE}
    for seconds in numbers["median_s"].values():
        begun, ready, first = seconds.values()
        assert 0 < begun < ready < first


@pytest.mark.slow
@pytest.mark.suite
def test_checkpoint(section):
    numbers = section("checkpoint", *["--size", "tiny", "--repeats", "1"])
    for side in checkpoint.SIDES:
        assert numbers["state_mib"] < numbers[side]["files_mib"][0] < 1.5 * numbers["state_mib"] + 1, "all of it"
        assert 0 < numbers[side]["blocking_s"][0] <= numbers[side]["whole_s"][0]


@pytest.mark.slow
@pytest.mark.suite
def test_rows_take_less_memory_than_their_texts(section):
    numbers = section("data", *["--rows", "20000", "--repeats", "1"])
    for side in ("rft", "datasets"):
        assert all(numbers[side][name][0] > 0 for name in ("load_s", "count_s", "read_s"))
    assert numbers["rft"]["row_bytes"][0] < 1000, "a few MB of the process itself are among them"


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.parametrize("name", ["load", "export", "sync", "publish"])
def test_a_model_is_read_written_and_synced_in_both_ways(name, section):
    numbers = section(name, *["--size", "tiny", "--ranks", "1", "--repeats", "1"])
    for side in model_io.SIDES:
        assert numbers[side]["seconds"][0] > 0 and numbers[side].keys() == {"seconds", "first_mib", "last_mib"}
