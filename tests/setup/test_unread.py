"""What the run says at its start about options without effect."""

import pytest

from rft.errors import Problems
from rft.setup.assembly import Job
from rft.setup.components import Components
from rft.setup.unread import notices

TIS = "algorithm/correction=token_tis"
BYPASS = "algorithm.correction.anchor=rollout"
PLAIN = "algorithm/loss=reinforce"


def mistakes(config, typed):
    try:
        Components(config, typed)
    except Problems as problems:
        return problems.messages
    return []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([TIS], True),
        ([TIS, PLAIN, BYPASS, "batch.minibatches=1"], True),
        ([TIS, PLAIN, BYPASS, "batch.minibatches=2"], False),  # the current policy has moved in the second update
        ([TIS, "strategy.dtype=bfloat16"], False),
        ([TIS, "rollout.top_p=0.9"], False),
        ([], False),
    ],
)
def test_a_correction_of_equal_log_probabilities_has_no_effect(overrides, said, resolved):
    job = Job(resolved(*overrides))
    messages = list(notices(job.run, job.algorithm, job.exact()))
    assert any("algorithm.correction are 1 up to rounding" in message for message in messages) == said


def test_ratios_to_a_truncated_distribution_are_said_to_be_biased(resolved):
    """Each ratio is that of the probability before and after the cut, which is the probability that is kept."""
    for overrides, said in (([TIS, "rollout.top_p=0.9"], True), (["rollout.top_p=0.9"], False), ([TIS], False)):
        job = Job(resolved("algorithm/correction=none", *overrides))
        messages = list(notices(job.run, job.algorithm, job.exact()))
        assert any("have the probability that is kept as their mean, not 1" in message for message in messages) == said


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("rollout.temperature", "rollout.temperature: this run does not read it (evaluate.responses=a.jsonl has"),
        ("eval.top_p", "eval.top_p: this run does not read it (evaluate.responses=a.jsonl has the answers)"),
        ("evaluate.checkpoint", "evaluate.checkpoint: this run does not read it (evaluate.responses=a.jsonl)"),
        ("eval.samples", ""),
        ("evaluate.columns.response", ""),
    ],
)
def test_given_responses_read_no_option_of_sampling(typed, message, resolved):
    config = resolved("mode=evaluate", "evaluate.responses=a.jsonl")
    messages = mistakes(config, {typed: ""})
    assert [text[: len(message)] for text in messages] == ([message] if message else [])
    assert mistakes(config, {typed: "run.yaml"}) == [], "the yaml file of the run has it"


def test_an_evaluation_of_a_model_reads_no_option_of_given_responses(resolved):
    typed = {"evaluate.match": "", "evaluate.checkpoint": "", "rollout.temperature": ""}
    assert mistakes(resolved("mode=evaluate"), typed) == [
        "evaluate.match: this run does not read it (evaluate.responses=None); take it out"
    ]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "reward.canary.path=None"),
        (("algorithm=dpo", "reward.canary.path=a.jsonl"), "no sampled text is scored"),
        (("reward.canary.path=a.jsonl",), None),
    ],
)
def test_options_of_canary_tasks_need_tasks_and_scores(overrides, reason, resolved):
    messages = mistakes(resolved(*overrides), {"reward.canary.every": ""})
    assert messages == ([f"reward.canary.every: this run does not read it ({reason}); take it out"] if reason else [])


@pytest.mark.parametrize(("nonfinite", "refused"), [("stop", True), ("skip", False), ("drop_rows", False)])
def test_a_run_that_stops_at_a_fault_reads_no_option_of_skipped_updates(nonfinite, refused, resolved):
    keys = ["faults.max_skipped", "faults.saved_updates"]
    messages = mistakes(resolved(f"faults.nonfinite={nonfinite}"), dict.fromkeys(keys, ""))
    reason = "this run does not read it (faults.nonfinite=stop); take it out"
    assert messages == ([f"{key}: {reason}" for key in keys] if refused else [])
