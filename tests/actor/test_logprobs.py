"""Log-probabilities and entropy against log_softmax and gather; how much of the logits is held, and computed."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rft.actor import logprobs as module
from rft.actor.forward import logits
from rft.actor.forward.logits import FORBIDDEN, LogitShape, forbidden_logits
from tests.actor.forward.tensor_cores import TensorCores

F64 = torch.float64
N, D, V = 11, 5, 150  # blocks of at least 64: two whole ones and the beginning of a third


def inputs(n=N, v=V, bias=True, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n, D), (v, D), (v,)] if bias else [(n, D), (v, D)]
    leaves = [torch.randn(*shape, dtype=F64, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return (*leaves, *[None] * (not bias)), torch.randint(v, (n,), generator=generator)


def token_logprobs(hidden, weight, bias, targets, temperature, *given, compiled=False, with_squares=False, **options):
    """Named in this file, so that a fixture can compile it."""
    given = given if len(given) > 1 else (*given, with_squares)
    options = logits.LogitOptions(temperature, **options)
    return module.token_logprobs(hidden, weight, bias, targets, options, *given, compiled=compiled)


def top_logprobs(hidden, weight, bias, temperature, count, *given, **options):
    return module.top_logprobs(hidden, weight, bias, logits.LogitOptions(temperature, *given, **options), count)


def plainly(hidden, weight, bias, targets, temperature):
    logp = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def narrow(monkeypatch):
    monkeypatch.setattr(logits, "BLOCK_ELEMENTS", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(logits, "NARROWEST", 64)


def forget():
    """Lets the next call compile again."""
    module._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(scope="module")
def traced():
    """The code that the compiler traces runs without code generation, which takes seconds."""
    forget()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "compile_function", partial(torch.compile, dynamic=True, backend="eager"))
        yield
    forget()


WAYS = ["blocks", "one block", "compiled blocks"]


@pytest.fixture(params=[*WAYS[:2], pytest.param(WAYS[2], marks=pytest.mark.slow)])
def blocks(request, monkeypatch):
    if request.param != "one block":
        narrow(monkeypatch)
    if request.param == "compiled blocks":
        request.getfixturevalue("traced")
        monkeypatch.setitem(globals(), "token_logprobs", partial(token_logprobs, compiled=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("n, bias", [(N, False), (N, True), (1, True)])
def test_values_and_gradients_are_those_of_log_softmax(blocks, n, bias, temperature):
    leaves, targets = inputs(n=n, bias=bias)
    mine = token_logprobs(*leaves, targets, temperature, True)[:2]
    theirs = plainly(*leaves, targets, temperature)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn(2, n, dtype=F64, generator=torch.Generator().manual_seed(1))
    wanted = [leaf for leaf in leaves if leaf is not None]
    for used in ((True, True), (True, False), (False, True)):
        sums = [sum((w * o).sum() for w, o, u in zip(weights, out, used, strict=True) if u) for out in (mine, theirs)]
        found, expected = (torch.autograd.grad(total, wanted, retain_graph=True) for total in sums)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [LogitShape(0.5), LogitShape(1.0, 2.0), LogitShape(3.0, 2.0)])
def test_scaled_and_capped_logits_have_the_values_and_gradients_of_log_softmax(blocks, shape):
    """Also where some tokens are forbidden: those are behind the cap."""
    leaves, targets = inputs()
    forbidden = torch.zeros(V, dtype=F64).index_fill_(0, torch.tensor([3, 70, 149]), -1e9)
    targets = targets.where(forbidden[targets] == 0, 5)
    logp = ((shape.apply(torch.nn.functional.linear(*leaves)) + forbidden) / 0.7).log_softmax(-1)
    expected = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).nansum(-1)
    found = token_logprobs(*leaves, targets, 0.7, True, shape=shape, forbidden=forbidden)[:2]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(out[0].sum() + 0.3 * out[1].sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    ids, likeliest = top_logprobs(*leaves, 0.7, 4, shape, forbidden)
    torch.testing.assert_close(likeliest, logp.gather(1, ids.long()), rtol=1e-6, atol=1e-6)
    assert not {3, 70, 149} & set(ids.flatten().tolist())


@pytest.mark.parametrize("first", [70, 140])
def test_ids_that_cannot_follow_are_in_no_sum(blocks, first):
    """From the second block on, or in the last one alone; 100 and 145 can follow."""
    leaves, targets = inputs()
    tokens = [token for token in range(first, V) if token not in (100, 145)]
    follow = torch.tensor([token for token in range(V) if token not in tokens])
    targets = targets.where(torch.isin(targets, follow), 145)
    forbidden = forbidden_logits(tokens, V, torch.device("cpu"))
    found = token_logprobs(*leaves, targets, 0.7, True, True, forbidden=forbidden)
    logp = (torch.nn.functional.linear(*leaves)[:, follow] / 0.7).log_softmax(-1)
    chosen = torch.searchsorted(follow, targets)
    expected = [logp.gather(-1, chosen[:, None])[:, 0], -(logp.exp() * logp).sum(-1), (2 * logp).exp().sum(-1)]
    torch.testing.assert_close(list(found), expected, rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.autograd.grad(out[0].sum() + 0.3 * out[1].sum(), leaves) for out in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    assert not mine[1][tokens].any() and not mine[2][tokens].any()


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradcheck(monkeypatch, temperature):
    narrow(monkeypatch)
    leaves, targets = inputs(n=4, v=70)
    assert torch.autograd.gradcheck(lambda *given: token_logprobs(*given, targets, temperature, True)[:2], leaves)
    assert torch.autograd.gradcheck(lambda *given: token_logprobs(*given, targets, temperature, False)[0], leaves)


def test_several_targets_of_each_distribution(blocks):
    """One of them twice, and all of them at once."""
    leaves, targets = inputs()
    many = torch.cat([targets[:, None], torch.arange(V).expand(N, V)], 1)
    found, entropy, _ = token_logprobs(*leaves, many, 0.7, True)
    whole = (torch.nn.functional.linear(*leaves) / 0.7).log_softmax(-1)
    torch.testing.assert_close(found, whole.gather(1, many), rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    expected = whole.gather(1, many), -(whole.exp() * whole).sum(-1)
    sums = [(out * weights).sum() + more.sum() for out, more in ((found, entropy), expected)]
    mine, theirs = (torch.autograd.grad(total, leaves) for total in sums)
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("count", "among"), [(5, V), (70, V), (V, V), (5, 66), (66, 66)])
def test_the_likeliest_tokens_are_those_of_log_softmax(blocks, count, among):
    """Also where the vocabulary ends with ids that have no token: they are not in the softmax."""
    leaves, _ = inputs()
    forbidden = None if among == V else torch.full((V - among,), FORBIDDEN, dtype=F64)
    ids, logprobs = top_logprobs(*leaves, 0.7, count, forbidden=forbidden)
    values, expected = (torch.nn.functional.linear(*leaves) / 0.7)[:, :among].log_softmax(-1).topk(count)
    assert torch.equal(ids, expected.int()) and not logprobs.requires_grad
    torch.testing.assert_close(logprobs, values.detach(), rtol=1e-12, atol=1e-12)


def test_entropy_is_zero_where_it_is_not_asked_for():
    leaves, targets = inputs()
    logprobs, entropy, _ = token_logprobs(*leaves, targets, 1.0, False)
    assert not entropy.any()
    torch.testing.assert_close(logprobs, plainly(*leaves, targets, 1.0)[0], rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad((logprobs + entropy).sum(), leaves[0])
    (expected,) = torch.autograd.grad(plainly(*leaves, targets, 1.0)[0].sum(), leaves[0])
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_sum_of_squares_is_that_of_the_softmax_and_has_no_gradient(blocks, with_entropy):
    leaves, targets = inputs()
    hidden, weight, bias = leaves
    logprobs, _, squares = token_logprobs(*leaves, targets, 0.7, with_entropy, with_squares=True)
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / 0.7
    torch.testing.assert_close(squares, logits.softmax(-1).square().sum(-1), rtol=1e-12, atol=1e-12)
    assert logprobs.requires_grad and not squares.requires_grad


def test_no_token_gives_zero_gradients():
    leaves, targets = inputs(n=0)
    logprobs, entropy, _ = token_logprobs(*leaves, targets, 1.0, True)
    assert logprobs.shape == entropy.shape == (0,)
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), leaves)
    assert [gradient.shape for gradient in gradients] == [(0, D), (V, D), (V,)]
    assert not any(gradient.any() for gradient in gradients)


def test_logits_of_a_thousand_do_not_overflow():
    hidden = torch.tensor([[1000.0], [-1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    logprobs, entropy, _ = token_logprobs(hidden, weight, None, torch.tensor([0, 0]), 1.0, True)
    assert logprobs.tolist() == [0.0, -1000.0]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.tolist() == [[0.0], [1.0]]
    assert weight.grad.isfinite().all()


def test_blocks_whose_logits_are_thousands_apart(blocks):
    weight = torch.cat([torch.ones(64, 1), torch.zeros(64, 1), -torch.ones(22, 1)])
    hidden, targets = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([70, 0])
    found = token_logprobs(hidden, weight, None, targets, 1.0, True, True)
    expected = plainly(hidden.double(), weight.double(), None, targets, 1.0)
    torch.testing.assert_close(found, (*expected, torch.tensor([1 / 64, 1 / 22])), rtol=1e-6, atol=0, check_dtype=False)


def test_bfloat16_is_computed_in_float32():
    leaves, targets = inputs(dtype=torch.bfloat16)
    found = token_logprobs(*leaves, targets, 0.8, True)[:2]
    expected = plainly(*[leaf.float() for leaf in leaves], targets, 0.8)
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found[0].sum(), leaves)
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])  # half of 2^-8: rounding
def test_gradients_are_as_close_to_float64_as_their_dtype_allows(blocks, dtype, error):
    leaves, targets = inputs(dtype=dtype)
    weights = torch.linspace(-1, 1, N)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = torch.autograd.grad((token_logprobs(*leaves, targets, 0.8, False)[0] * weights).sum(), leaves)
    expected = torch.autograd.grad((plainly(*exact, targets, 0.8)[0] * weights).sum(), exact)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= error * theirs.norm()


@pytest.mark.parametrize("hidden_trains, head_trains", [(True, True), (True, False), (False, True)])
def test_what_is_frozen_gets_no_gradient_and_costs_no_product(blocks, hidden_trains, head_trains):
    (hidden, weight, bias), targets = inputs()
    for leaf, trains in ((hidden, hidden_trains), (weight, head_trains), (bias, head_trains)):
        leaf.requires_grad_(trains)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf.requires_grad]
    expected = torch.autograd.grad(sum(out.sum() for out in plainly(hidden, weight, bias, targets, 0.7)), leaves)
    product = 2 * N * V * D
    with FlopCounterMode(display=False) as forward:
        logprobs, entropy, _ = token_logprobs(hidden, weight, bias, targets, 0.7, True)
    with FlopCounterMode(display=False) as backward:
        (logprobs + entropy).sum().backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected), rtol=1e-11, atol=1e-11)
    assert (hidden.grad is None, weight.grad is None) == (not hidden_trains, not head_trains)
    assert forward.get_total_flops() == product
    assert backward.get_total_flops() == (1 + hidden_trains + head_trains) * product, "the logits are made again"


@pytest.mark.parametrize("blocks", WAYS, indirect=True)
def test_tied_weights_get_the_gradient_of_both_uses(blocks):
    (_, weight, bias), targets = inputs()
    tokens = torch.arange(N) % 7
    (found,) = torch.autograd.grad(token_logprobs(weight[tokens], weight, bias, targets, 0.9, False)[0].sum(), weight)
    (expected,) = torch.autograd.grad(plainly(weight[tokens], weight, bias, targets, 0.9)[0].sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.nbytes = max([self.nbytes, *made])
        return result


def saved(forward):
    """The storages that a forward keeps for its backward, in bytes, and what the forward returns."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        result = forward()
    return max(kept, default=0), result


