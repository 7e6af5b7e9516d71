"""The presets: each composes and builds, does what its name says, and has the gradient that its page claims."""

import math
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict

import rft
from rft.algorithm.options import CorrectionOptions
from rft.algorithm.token_weights.correction import Correction
from rft.metrics import Metrics
from rft.registry import convert

CONFIG = Path(rft.__file__).parent / "config"
PRESETS = sorted(path.stem for path in (CONFIG / "algorithm" / "correction").glob("*.yaml") if path.stem != "none")
F64 = torch.float64
e = math.exp


@pytest.fixture(scope="module")
def preset():
    with initialize_config_dir(str(CONFIG), version_base="1.3"):

        def read(name, *overrides):
            node = OmegaConf.to_container(compose(f"algorithm/correction/{name}", list(overrides)).algorithm.correction)
            return convert(node, CorrectionOptions, "algorithm.correction")

        yield read


def corrected(options, log_rho, rollout=-1.0, advantages=None):
    """Weights and rows that are left of rows of trained tokens, each in a group of its own."""
    log_rho = torch.as_tensor(log_rho, dtype=F64)
    columns = {
        "loss_mask": torch.ones_like(log_rho, dtype=torch.bool),
        "group": torch.arange(len(log_rho)),
        "rollout_logprobs": torch.as_tensor(rollout, dtype=F64).expand_as(log_rho),
        "advantages": torch.ones_like(log_rho) if advantages is None else torch.tensor(advantages, dtype=F64),
    }
    batch, correction = TensorDict(columns, batch_size=[len(log_rho)]), Correction(options, "algorithm.correction")
    logprobs = batch["rollout_logprobs"] + log_rho
    correction.unsigned(logprobs, batch, lambda tensor: tensor, Metrics())
    correction.signed(logprobs, batch, Metrics())
    return batch["correction_weights"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_leaves_equal_policies_alone(name, preset):
    options = preset(name)
    assert options.anchor == ("rollout" if name.startswith("opsm") else "old")
    assert torch.equal(corrected(options, torch.zeros(2, 3)), torch.ones(2, 3, dtype=F64))


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("opsm")])
def test_the_anchor_of_every_preset_can_be_the_rollout_policy(name, preset):
    options, bypass = preset(name), preset(name, "algorithm.correction.anchor=rollout")
    assert bypass.anchor == "rollout"
    assert (bypass.rules, bypass.normalize) == (options.rules, options.normalize)


