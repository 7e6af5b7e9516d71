"""Changes that no test can notice, each with the reason: (function, the changed lines) -> why nothing follows from it."""

MASKED_LATER = "what is outside `keep` is masked once more before anybody sees it"
SPARE_LOOPS = "only the time it takes changes"
SCORES_SO_CLOSE = "where the difference decides, highest and lowest are one number but for its last digits"
COMPARED = "a comparison passes no gradient"

EQUIVALENT = {
    ("advantage.process.prime", "others = size - 1"): "a group of one gets 0, whatever is computed for it",
    ("advantage.process.prime", "dense = process - baseline[:, None]"): MASKED_LATER,
    ("advantage.process.prime", "dense = torch.where(keep | True, process - baseline[:, None], 0.0)"): MASKED_LATER,
    ("advantage.process.prime", "dense = torch.where(keep, process - baseline[:, None], 1.0)"): MASKED_LATER,
    (
        "advantage.returns.gae_length_adaptive",
        "lam = (1 - 1 / (alpha * keep.sum(dim=1).double())).clamp(min=0)",
    ): "1 / 0 is infinite, so lam is 0; and the row has no token",
    (
        "advantage.returns.gae_length_adaptive",
        "lam = (1 - 1 / (alpha * keep.sum(dim=1).double().clamp(min=2))).clamp(min=0)",
    ): "in a row of one token lam multiplies nothing",
    (
        "advantage.returns.estimate",
        "longest = max((keep | True).sum(dim=1).tolist(), default=0)",
    ): SPARE_LOOPS,
    ("advantage.returns.estimate", "longest = max(keep.sum(dim=1).tolist(), default=1)"): SPARE_LOOPS,
    (
        "aggregation.group_mean",
        "tokens = (keep | True).new_zeros(len(ids), dtype=torch.int64).index_add(0, index, keep.sum(dim=1))",
    ): "new_zeros looks at the device alone",
    (
        "correction.measure",
        "owners = index[:, None].expand_as(keep | True)[keep]",
    ): "expand_as looks at the shape alone",
    (
        "correction._acts_on",
        "return (keep | True) & (batch['advantages'] < 0 if rule.sign == 'negative' else batch['advantages'] > 0)",
    ): "no rule with a sign drops groups, and all else is masked by `keep`",
    (
        "correction.Correction.unsigned",
        "batch['correction_weights'] = weights / torch.where(total == 0, 2.0, total / count).to(weights.dtype)",
    ): "all weights are 0 where their total is",
    ("loss.clip.clipped", "advantages = batch['advantages']"): MASKED_LATER,
    ("loss.implicit_reward.implicit_reward", "x"): "",
}
