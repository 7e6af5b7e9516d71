"""Everything that is wrong is said at once, and what depends on it is not said as well."""

import pickle

import pytest

from rft.errors import Checks, FunctionError, Problems, at_step, build_each, naming, surviving
from rft.main import explain
from rft.setup.assembly import Job
from rft.setup.parts import check_config


def refuse(message):
    raise ValueError(message)


def several(messages):
    raise Problems(messages)


def test_checks_go_on_after_one_that_has_failed():
    checks = Checks()
    checks.run(lambda: refuse("one"))
    checks.run(lambda: several(["two", "three"]))
    checks.run(lambda: ["four", "five"])
    assert checks.attempt(refuse, "six") is None
    with pytest.raises(Problems) as caught:
        checks.end()
    assert caught.value.messages == ["one", "two", "three", "four", "five", "six"]
    assert str(caught.value) == "one\ntwo\nthree\nfour\nfive\nsix"


def test_what_a_check_has_yielded_before_it_raises_is_kept():
    def look():
        yield "first"
        refuse("second")

    checks = Checks()
    checks.run(look)
    assert checks.messages == ["first", "second"]


def test_nothing_is_raised_where_nothing_is_wrong():
    checks = Checks()
    assert checks.attempt(int, "3") == 3
    checks.make("three", lambda: 3)
    checks.make("six", lambda three: 2 * three, "three")
    checks.run(lambda six, three: None if six == 2 * three else ["not double"], "six", "three")
    checks.end()
    assert checks.parts == {"three": 3, "six": 6}


def test_a_check_that_needs_what_has_failed_is_left_out():
    checks = Checks()
    checks.make("loss", lambda: refuse("no such loss"))
    checks.make("objective", lambda loss: loss.name, "loss")
    checks.fail("steps")
    for needs in (("loss",), ("objective",), ("steps",)):
        checks.run(lambda _: refuse("it was not left out"), *needs)
    assert checks.messages == ["no such loss"] and checks.parts == {}
    assert not checks.has("objective") and checks.has()
    checks.add("steps", 3)
    checks.run(lambda steps: [f"{steps} steps"], "steps")
    assert checks.messages[1:] == ["3 steps"]


def test_other_errors_are_mistakes_of_ours_and_pass():
    checks = Checks()
    with pytest.raises(KeyError):
        checks.run(lambda: {}["key"])
    with pytest.raises(AttributeError):
        checks.make("part", lambda: "text".nothing)
    with pytest.raises(KeyError, match="never made"):
        checks.run(lambda _: None, "never made")


def test_the_mistakes_of_all_entries_are_found_together():
    assert build_each(lambda name, node: name * node, {"a": 1, "b": 2}) == {"a": "a", "b": "bb"}
    with pytest.raises(Problems) as caught:
        build_each(lambda name, node: refuse(f"{name}{node}"), {"a": 1, "b": 2})
    assert caught.value.messages == ["a1", "b2"]


def messages(config):
    with pytest.raises(Problems) as caught:
        Job(config)
    return caught.value.messages


def keys(found):
    return [message.replace("=", " ").replace(":", " ").split()[0] for message in found]


def test_mistakes_of_all_parts_are_found_together(resolved):
    found = messages(
        resolved(
            "seed=x",
            "steps=0",
            "batch.minibatches=7",
            "plugins=[nowhere]",
            "actor.optimizer.lr=fast",
            "actor.optimizer.eps=small",
            "algorithm.loss.clip_low=-1",
            "algorithm.advantage.name=luck",
            "reward.accuracy=luck",
            "strategy.dtype=int8",
            "data.eval.heldout.count=many",
            "+logger.mine={_target_: rft.nowhere.Logger}",
        )
    )
    assert sorted(keys(found)) == sorted(
        [
            "plugins",
            "seed",
            "actor.optimizer.lr",
            "actor.optimizer.eps",
            "strategy.dtype",
            "data.eval.heldout.count",
            "reward.accuracy",
            "logger.mine._target_",
            "steps",
            "batch.minibatches",
        ]
    ), "and what needs the reward, its metric and its terms, is left out"


