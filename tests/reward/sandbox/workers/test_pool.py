"""Isolated workers: the same scores as in the process of the run, every signature, options, and layers."""

import pytest

from rft.errors import FunctionError
from rft.reward.sandbox.workers.worker import decode, encode
from tests.helpers import yaml_options
from tests.reward.reward_of import reward_of
from tests.reward.sandbox.isolated import none_left
from tests.reward.sandbox.test_sandbox_attacks import start

MODULE = "tests.reward.sandbox.workers.functions"
CALL = {"workers": "sandbox", "concurrency": 1, "deadline_s": 10.0, "failed": "drop_row"}
TEXTS = [
    "The sum is 1,000.0 and so #### 1000",
    "Paris, the capital of France, the capital of France.",
    '<think>hm</think> <answer>{"name": "Ada"}</answer>',
    '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
    "Verdict: B, \\boxed{\\frac{1}{3}}",
    "漢字 and words",
    f'{{"number": 1{"0" * 5000}}}',  # more digits than Python reads, which programs alone may have
    "",
]
ROW = {"answer": "#### 1000", "tests": "", "calls": [{"name": "weather", "arguments": {"city": "Paris"}}]}
CHANGES = {
    "tags": {"tags": ["think", "answer"]},
    "tag_count": {"tags": ["think", "answer"]},
    "script": {"scripts": ["han", "latin"]},
    "format": {"pattern": "(?s).*answer.*"},
    "tool_call": {"field": "calls", "score": "share"},
    "repetition": {"size": 2},
}
RULES = ["exact_match", "gsm8k", "overlap", "format", "tags", "tag_count", "repetition", "json", "script", "tool_call"]
RULES += ["verdict", "math"]


@pytest.fixture(autouse=True, scope="module")
def isolated():
    start().close()  # skips where a layer is missing


def rule(name):
    found = yaml_options(f"reward/terms/{name}.yaml")[name] | CHANGES.get(name, {})
    return {key: value for key, value in found.items() if key != "call"}


def pool(reward, name="a"):
    return reward._terms[name].caller.runner


def test_rules_give_the_same_scores_bit_for_bit():
    """The pools of all rules start together, as in a run."""
    terms = {name: rule(name) for name in RULES}
    inline = reward_of(terms, "gsm8k", call=yaml_options("reward/_base.yaml")["call"] | {"failed": "drop_row"})
    apart = reward_of({name: term | {"call": CALL} for name, term in terms.items()}, "gsm8k")
    rows = [ROW] * len(TEXTS)
    expected, found = inline.score(TEXTS, rows), apart.score(TEXTS, rows)
    servers = [pool(apart, name)._sandbox._server.pid for name in RULES]
    formats = {name: term.tool_calls and term.tool_calls.name for name, term in apart.terms.items()}
    assert formats == dict.fromkeys(RULES) | {"tool_call": "hermes"}
    apart.close()
    assert {name: values.tolist() for name, values in found.terms.items()} == {
        name: values.tolist() for name, values in expected.terms.items()
    }
    assert found.total.tolist() == expected.total.tolist() and found.unscored == expected.unscored
    assert len({tuple(values.tolist()) for values in found.terms.values()}) > 5
    assert all(map(none_left, servers))


def test_numbers_survive_the_way_through_json():
    values = [0.1 + 0.2, 1e-320, -0.0, 2**53 + 1, True, 1 / 3, {"score": 0.1, "n": 7}]
    assert decode(encode(values)) == values
    assert repr(decode(encode(-0.0))) == "-0.0"


