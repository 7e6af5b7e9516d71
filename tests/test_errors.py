"""Everything that is wrong is said at once, and what depends on it is not said as well."""

import pickle

import pytest

from rft.errors import (
    Checked,
    Checks,
    FunctionError,
    Problems,
    Unmade,
    at_step,
    build_each,
    checks,
    naming,
    part,
    surviving,
)
from rft.main import explain
from rft.setup.assembly import Job
from rft.setup.parts import Parts


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


class Shop(Checked):
    """Parts of a loss, an objective and steps, made of texts."""

    def __init__(self, loss, steps):
        super().__init__()
        self.texts, self.made = {"loss": loss, "steps": steps}, []

    @part
    def loss(self):
        self.made.append("loss")
        return int(self.texts["loss"])

    @part
    def objective(self):
        self.made.append("objective")
        return 2 * self.loss

    @checks
    def sums(self):
        yield lambda: [f"{self.objective} is not 6"] if self.objective != 6 else None

    @part
    def steps(self):
        self.made.append("steps")
        return int(self.texts["steps"])

    @checks
    def several(self):
        yield lambda: [f"{self.steps} steps of {self.loss}"]
        yield lambda: [f"{self.steps} steps"]


class LargeShop(Shop):
    @part
    def loss(self):
        return 10 * int(self.texts["loss"])

    @checks
    def own(self):
        yield lambda: [f"large {self.loss}"]


def test_parts_are_made_once_and_checked_in_the_order_of_their_definitions():
    shop = Shop("3", "4")
    assert shop.objective == 6 and shop.made == ["objective", "loss"]
    shop.check_all()
    assert (shop.loss, shop.steps, shop.made) == (3, 4, ["objective", "loss", "steps"])
    assert shop.check.messages == ["4 steps of 3", "4 steps"] and shop.unmade == set()


def test_what_reads_a_part_that_failed_is_skipped_and_its_mistake_is_reported_once():
    shop = Shop("no", "4")
    shop.check_all()
    assert shop.check.messages == ["invalid literal for int() with base 10: 'no'", "4 steps"]
    assert shop.unmade == {"loss", "objective"} and shop.made == ["loss", "objective", "steps"]
    assert shop.if_made(lambda: shop.objective) is None and shop.if_made(lambda: shop.steps) == 4
    with pytest.raises(Unmade, match="loss"):
        _ = shop.loss
    shop = Shop("1", "many")
    shop.check_all()
    assert shop.check.messages == ["2 is not 6", "invalid literal for int() with base 10: 'many'"]


def test_a_subclass_replaces_a_part_and_adds_its_checks_at_the_end():
    shop = LargeShop("3", "4")
    shop.check_all()
    assert shop.check.messages == ["60 is not 6", "4 steps of 30", "4 steps", "large 30"]


def test_objects_may_collect_their_mistakes_together():
    check = Checks()
    for shop in (Shop("3", "many"), LargeShop("x", "4")):
        shop.check = check
        shop.check_all()
    assert [message.split()[-1] for message in check.messages] == ["'many'", "'x'", "steps"]


def test_other_errors_are_mistakes_of_ours_and_pass():
    checks = Checks()
    with pytest.raises(KeyError):
        checks.run(lambda: {}["key"])
    with pytest.raises(AttributeError):
        Shop(None, "3").steps.nothing  # noqa: B018
    with pytest.raises(TypeError):
        Shop(None, "3").check_all()


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
    parts = Parts(resolved("seed=x", "algorithm.loss.name=luck"))
    parts.check_all()
    assert keys(parts.check.messages) == ["seed", "algorithm.loss.name"]
    assert parts.run.batch.prompts == 32 and parts.train.key == "data.train"
    assert {"root", "algorithm"} <= parts.unmade and "train" not in parts.unmade
    with pytest.raises(Unmade, match="seed"):
        _ = parts.run.seed
    with pytest.raises(AttributeError):
        _ = parts.run.sed


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
    with pytest.raises(ZeroDivisionError), at_step(3), naming("a check", Parts):
        divide()


def test_what_survives_is_a_warning_with_the_place_of_the_error():
    warnings = []
    with surviving("the report", warnings.append):
        {}["page"]
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
