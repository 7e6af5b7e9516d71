"""What a job knows of the rows of its steps."""

import pytest

from rft.setup.assembly import Job


@pytest.mark.parametrize(
    ("overrides", "behind"),
    [
        (("environment=none", "rollout.max_new_tokens=12"), 12),
        (("environment.max_tokens=48", "rollout.max_new_tokens=12"), 48),
        (("environment.max_tokens=4096", "rollout.max_new_tokens=12"), None),
    ],
)
def test_the_longest_row_has_the_tokens_of_a_whole_episode(tiny, overrides, behind):
    """Those of its answer behind the prompt, or of an episode, up to the context of the policy."""
    dialogues = ("data=products", 'actor.tokenizer.alphabet="0123456789*=?"', "environment=marked_calculator")
    job = Job(tiny(*dialogues, *overrides))
    loaded = job.load(1)
    prompt = max(loaded.lengths.prompts(loaded.train))
    assert job.longest(loaded) == (job.policy.context if behind is None else prompt + behind)