SIGNATURES = {
    "ours": ([1.0, 0.0], {}),
    "verl": ([1.0, 0.0], {"length": [1.0, 2.0], "index": [3.0, 3.0]}),
    "trl": ([1.0, 0.0], {}),
    "openrlhf": ([1.0, 0.0], {"twice": [2.0, 0.0]}),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_signature_is_computed_in_a_worker(name):
    row = {"prompt": "p", "answer": "x", "data_source": "s", "extra_info": {"index": 3}}
    reward = reward_of({"a": {"function": f"{MODULE}:{name}", "weight": 1.0, "call": CALL}}, "a")
    found = reward.score(["x", "xy"], [row, row])
    reward.close()
    scores, numbers = SIGNATURES[name]
    assert found.total.tolist() == scores
    assert {key.removeprefix("a/"): values.tolist() for key, values in found.numbers.items()} == numbers
    if name == "verl":
        with pytest.raises(ValueError, match="the row has neither a field 'reward_model'"):
            reward.check_row({"prompt": "p"})
    if name == "trl":
        assert reward.fields == ("answer", "prompt")


def test_what_is_no_number_is_unscored_and_stops_the_run_if_it_should():
    node = {"function": f"{MODULE}:strange", "weight": 1.0}
    reward = reward_of({"a": node | {"call": CALL}}, "a")
    assert reward.score(["object", "x"], [{}, {"missing": 2}]).unscored == [{"a": "no_score"}, {}]
    assert reward.score(["x"], [{}]).unscored == [{"a": "KeyError"}]
    reward.close()
    strict = reward_of({"a": node | {"call": CALL | {"failed": "stop"}}}, "a")
    with pytest.raises(FunctionError, match=r"failed on row 1, response 'y': .*KeyError: 'missing'"):
        strict.score(["x", "y"], [{"missing": 2}, {}])
    strict.close()


def test_options_of_the_term_are_arguments():
    reward = reward_of({"a": {"function": f"{MODULE}:ours", "weight": 1.0, "scale": 0.5, "call": CALL}}, "a")
    assert reward.score(["x"], [{"answer": "x"}]).total.tolist() == [0.5]
    reward.close()
    with pytest.raises(ValueError, match=r"a\.scala: .* has no such parameter; did you mean scale"):
        reward_of({"a": {"function": f"{MODULE}:ours", "weight": 1.0, "scala": 0.5, "call": CALL}}, "a")


def test_a_closed_pool_starts_again():
    reward = reward_of({"a": rule("exact_match") | {"call": CALL}}, "a")
    reward.check()
    for _ in range(2):
        assert reward.score(["b"], [{"answer": "b"}]).total.tolist() == [1.0]
        server = pool(reward)._sandbox._server.pid
        reward.close()
        assert none_left(server)


REFUSED = [
    ({"deadline_s": None}, r"a\.call\.workers=sandbox needs a deadline.*call\.deadline_s=10"),
    ({"workers": "process", "sandbox": {"packages": []}}, r"a\.call\.sandbox: only call\.workers=sandbox reads it"),
    ({"sandbox": {"limits": {"memory_mib": 1}}}, r"a\.call\.sandbox\.limits\.memory_mib=1: it must be at least 64"),
    ({"sandbox": {"require": ["vm"]}}, r"a\.call\.sandbox\.require"),
    ({"sandbox": {"seconds": 3}}, r"a\.call\.sandbox\.seconds"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_options_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        reward_of({"a": rule("exact_match") | {"call": CALL | changes}}, "a")


def test_a_class_cannot_be_isolated():
    node = {"_target_": "rft.reward.sandbox.code.CodeTests", "weight": 1.0, "call": CALL}
    with pytest.raises(ValueError, match=r"a\.call\.workers=sandbox: this term is a class"):
        reward_of({"a": node}, "a")


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"a\.function=/no/such\.py:f: there is no such file"):
        reward_of({"a": {"function": "/no/such.py:f", "weight": 1.0, "call": CALL}}, "a")


def test_without_a_required_layer_no_function_runs(monkeypatch):
    reward = reward_of({"a": rule("exact_match") | {"call": CALL}}, "a")
    monkeypatch.setattr(pool(reward)._sandbox, "_layers", ["namespaces", "network", "seccomp"])
    with pytest.raises(
        ValueError, match=r"a\.call\.sandbox\.require: the layer landlock is not available: switched off"
    ):
        reward.check()
    assert reward.score(["b"], [{"answer": "b"}]).unscored == [{"a": "no_workers"}]
    reward.close()
