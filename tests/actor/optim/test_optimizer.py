"""The schedule by hand, which rule moves what, and each rule against PyTorch's or by hand."""

import copy

import pytest
import torch
from torch import nn

from rft.actor.init import blocks, load_model, read_config
from rft.actor.optim import adamw_8bit, muon
from rft.setup.assembly import Job
from tests.helpers import make_optimizer

QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def options(**changes):
    return make_optimizer(**{"lr": 0.1, "betas": [0.9, 0.95], "weight_decay": 0.3, "warmup_updates": 0} | changes)


def build(made, *parameters, updates=1):
    """The optimizer of parameters that all stand in a block."""
    network = nn.ParameterList(parameters)
    return made.build(network, [network], updates, {})


def gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        # rows of very different size, as those of an embedding
        size = torch.logspace(-4, 0, len(parameter)).view(-1, *[1] * (parameter.dim() - 1))
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def steps(parameters, optimizer, count):
    for seed in range(count):
        gradients(parameters, seed)
        optimizer.step()


def twins(*shapes):
    torch.manual_seed(0)
    first = [nn.Parameter(0.1 * torch.randn(shape)) for shape in shapes]
    return first, copy.deepcopy(first)


@pytest.mark.parametrize(
    ("schedule", "warmup", "final", "updates", "expected"),
    [
        ("constant", 0, 0.0, 3, [1, 1, 1, 1]),
        ("constant", 4, 0.0, 9, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 0, 0.0, 4, [1, 0.75, 0.5, 0.25, 0, 0, 0]),
        ("linear", 2, 0.2, 6, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", 0, 0.0, 4, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0, 0]),
        ("cosine", 1, 0.5, 3, [1, 1, 0.75, 0.5, 0.5]),
        ("linear", 5, 0.0, 5, [0.2, 0.4, 0.6, 0.8, 1, 1, 0]),  # no update is left to fall in
    ],
)
def test_factors_by_hand(schedule, warmup, final, updates, expected):
    made = options(schedule=schedule, warmup_updates=warmup, final_lr=final)
    assert [made.factor(update, updates) for update in range(len(expected))] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_the_rate_of_an_update_is_that_of_its_number(name):
    parameters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    made, scheduler = build(options(name=name, schedule="linear", warmup_updates=2), *parameters, updates=4)
    rates = []
    for _ in range(4):
        rates.append(made.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [rates[-1]] * 2
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        made.step()
        scheduler.step()
        assert all(not torch.equal(old, new) for old, new in zip(before, parameters, strict=True))
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_only_matrices_decay_and_only_what_trains_is_taken(name):
    matrix, bias, frozen = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (3, 3)))
    frozen.requires_grad_(False)
    made, _ = build(options(name=name), matrix, bias, frozen)
    found = {id(p): group for group in made.param_groups for p in group["params"]}
    assert set(found) == {id(matrix), id(bias)}
    assert (found[id(matrix)]["weight_decay"], found[id(bias)]["weight_decay"]) == (0.3, 0.0)
    assert all(group["betas"] == (0.9, 0.95) and group["eps"] == 1e-8 for group in made.param_groups)
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    made.step()
    assert torch.allclose(matrix, torch.full((2, 2), 1 - 0.1 * 0.3)) and (bias == 1).all()


def test_a_network_without_biases_has_one_group():
    made, _ = build(options(), nn.Parameter(torch.zeros(2, 2)))
    assert len(made.param_groups) == 1


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_which_rule_moves_what(name):
    model = load_model(None, read_config(None, QWEN, 19, "actor"), 0)
    made, _ = options(name=name).build(model, blocks(model), 1, {})
    rules = {id(p): group["rule"] for group in made.param_groups for p in group["params"]}
    found = {parameter: rules[id(tensor)] for parameter, tensor in model.named_parameters()}
    vectors = {parameter for parameter, tensor in model.named_parameters() if tensor.dim() < 2}
    outside = {"model.embed_tokens.weight", "lm_head.weight"}
    expected = {"adamw": set(), "adamw_8bit": found.keys() - vectors, "muon": found.keys() - vectors - outside}[name]
    assert {parameter for parameter, rule in found.items() if rule == name and rule != "adamw"} == expected
    assert {parameter for parameter, rule in found.items() if rule == "adamw"} == found.keys() - expected


