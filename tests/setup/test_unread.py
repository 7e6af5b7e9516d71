"""What the run says at its start about options without effect."""

import pytest

from rft.setup.assembly import Job
from rft.setup.unread import notices

TIS = "algorithm/correction=token_tis"
BYPASS = "algorithm.correction.anchor=rollout"
PLAIN = "algorithm/loss=reinforce"


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