@pytest.mark.parametrize("vocabulary", [64, 100, 5000])
def test_the_logits_are_never_held_whole(monkeypatch, vocabulary):
    narrow(monkeypatch)
    n, cap = 600, 4 * 600 * 64
    hidden, weight = torch.randn(n, D, requires_grad=True), torch.randn(vocabulary, D, requires_grad=True)
    targets = torch.randint(vocabulary, (n,))
    with Largest() as mine:
        kept, (logprobs, entropy, _) = saved(lambda: token_logprobs(hidden, weight, None, targets, 0.9, True, True))
        (logprobs + entropy).sum().backward()
        ids, _ = top_logprobs(hidden, weight, None, 0.9, 10)
        token_logprobs(hidden, weight, None, ids.long(), 0.9, False)[0].sum().backward()
    assert mine.nbytes == cap >= 4 * vocabulary * D
    assert kept <= max(4 * vocabulary * D, 8 * n * D)
    with Largest() as theirs:
        plainly(hidden, weight, None, targets, 0.9)
    assert theirs.nbytes == 4 * n * vocabulary, "the measure sees what is held whole"


@pytest.mark.parametrize("tokens, size", [(1, 896), (60, 256), (8192, 896), (100_000, 64)])
def test_a_block_is_within_its_cap_and_its_rows_begin_on_cache_lines(tokens, size):
    hidden, options = torch.empty(tokens, size, device="meta"), logits.LogitOptions(1.0)
    blocks = logits.LogitBlocks(hidden, torch.empty(10**6, size), None, options)
    most = max(logits.BLOCK_ELEMENTS["cpu"], logits.NARROWEST * max(tokens, size))
    assert blocks.width * max(tokens, size) <= most
    assert blocks.width >= logits.NARROWEST
    assert blocks.width % 128 == 64


