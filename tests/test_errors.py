"""Everything that is wrong is said at once, and what depends on it is not said as well."""

import pickle

import pytest

from rft.errors import Checks, Partial, Problems, Skipped
from rft.main import explain
from rft.setup.assembly import Job
from rft.setup.components import Components


def refuse(message):
    raise ValueError(message)


def test_checks_go_on_after_one_that_has_failed():
    check = Checks()
    with check():
        refuse("one")
    with check():
        raise Problems(["two", "three"])
    with check():
        refuse("four")
    with pytest.raises(Problems) as caught:
        check.end()
    assert caught.value.messages == ["one", "two", "three", "four"]
    assert str(caught.value) == "one\ntwo\nthree\nfour"


def test_nothing_is_raised_where_nothing_is_wrong():
    check = Checks()
    assert check.attempt(int, "3") == 3
    check.end()


def test_a_check_that_needs_what_has_failed_is_left_out():
    check = Checks()
    loss = check.attempt(refuse, "no such loss")
    for use in (lambda: loss.name, lambda: len(loss), lambda: list(loss), lambda: Partial(seed=1).steps):
        with check():
            use()
            refuse("it was not left out")
    assert check.messages == ["no such loss"]
    assert Partial(seed=1).seed == 1
    with pytest.raises(Skipped):
        _ = loss.name


def test_other_errors_are_mistakes_of_ours_and_pass():
    check = Checks()
    with pytest.raises(KeyError), check():
        _ = {}["key"]
    with pytest.raises(AttributeError), check():
        _ = "text".nothing


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
    parts = Components(resolved("seed=x", "algorithm.loss.name=luck"))
    assert keys(parts.check.messages) == ["seed", "algorithm.loss.name"]
    assert parts.run.batch.prompts == 32 and parts.train.key == "data.train"


def test_other_ranks_are_told_the_same():
    assert pickle.loads(pickle.dumps(Problems(["first", "second"]))).messages == ["first", "second"]


def test_the_command_line_numbers_several_mistakes_and_not_a_single_one():
    assert explain(Problems(["only"])) == "only"
    assert explain(Problems(["first", "second"])) == "2 mistakes\n1. first\n2. second"