def test_hooks_run_once_in_a_process_with_a_plain_adamw():
    parameters, others = twins((4, 3))
    torch.optim.AdamW(others)
    made, _ = build(options(), *parameters)
    seen = []
    made.register_step_pre_hook(lambda *_: seen.append("before"))
    made.register_step_post_hook(lambda *_: seen.append("after"))
    steps(parameters, made, 1)
    assert seen == ["before", "after"]


def test_adamw_is_pytorchs():
    mine, theirs = twins((5, 7), (4,))
    made, _ = build(options(weight_decay=0.0), *mine)
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for optimizer, parameters in ((made, mine), (reference, theirs)):
        steps(parameters, optimizer, 5)
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Test8Bit:
    SHAPES = ((30, 700), (3, 5, 20), (1, 256), (6, 1))  # blocks of rows that are full, and that are not

    def moved(self, count, name="adamw_8bit", **changes):
        parameters, _ = twins(*self.SHAPES)
        made, _ = build(options(name=name, lr=1e-2, **changes), *parameters)
        steps(parameters, made, count)
        return parameters, made

    def test_the_first_step_is_adamws(self):
        for mine, theirs in zip(self.moved(1)[0], self.moved(1, "adamw")[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)

    def test_many_steps_stay_close_to_adamws(self):
        start, _ = twins(*self.SHAPES)
        pairs = zip(self.moved(40)[0], self.moved(40, "adamw")[0], start, strict=True)
        for mine, theirs, before in pairs:
            gap = (mine - theirs).norm() / (theirs - before).norm()
            assert 0 < gap < 0.05

    def test_the_state_is_the_moments_to_the_nearest_code(self):
        parameters, made = self.moved(1)
        gradients(parameters, 0)
        for parameter in parameters:
            state = made.state[parameter]
            for name, signed, exact in (
                ("exp_avg", True, 0.1 * parameter.grad),
                ("exp_avg_sq", False, 0.05 * parameter.grad.square()),
            ):
                codes, scales = state[name], state[f"{name}_scale"]
                assert codes.dtype == torch.uint8 and codes.shape == parameter.shape
                assert scales.shape == (*parameter.shape[:-1], -(-parameter.shape[-1] // 256))
                found = adamw_8bit.numbers(codes, scales, signed)
                book = adamw_8bit.code_book(signed, torch.device("cpu"))
                largest = scales.repeat_interleave(256, -1)[..., : parameter.shape[-1]]
                nearest = book[(book - (exact / largest)[..., None]).abs().argmin(-1)] * largest
                # a number in the middle of two codes may go to either, within the precision of float16
                assert (
                    (found - exact).abs() <= (nearest - exact).abs() + 2**-10 * exact.abs() + 2**-24 * largest
                ).all()
                assert ((found - exact).abs() <= 0.0075 * largest).all()

    def test_the_code_book_by_hand(self):
        signed, unsigned = (adamw_8bit.code_book(kind, torch.device("cpu")) for kind in (True, False))
        for book in (signed, unsigned):
            assert len(book) == 256 and (book.diff() > 0).all() and 0.0 in book and book[-1] == 1.0
        assert torch.equal(signed[signed < 0], -signed[(signed > 0) & (signed < 1)].flip(0))
        assert signed[signed > 0][:3].tolist() == pytest.approx([0.55e-6, 3.25e-6, 7.75e-6], rel=1e-6)
        assert float(signed[-2]) == pytest.approx(1 - 0.9 / 128, rel=1e-6)  # 64 steps of the uppermost decade
        assert unsigned[1:3].tolist() == pytest.approx([0.325e-6, 0.775e-6], rel=1e-6)
        assert float(unsigned[-2]) == pytest.approx(1 - 0.9 / 256, rel=1e-6)

    def test_zeros_stay_zero(self):
        parameter = nn.Parameter(torch.ones(2, 300))
        made, _ = build(options(name="adamw_8bit", weight_decay=0.0), parameter)
        for _ in range(2):
            parameter.grad = torch.zeros_like(parameter)
            made.step()
        assert (parameter == 1).all()

    def test_it_does_not_matter_how_much_is_float32_at_a_time(self, monkeypatch):
        whole, _ = self.moved(3)
        monkeypatch.setattr(adamw_8bit, "NUMBERS_AT_ONCE", 1500)
        for mine, theirs in zip(self.moved(3)[0], whole, strict=True):
            assert torch.equal(mine, theirs)

    def test_the_state_takes_a_quarter(self):
        model = load_model(None, read_config(None, QWEN | {"hidden_size": 64}, 400, "actor"), 0)
        held = {}
        for name in ("adamw", "adamw_8bit"):
            made, _ = options(name=name).build(model, blocks(model), 1, {})
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            made.step()
            held[name] = sum(tensor.nbytes for state in made.state.values() for tensor in state.values())
        numbers = sum(parameter.numel() for parameter in model.parameters())
        assert held["adamw"] == pytest.approx(8 * numbers, rel=0.02)
        assert held["adamw_8bit"] < 0.35 * held["adamw"]

    def test_a_loaded_state_is_the_state_that_was_saved(self):
        _, made = self.moved(2)
        other, _ = build(options(name="adamw_8bit"), *made.param_groups[0]["params"])
        other.load_state_dict(copy.deepcopy(made.state_dict()))
        for saved, loaded in zip(made.state.values(), other.state.values(), strict=True):
            assert saved["exp_avg"].dtype == torch.uint8
            for name, tensor in saved.items():
                assert tensor.dtype == loaded[name].dtype and torch.equal(tensor, loaded[name])


class TestMuon:
    SHAPES = ((12, 20), (20, 12), (12, 20), (8, 8))

    def test_it_is_pytorchs(self):
        mine, theirs = twins(*self.SHAPES)
        made, _ = build(options(name="muon"), *mine)
        reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for optimizer, parameters in ((made, mine), (reference, theirs)):
            steps(parameters, optimizer, 4)
        for found, expected in zip(mine, theirs, strict=True):
            assert torch.equal(found, expected)

    def test_an_update_has_the_size_of_adamws(self):
        parameters, before = twins((40, 60), (60, 40))
        made, _ = build(options(name="muon", weight_decay=0.0), *parameters)
        steps(parameters, made, 1)
        for after, start in zip(parameters, before, strict=True):
            rms = (after - start).square().mean().sqrt()
            # an orthogonal (A, B) has numbers of 1 / sqrt(max(A, B)); singular values end a little under 1
            assert 0.7 * 0.2 < rms / 0.1 < 1.1 * 0.2

    def test_singular_values_go_to_one(self):
        torch.manual_seed(0)
        u, _, v = torch.linalg.svd(torch.randn(1, 30, 50), full_matrices=False)
        matrix = u @ torch.diag(torch.logspace(0, -1.5, 30)) @ v
        for given in (matrix, matrix.mT):
            found = muon.newton_schulz(given).float()
            values = torch.linalg.svdvals(found)
            assert values.min() > 0.6 and values.max() < 1.25
            directions = (u @ v) if given is matrix else (u @ v).mT
            assert nn.functional.cosine_similarity(found.flatten(), directions.flatten(), 0) > 0.97

    def test_an_expert_is_a_matrix_of_its_own(self):
        (stack,), _ = twins((3, 12, 20))
        experts = [nn.Parameter(expert.detach().clone()) for expert in stack]
        for parameters in ([stack], experts):
            made, _ = build(options(name="muon"), *parameters)
            for seed in range(2):
                gradients([stack], seed)
                if parameters is experts:
                    for expert, grad in zip(experts, stack.grad, strict=True):
                        expert.grad = grad
                made.step()
        for whole, expert in zip(stack, experts, strict=True):
            assert torch.equal(whole, expert)

    @pytest.mark.parametrize("shape", [(1, 20), (12, 1), (6, 1, 4), (2, 2, 3, 3)])
    def test_what_is_no_matrix_is_left_to_adamw(self, shape):
        assert not muon.takes(nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_an_optimizer_is_one_of_three(tiny, name):
    """The critic and the warm-up take the policy's, and may have their own."""
    config = tiny("algorithm=ppo", f"actor.optimizer.name={name}", "warmup.optimizer.name=adamw")
    chosen = [config[key]["optimizer"]["name"] for key in ("actor", "critic", "prm", "warmup")]
    assert chosen == [name, name, name, "adamw"]
    with pytest.raises(
        ValueError, match=r"^critic\.optimizer\.name: expected one of adamw, adamw_8bit, muon, got 'mu'"
    ):
        Job(tiny("algorithm=ppo", "critic.optimizer.name=mu"))