def test_a_bfloat16_head_is_never_copied_whole(monkeypatch):
    narrow(monkeypatch)
    hidden, weight, _ = (torch.randn(*s).bfloat16().requires_grad_() for s in ((8, 32), (1000, 32), (1,)))
    with Largest() as mine:
        logprobs, entropy, _ = token_logprobs(hidden, weight, None, torch.arange(8), 1.0, True)
        (logprobs + entropy).sum().backward()
    assert mine.nbytes == weight.nbytes, "the gradient"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_on_a_gpu_are_multiplied_as_they_are(monkeypatch, dtype, temperature):
    """No copy of the head is made for the forward. The backward rounds to TF32, and then the setting is as before."""
    narrow(monkeypatch)
    before = torch.get_float32_matmul_precision()
    leaves, targets = inputs(bias=True, dtype=dtype)
    shape = LogitShape(1.5, 20.0)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logp = (shape.apply(torch.nn.functional.linear(*exact)) / temperature).log_softmax(-1)
    expected = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    with TensorCores() as forward:
        found = token_logprobs(*leaves, targets, temperature, True, shape=shape, device_type="cuda")[:2]
        ids, likeliest = top_logprobs(*leaves, temperature, 4, shape, device_type="cuda")
    assert forward.sixteen == [(dtype, dtype, torch.float32)] * 2 * 3 and not forward.thirty_two
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(likeliest, logp.gather(1, ids.long()), rtol=1e-5, atol=1e-5, check_dtype=False)
    with TensorCores() as backward:
        mine = torch.autograd.grad(found[0].sum() + 0.3 * found[1].sum(), leaves)
    assert backward.sixteen == [(dtype, dtype, torch.float32)] * 3
    assert backward.thirty_two == ["high"] * 2 * 3, "the gradients of the states and of the head"
    assert torch.get_float32_matmul_precision() == before
    theirs = torch.autograd.grad(expected[0].sum() + 0.3 * expected[1].sum(), exact)
    torch.testing.assert_close(mine, theirs, rtol=0.01, atol=0.01, check_dtype=False)