def test_mistakes_within_an_algorithm_are_found_together(resolved):
    found = messages(
        resolved(
            "algorithm/terms=[kl,entropy]",
            "algorithm.loss.clip_low=-1",
            "algorithm.advantage.name=luck",
            "algorithm.terms.kl.estimator=k9",
            "algorithm.terms.entropy.coef=much",
            "algorithm.aggregation.name=luck",
        )
    )
    assert keys(found) == [
        "algorithm.advantage.name",
        "algorithm.loss.clip_low",
        "algorithm.terms.kl.estimator",
        "algorithm.terms.entropy.coef",
        "algorithm.aggregation.name",
    ]


def test_combinations_that_make_no_sense_are_found_together(resolved):
    found = messages(
        resolved(
            "algorithm/advantage=none", "algorithm/loss=gspo", "algorithm.mask_tied=true", "algorithm.critic_warmup=2"
        )
    )
    assert keys(found) == ["algorithm.mask_tied", "algorithm.critic_warmup"]


def test_what_others_take_over_from_the_actor_is_said_once(resolved):
    assert keys(messages(resolved("actor.micro_batch_tokens=many"))) == ["actor.micro_batch_tokens"]
    assert keys(messages(resolved("critic.micro_batch_tokens=many"))) == ["critic.micro_batch_tokens"]


def test_a_misspelt_option_is_not_called_missing_as_well(resolved):
    config = resolved()
    config["batch"]["promts"] = config["batch"].pop("prompts")
    assert keys(messages(config)) == ["batch.promts"]


def test_parts_that_are_wrong_do_not_stop_the_others(resolved):
    checks = check_config(resolved("seed=x", "algorithm.loss.name=luck"), {})
    assert keys(checks.messages) == ["seed", "algorithm.loss.name"]
    assert checks.parts["run.batch"].prompts == 32 and checks.parts["train"].key == "data.train"
    assert not checks.has("run.seed") and not checks.has("algorithm")


def test_other_ranks_are_told_the_same():
    assert pickle.loads(pickle.dumps(Problems(["first", "second"]))).messages == ["first", "second"]


def test_the_command_line_numbers_several_mistakes_and_not_a_single_one():
    assert explain(Problems(["only"])) == "only"
    assert explain(Problems(["first", "second"])) == "2 mistakes\n1. first\n2. second"


def divide():
    return 1 / 0


def test_an_error_of_a_users_function_names_the_function_the_line_and_the_step():
    line = divide.__code__.co_firstlineno + 1
    with pytest.raises(FunctionError) as caught, at_step(3), naming("the loss 'mine'", divide):
        divide()
    assert str(caught.value) == (
        f"step 3: the loss 'mine' failed: test_errors.py:{line}: ZeroDivisionError: division by zero"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_a_function_of_this_package_is_left_as_it_is():
    with pytest.raises(ZeroDivisionError), at_step(3), naming("a check", check_config):
        divide()


def test_what_survives_is_a_warning_with_the_place_of_the_error():
    warnings = []
    with surviving("the report", warnings.append):
        Checks().parts["page"]
    with surviving("the report", warnings.append):
        several(["one"])
    with pytest.raises(KeyboardInterrupt), surviving("the report", warnings.append):
        raise KeyboardInterrupt
    with surviving("nothing", warnings.append):
        pass
    assert warnings[0].startswith("the report failed; training does not depend on it: ")
    assert warnings[0].endswith(": KeyError: 'page'")
    assert len(warnings) == 2 and warnings[1].endswith(": Problems: one")


def test_an_error_within_the_package_has_its_line():
    warnings = []
    with surviving("the report", warnings.append):
        assert explain(ValueError("")).no_such_name
    with surviving("the report", warnings.append):
        build_each(None, {"a": 1})
    assert warnings[0].endswith("AttributeError: 'str' object has no attribute 'no_such_name'")
    assert ": errors.py:" in warnings[1] and warnings[1].endswith(": TypeError: 'NoneType' object is not callable")