a, b, c = math.log(4.0), math.log(0.25), math.log(1.2)
NEAR = 0.0005  # of geo_rs's bounds
BY_HAND = {  # weights of the rows (log 4, log 1/4), (log 1.2, log 1.2), (0.0005, 0.0005), (0, -10)
    "token_is": [[4, 0.25], [1.2, 1.2], [e(NEAR)] * 2, [1, e(-10)]],
    "seq_is": [[1, 1], [1.44] * 2, [e(2 * NEAR)] * 2, [e(-10)] * 2],
    "binary_kl_is": [[0, 0], [0, 0], [e(NEAR)] * 2, [0, 0]],
    "token_tis": [[2, 0.25], [1.2, 1.2], [e(NEAR)] * 2, [1, e(-10)]],
    "seq_tis": [[1, 1], [1.44] * 2, [e(2 * NEAR)] * 2, [e(-10)] * 2],
    "geo_tis": [[1, 1], [1.2] * 2, [e(NEAR)] * 2, [e(-5)] * 2],
    "token_clip": [[2, 0.5], [1.2, 1.2], [e(NEAR)] * 2, [1, 0.5]],
    "icepop": [[4, 0], [1.2, 1.2], [e(NEAR)] * 2, [1, 0]],
    "token_mis": [[0, 0.25], [1.2, 1.2], [e(NEAR)] * 2, [1, e(-10)]],
    "seq_mis": [[1, 1], [1.44] * 2, [e(2 * NEAR)] * 2, [e(-10)] * 2],
    "token_rs": [[0, 0], [1, 1], [1, 1], [1, 0]],
    "seq_rs": [[1, 1], [1, 1], [1, 1], [0, 0]],
    "geo_rs": [[1, 1], [0, 0], [1, 1], [0, 0]],
    "k3_rs": [[0, 0], [0, 0], [1, 1], [0, 0]],
    "veto": [[1, 1], [1, 1], [1, 1], [0, 0]],
    "seq_rs_seq_tis": [[1, 1], [1.44] * 2, [e(2 * NEAR)] * 2, [0, 0]],
    "geo_rs_token_tis": [[2, 0.25], [0, 0], [e(NEAR)] * 2, [0, 0]],
    "geo_rs_seq_tis": [[1, 1], [0, 0], [e(2 * NEAR)] * 2, [0, 0]],
    "k3_rs_token_tis": [[0, 0], [0, 0], [e(NEAR)] * 2, [0, 0]],
    "k3_rs_seq_tis": [[0, 0], [0, 0], [e(2 * NEAR)] * 2, [0, 0]],
    "opsm": [[1, 1], [1, 1], [1, 1], [0, 0]],
    "opsm_zero": [[1, 1], [1, 1], [1, 1], [0, 0]],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_presets_by_hand(name, preset):
    rows = [[a, b], [c, c], [NEAR, NEAR], [0, -10]]
    signs = [[1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]]
    found = corrected(preset(name), rows, advantages=signs)
    torch.testing.assert_close(found, torch.tensor(BY_HAND[name], dtype=F64), rtol=1e-9, atol=1e-12)


def test_every_preset_is_worked_by_hand():
    assert set(BY_HAND) == {name for name in PRESETS if not name.startswith("bypass")}


def test_binary_kl_is_by_rows(preset):
    """Tokens with p = 1/2 under the rollout policy: the binary KL of log rho x is -x / 2 - log(2 - exp(x)) / 2."""
    options, rollout = preset("binary_kl_is"), math.log(0.5)

    def mean_kl(*log_rho):
        return sum(-x / 2 - math.log(2 - e(x)) / 2 for x in log_rho) / len(log_rho)

    assert mean_kl(0.15, 0.0) > 0.005 > mean_kl(0.15, 0.0, 0.0)
    assert corrected(options, [[0.15, 0.0]], rollout).tolist() == [[0, 0]]
    found = corrected(options, [[0.15, 0.0, 0.0]], rollout)
    torch.testing.assert_close(found, torch.tensor([[e(0.15), 1, 1]], dtype=F64))


def test_masks_of_opsm_spare_rows_that_did_well(preset):
    assert corrected(preset("opsm"), [[0, -10.0]], advantages=[[1.0, 1.0]]).tolist() == [[1, 1]]


class Tabular:
    """All nine texts of two positions and three symbols, under a policy that trains and one that sampled."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.trained, self.sampled = (1.0 * torch.randn(4, 3, dtype=F64, generator=generator) for _ in range(2))
        self.reward = torch.rand(9, dtype=F64, generator=generator)

    @staticmethod
    def logprobs(logits):
        """(9, 2): row 0 of the logits is the first position, row 1 + s the second after the symbol s."""
        first, second = torch.cartesian_prod(torch.arange(3), torch.arange(3)).unbind(1)
        table = logits.log_softmax(-1)
        return torch.stack([table[0, first], table[1 + first, second]], dim=1)

    def true_gradient(self):
        logits = self.trained.clone().requires_grad_()
        mean = (self.logprobs(logits).sum(1).exp() * self.reward).sum()
        return torch.autograd.grad(mean, logits)[0]

    def gradient(self, options):
        """Of REINFORCE on the texts of the rollout policy, weighed; the expectation, not a sample."""
        logits = self.trained.clone().requires_grad_()
        logprobs, rollout = self.logprobs(logits), self.logprobs(self.sampled)
        weights = 1.0 if options is None else corrected(options, (logprobs - rollout).detach(), rollout)
        mean = (rollout.sum(1).exp()[:, None] * weights * self.reward[:, None] * logprobs).sum()
        return torch.autograd.grad(mean, logits)[0]

    def cosine(self, options):
        return float(torch.cosine_similarity(self.gradient(options).flatten(), self.true_gradient().flatten(), dim=0))


@pytest.mark.parametrize("seed", range(5))
def test_sequence_importance_sampling_is_exact_off_policy(seed, preset):
    tabular = Tabular(seed)
    for overrides in ((), ("algorithm.correction.anchor=rollout",)):
        torch.testing.assert_close(
            tabular.gradient(preset("seq_is", *overrides)), tabular.true_gradient(), rtol=1e-12, atol=1e-14
        )
    assert tabular.cosine(preset("token_is")) < 0.9999


ATLAS = {"token_is": 0.857, "geo_tis": 0.592, "token_tis": 0.532, None: 0.198}


def test_one_policy_where_every_step_away_from_the_sequence_ratio_costs_direction(preset):
    """Which biased weight is the better depends on the policy: on average truncation costs less than averaging."""
    tabular = Tabular(263)
    found = {name: tabular.cosine(name and preset(name)) for name in ATLAS}
    assert found == pytest.approx(ATLAS, abs=6e-4)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_order_of_the_presets_over_many_policies(preset):
    options = {name: name and preset(name) for name in ("seq_is", "token_is", "token_tis", "seq_tis", "geo_tis", None)}
    policies = [Tabular(seed) for seed in range(20)]
    mean = {name: sum(tabular.cosine(chosen) for tabular in policies) / 20 for name, chosen in options.items()}
    assert mean["seq_is"] == pytest.approx(1.0, abs=1e-12)
    for truncated in ("token_tis", "seq_tis"):
        assert mean["seq_is"] > mean["token_is"] > mean[truncated] > mean["geo_tis"] > mean[None] > 0