def test_float32_on_a_gpu_is_computed_as_on_a_cpu():
    leaves, targets = inputs(dtype=torch.float32)
    made = []
    for device_type in ("cpu", "cuda"):
        with TensorCores() as products:
            found = token_logprobs(*leaves, targets, 0.6, True, device_type=device_type)[:2]
            made.append([*found, *torch.autograd.grad(found[0].sum() + found[1].sum(), leaves)])
        assert not products.sixteen and set(products.thirty_two) == {torch.get_float32_matmul_precision()}
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_a_gpu_has_fewer_and_wider_blocks():
    """32,768 tokens and the vocabulary of Qwen2.5: each product reads all hidden states."""
    hidden, weight = torch.empty(32768, 1536, device="meta"), torch.empty(151936, 1536, device="meta")
    options = {kind: logits.LogitOptions(1.0, device_type=kind) for kind in ("cpu", "cuda")}
    count = {kind: -(-151936 // logits.LogitBlocks(hidden, weight, None, options[kind]).width) for kind in options}
    assert count == {"cpu": 72, "cuda": 38}


def results(n, v, options, **more):
    """Outputs and gradients of some inputs."""
    leaves, targets = inputs(n=n, v=v, dtype=options["dtype"], seed=n)
    forbidden = torch.zeros(v, dtype=options["dtype"]).index_fill_(0, torch.tensor([3]), -1e9)
    targets = targets.where(targets != 3, 5)[:, None].expand(n, options["count"]).roll(1, 1)
    more |= {"shape": options["shape"], "forbidden": forbidden if options["forbids"] else None}
    found = token_logprobs(*leaves, targets, options["temperature"], options["entropy"], True, **more)
    weights = torch.linspace(-1, 1, found[0].numel(), dtype=options["dtype"]).view(found[0].shape)
    total = (found[0] * weights).sum() + (0.3 * found[1].sum() if options["entropy"] else 0)
    return [*found, *torch.autograd.grad(total, leaves)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": F64, "entropy": True, "count": 1, "shape": LogitShape(3.0, 2.0), "forbids": True},
        {"dtype": torch.float32, "entropy": False, "count": 3, "shape": logits.PLAIN, "forbids": False},
    ],
)
def test_compiled_blocks_are_the_same_and_no_size_is_compiled_again(options, monkeypatch):
    """Whole blocks have a graph and the last, narrower one another: two for the forward, two for the backward."""
    narrow(monkeypatch)
    forget()
    exact = 1e-12 if options["dtype"] == F64 else 1e-6
    for number, (n, v) in enumerate([(7, 150), (64, 150), (33, 128), (65, 1000), (2, 70), (9, 64), (1, 70), (0, 70)]):
        options["temperature"] = 0.5 + 0.1 * number
        for found, expected in zip(*(results(n, v, options, compiled=c) for c in (True, False)), strict=True):
            assert found.dtype == expected.dtype == options["dtype"]
            assert ((found - expected).abs() <= exact * expected.abs().max()).all() if len(found) else True
        assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]
    forget()
