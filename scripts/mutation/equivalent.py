"""Changes that no test can notice, each with the reason: (function, the changed line) -> why nothing follows."""

MASKED_AGAIN = "what is outside `loss_mask` is masked once more before anybody sees it"
COMPARED = "a comparison passes no gradient"
SHIFTED = "one number for a group and a t, whichever it is"
ON_THE_TOTAL = "it acts on a draw that rounding puts on the total alone, and no seed of a test has one"
SHAPE_ALONE = "only the shape and the device of the mask are looked at"

EQUIVALENT = {
    ("advantage.returns.prime", "others = size - 1"): "a group of one gets 0, whatever is computed for it",
    (
        "advantage.returns.optimal_token_baseline",
        "place = group[:, None] * keep.shape[1] + keep.cumsum(dim=1) + 1",
    ): SHIFTED,
    (
        "advantage.returns.optimal_token_baseline",
        "place = group[:, None] * keep.shape[1] + keep.cumsum(dim=1) - 2",
    ): SHIFTED,
    (
        "advantage.returns.optimal_token_baseline",
        "place = group[:, None] * keep.shape[1] - keep.cumsum(dim=1) - 1",
    ): SHIFTED,
    (
        "advantage.returns.gae_length_adaptive",
        "lam = (1 - 1 / (alpha * keep.sum(dim=1).double())).clamp(min=0)",
    ): "the row has no token; and lam is 0, as 1 / 0 is infinite",
    (
        "advantage.returns.gae_length_adaptive",
        "lam = (1 - 1 / (alpha * keep.sum(dim=1).double().clamp(min=2))).clamp(min=0)",
    ): "in a row of one token lam multiplies nothing",
    (
        "advantage.returns.estimate",
        "longest = max((keep | True).sum(dim=1).tolist(), default=0)",
    ): "the loop runs longer, over zeros",
    (
        "advantage.returns.estimate",
        "longest = max(keep.sum(dim=1).tolist(), default=1)",
    ): "there is no row",
    ("token_weights.correction.measure", "owners = index[:, None].expand_as(keep | True)[keep]"): SHAPE_ALONE,
    (
        "token_weights.correction._acts_on",
        "return (keep | True) & (batch['advantages'] < 0 if rule.sign == 'negative' else batch['advantages'] > 0)",
    ): "a rule with a sign drops no groups, and its other actions are masked by `loss_mask`",
    (
        "token_weights.correction.Correction.unsigned",
        "batch['correction_weights'] = weights / torch.where(total == 0, 2.0, total / count).to(weights.dtype)",
    ): "all weights are 0 where their sum is",
    (
        "scores.groups.group_statistics",
        "tied = (highest - lowest <= ROUNDING * torch.maximum(highest, lowest.abs()))[index]",
    ): "the lowest score is the larger one in size where the highest is below 0",
    (
        "loss.clip.clipped",
        "advantages = batch['advantages']",
    ): "outside `loss_mask` the loss is 0, below any bound, and r is 1",
    ("loss.clip.clipped", "advantages = torch.where(batch['loss_mask'] | True, batch['advantages'], 0.0)"): "as above",
    ("loss.clip.clipped", "advantages = torch.where(batch['loss_mask'], batch['advantages'], 1.0)"): "as above",
    ("order_statistics.draws_of", "keep = batch['loss_mask'] | True"): SHAPE_ALONE,
    (
        "loss.clip_variants.select_clip_cov",
        "difference = log_ratio(logprobs, batch['old_logprobs'], keep | True)",
    ): MASKED_AGAIN,
    (
        "loss.clip_variants.select_clip_cov",
        "free = keep & (clips['clip/low'] - clips['clip/high'] == 0)",
    ): "no token is clipped on both sides",
    (
        "loss.clip_variants.select_m2po",
        "difference = log_ratio(logprobs, batch['rollout_logprobs'], batch['loss_mask'] | True)",
    ): MASKED_AGAIN,
    (
        "loss.sequence.gvpo",
        "centred = gap - (total / rows)[index]",
    ): "0 / 0 is that of a group without trained tokens, whose loss and gradient are masked",
    (
        "loss.soft.reinforced",
        "return -torch.where(keep, batch['advantages'] * weight, 1.0) * torch.where(keep, logprobs, 0.0)",
    ): "the other factor is 0",
    (
        "loss.soft.reinforced",
        "return -torch.where(keep, batch['advantages'] * weight, 0.0) * torch.where(keep, logprobs, 1.0)",
    ): "the other factor is 0",
    (
        "loss.soft._kept",
        "logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))",
    ): COMPARED,
    ("loss.soft._kept", "return logprobs"): MASKED_AGAIN,
    ("loss.soft._kept", "return torch.where(batch['loss_mask'] | True, logprobs, 0.0)"): MASKED_AGAIN,
    ("loss.soft._kept", "return torch.where(batch['loss_mask'], logprobs, 1.0)"): MASKED_AGAIN,
    ("loss.soft._trusted", "advantages = batch['advantages']"): "outside `loss_mask` nothing has fallen or risen",
    (
        "loss.soft._trusted",
        "advantages = torch.where(batch['loss_mask'] | True, batch['advantages'], 0.0)",
    ): "outside `loss_mask` nothing has fallen or risen",
    (
        "loss.soft._trusted",
        "advantages = torch.where(batch['loss_mask'], batch['advantages'], 1.0)",
    ): "outside `loss_mask` nothing has fallen or risen",
    (
        "scores.groups.dense_numbers",
        "new = torch.nn.functional.pad(ordered[1:] != ordered[:-1], (min(1, len(ids)), 1))",
    ): "`scatter` reads as many numbers as there are places",
    (
        "scores.selections.resample_counts",
        "draws = token_draws(seed, torch.arange(len(scores)), torch.zeros(2, dtype=torch.int64))[:, 0]",
    ): "the second draw of a row is not read",
    (
        "scores.selections.resample_counts",
        "places = torch.searchsorted(sums, draws * sums[-1], right=True)",
    ): ON_THE_TOTAL,
    ("order_statistics.up_to_mean", "keys = (values.double() * 2 ** 30).round().long()"): MASKED_AGAIN,
    (
        "order_statistics.up_to_mean",
        "keys = (torch.where(mask, values.double(), 1.0) * 2 ** 30).round().long()",
    ): MASKED_AGAIN,
    ("order_statistics.crossing", "for shift in range(56, -2, -8):"): "the same shifts",
}
EQUIVALENT |= {
    (
        "scores.selections.resample_counts",
        f"places = torch.searchsorted(sums, (draws * sums[-1]).clamp(max=float(sums[-1]) {factor}), right=True)",
    ): ON_THE_TOTAL
    for factor in (
        "/ (1 - 2.0 ** (-52))",
        "* (1 + 2.0 ** (-52))",
        "* (2 - 2.0 ** (-52))",
        "* (1 - 4.0 ** (-52))",
        "* (1 - 2.0 ** (-104))",
    )
}
