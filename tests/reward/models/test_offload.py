"""The device memory of reward models: counted bytes of all living weights, equal scores, nothing left after a turn."""

import copy
import gc
import time
from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from rft.reward.models.offload import DeviceModel, tensors
from tests.reward.models import test_judge, test_process_model, test_scalar
from tests.reward.models.test_scalar import RESPONSES, ROWS, save
from tests.reward.reward_of import reward_of

CPU = torch.device("cpu")


def living() -> dict[int, int]:
    """Bytes of each storage that a parameter or buffer of any module uses, or a parameter that no module has."""
    found = {}
    for one in gc.get_objects():
        if type(one) is nn.Parameter:
            own = [one]
        elif issubclass(type(one), nn.Module):
            own = list(tensors(one))
        else:
            continue
        storages = [tensor.untyped_storage() for tensor in own if tensor.device == CPU]
        found |= {storage._cdata: storage.nbytes() for storage in storages if storage.nbytes()}
    return found


class Count:
    """Counts living weights at the first forwards of every turn of a model, beside those that were there before.

    Every count looks at all objects of the process, and a judge has a forward for each token.
    """

    def __enter__(self):
        gc.collect()
        gc.freeze()  # so that a count does not look at what was there before
        self._before = set(living())
        self.seen: dict[str, list[int]] = {}
        self._last: PreTrainedModel | None = None
        self._hook = register_module_forward_pre_hook(self._look)
        return self

    def _look(self, module, _):
        if isinstance(module, PreTrainedModel) and module.base_model is not module and module is not self._last:
            self._last = module
            self.seen.setdefault(f"{type(module).__name__} {module.config.hidden_size}", []).append(self.now())

    def now(self) -> int:
        return sum(size for place, size in living().items() if place not in self._before)

    def peak(self) -> int:
        return max(max(sizes) for sizes in self.seen.values())

    def __exit__(self, *error):
        self._hook.remove()
        self._last = None


def weight_of(folder, kind):
    model = kind.from_pretrained(folder)
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors(model)}.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three reward models and a judge of several sizes: the node of each, and the bytes of its weights."""
    made = {}
    for name, kind, changes, node in [
        ("scalar", AutoModelForSequenceClassification, {}, test_scalar.node),
        ("larger", AutoModelForSequenceClassification, {"hidden_size": 48}, test_scalar.node),
        ("steps", AutoModelForTokenClassification, {"num_labels": 2, "hidden_size": 24}, test_process_model.node),
        ("judge", AutoModelForCausalLM, {"hidden_size": 32, "tie_word_embeddings": True}, test_judge.node),
    ]:
        folder = tmp_path_factory.mktemp(name)
        save(folder, kind, **changes)
        made[name] = node(folder), weight_of(folder, kind)
    return made


def reward_with(folders, offload, **changes):
    every = {"micro_batch_tokens": 10**6} | changes
    reward = reward_of({name: node | every for name, (node, _) in folders.items()}, "scalar", offload=offload)
    reward.check()
    for name in folders:  # `WeightedSum.place` refuses to offload to where it computes
        reward._terms[name].caller.term.place(CPU, offload)
    return reward


def test_the_peak_is_the_largest_model_and_the_scores_are_the_same(folders):
    sizes = [size for _, size in folders.values()]
    assert len(set(sizes)) == 4
    scores, peaks = {}, {}
    for offload in (None, "disk"):
        reward = reward_with(folders, offload)
        with Count() as count:
            scores[offload] = [reward.score(RESPONSES, ROWS) for _ in range(2)]
            peaks[offload] = count.peak()
            left = count.now()
        assert len(count.seen) == 4
        assert left == (sum(sizes) if offload is None else 0)
    assert peaks == {None: sum(sizes), "disk": max(sizes)}
    for found in (scores[None][1], *scores["disk"]):
        for name, expected in scores[None][0].terms.items():
            assert torch.equal(found.terms[name], expected), name


def test_a_term_that_fails_leaves_nothing_beside_the_next_one(folders):
    reward = reward_with(folders, "disk", call={"failed": "drop_row"})
    scalar = reward._terms["scalar"].caller.term
    scalar._pad = 10**6  # no such token: the forward fails in the embedding
    with Count() as count:
        scores = reward.score(RESPONSES, ROWS)
        assert count.peak() == max(size for _, size in folders.values()) and count.now() == 0
    assert all(list(reasons) == ["scalar"] for reasons in scores.unscored)
    assert scores.terms["steps"].isfinite().all()


def test_weights_wait_in_host_memory(folders):
    expected, reward = reward_with(folders, None).score(RESPONSES, ROWS), reward_with(folders, "cpu")
    for _ in range(2):
        found = reward.score(RESPONSES, ROWS)
        for name in folders:
            assert torch.equal(found.terms[name], expected.terms[name]), name


class Layer(nn.Module):
    """Tied weights, a buffer that the forward replaces, one that it leaves, and a forward that can fail."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x):
        weight = self.one.weight  # a local of a frame of the traceback
        if x is None:
            raise KeyError(weight.shape)
        self.calls = self.calls + 1
        return self.two(self.one(x)) * self.scale + self.calls


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_every_turn_has_the_same_weights_buffers_and_ties(offload):
    original = Layer().eval().to(torch.bfloat16)
    original.scale = original.scale.double()
    model = DeviceModel(lambda: copy.deepcopy(original))
    model.place(CPU, offload)
    x, results = torch.randn(4, 3, dtype=torch.bfloat16), []
    for _ in range(3):
        with model.loaded() as layer:
            results.append(layer(x))
            assert layer.one.weight is layer.two.weight and not layer.training
            assert (layer.one.weight.dtype, layer.scale.dtype) == (torch.bfloat16, torch.float64)
    expected = original(x)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_forward_that_fails_leaves_nothing_and_the_next_turn_works(offload):
    model = DeviceModel(lambda: Layer().eval())
    model.place(CPU, offload)
    with pytest.raises(KeyError) as caught, model.loaded() as layer:
        layer(None)
    frame = caught.traceback[-1].frame.f_locals
    assert frame["weight"].nbytes == 0 and all(tensor.nbytes == 0 for tensor in tensors(frame["self"]))
    with model.loaded() as layer:
        assert layer(torch.ones(1, 3)).shape == (1, 3)


def test_threads_take_turns():
    together, most = [0], [0]

    def score(model):
        for _ in range(20):
            with model.loaded() as layer:
                together[0] += 1
                most[0] = max(most[0], together[0])
                time.sleep(0.001)
                layer(torch.ones(1, 3))
                together[0] -= 1

    threads = []
    for _ in range(3):
        model = DeviceModel(lambda: Layer().eval())
        model.place(CPU, "disk")
        threads.append(Thread(target=score, args=(model,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert most == [1]
