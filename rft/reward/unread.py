"""The options of a reward that a run does not read."""

from rft.conditions import unread_fields
from rft.reward.call import WORKERS
from rft.reward.compose import WeightedSum


def unread_reward(reward: WeightedSum, scored: bool, trained: bool, episodes: bool) -> dict[str, str]:
    """The reason for every key below `reward` that a run does not read.

    Args:
        scored: the run scores sampled texts that train.
        trained: something trains by the scores.
        episodes: the scored texts are episodes.
    """
    unread = unread_fields(reward.canary, "reward.canary", lambda part: "")
    if not scored:
        unread["reward.canary"] = "no sampled text is scored"
    if not (scored and trained):
        unread |= {f"reward.terms.{name}.weight": "nothing trains by the scores" for name in reward.names}
    if not reward.has_models:
        reason = "no term of the reward computes with a model of this process"
        unread |= dict.fromkeys(("reward.offload", "reward.shard"), reason)
    if all(term.thoughts == "keep" for term in reward.terms.values()):
        reason = "no term of the reward reads an answer, or the form of a response"
        unread |= dict.fromkeys(("reward.reasoning", "reward.prompt_opens"), reason)
    if episodes:
        reason = "in an episode a prompt begins the first answer, and terms read the last one"
        keys = ("reward", *(f"reward.terms.{name}" for name in reward.names))
        unread |= dict.fromkeys((f"{key}.include_prefill" for key in keys), reason)
    if not reward.concurrent:
        unread["reward.call.concurrency"] = "all terms are computed in the process of the run, one call at a time"
    for kind in WORKERS:
        if kind not in reward.workers:
            unread[f"reward.call.{kind}"] = f"no term has call.workers={kind}"
    return unread
