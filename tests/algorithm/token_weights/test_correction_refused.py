"""Rules of a correction that make no sense or do not go together, and what the others say about themselves."""

from dataclasses import replace

import pytest

from rft.algorithm.options import CorrectionOptions, Rule
from rft.algorithm.token_weights.correction import Correction

RULE = Rule("ratio", "token", None, "clamp", None, 2.0, "any")


def test_facts():
    def correction(*rules, anchor="old"):
        return Correction(CorrectionOptions(anchor, False, dict(enumerate(rules))), "correction")

    mask, k2 = replace(RULE, action="mask"), replace(RULE, metric="k2", action="zero")
    assert correction(mask).reads == ("rollout_logprobs", "old_logprobs")
    assert correction(mask, anchor="rollout").reads == ("rollout_logprobs",)
    facts = [correction(rule) for rule in (mask, RULE, k2)]
    assert [fact.weighs for fact in facts] == [False, True, True]
    assert [fact.by_ratio for fact in facts] == [False, True, False]


SEQUENCE = replace(RULE, level="sequence", aggregate="product")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (replace(RULE, aggregate="max"), "rules.mine.aggregate: expected null"),
        (replace(RULE, level="sequence"), "rules.mine.aggregate: expected the name of one"),
        (replace(SEQUENCE, aggregate="mean"), "takes product, geometric, max or min, not mean"),
        (replace(SEQUENCE, metric="k1", action="mask"), "k1 takes sum, mean, max or min, not product"),
        (replace(RULE, low=5.0, high=0.5), "nothing is inside; swap them"),
        (replace(RULE, low=-0.5), "ratio is never negative"),
        (replace(RULE, metric="k3", action="mask", high=-0.1), "k3 is never negative"),
        (replace(RULE, action="mask", high=None), "mask needs a bound"),
        (replace(RULE, metric="k1"), "rules.mine.action: only a ratio is a weight, k1 is not"),
        (replace(SEQUENCE, aggregate="max"), "the max of the ratios is no weight"),
        (replace(RULE, sign="negative"), "rules.mine.sign: clamp of the ratio is for every sign"),
        (replace(SEQUENCE, action="drop", sign="positive"), "rules.mine.sign: drop"),
        (replace(RULE, action="drop"), "rules.mine.action: drop is for rows and groups"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule, message):
    with pytest.raises(ValueError, match=message) as problem:
        Correction(CorrectionOptions("old", False, {"mine": rule}), "algorithm.correction")
    assert str(problem.value).startswith("algorithm.correction.rules.mine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CorrectionOptions("old", False, {}), "correction.rules is empty"),
        (CorrectionOptions("old", False, {"a": RULE, "b": SEQUENCE}), "rules.b: a weighs by the ratio already"),
        (CorrectionOptions("old", True, {"a": replace(RULE, action="mask")}), "correction.normalize: no rule weighs"),
    ],
)
def test_rules_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Correction(options, "algorithm.correction")
