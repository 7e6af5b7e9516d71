"""The device memory of reward models: counted bytes of all living weights, equal scores, and nothing left after a turn."""

import copy
import gc
from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from rft.reward.models.offload import DeviceModel, free, tensors
from tests.reward.models import test_judge, test_process_model, test_scalar
from tests.reward.models.test_scalar import RESPONSES, ROWS, SIZES, save
from tests.reward.reward_of import reward_of

CPU = torch.device("cpu")


def living() -> dict[int, int]:
    """Bytes of each storage that a parameter or buffer of any module uses, or a parameter that no module has."""
    found = {}
    for one in gc.get_objects():
        if isinstance(one, nn.Parameter):
            own = [one]
        elif isinstance(one, nn.Module):
            own = list(tensors(one))
        else:
            continue
        storages = [tensor.untyped_storage() for tensor in own if tensor.device == CPU]
        found |= {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
    return found


class Count:
    """Counts living weights at every forward of a model, beside those that were there before."""

    def __enter__(self):
        gc.collect()
        self._before = set(living())
        self.seen: dict[str, list[int]] = {}
        self._hook = register_module_forward_pre_hook(self._look)
        return self

    def _look(self, module, _):
        if isinstance(module, PreTrainedModel) and module.base_model is not module:
            self.seen.setdefault(f"{type(module).__name__} {module.config.hidden_size}", []).append(self.now())

    def now(self) -> int:
        return sum(size for place, size in living().items() if place not in self._before)

    def peak(self) -> int:
        return max(max(sizes) for sizes in self.seen.values())

    def __exit__(self, *error):
        self._hook.remove()


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
    reward = reward_of({name: node | changes for name, (node, _) in folders.items()}, "scalar", offload=offload)
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


def test_weights_wait_in_host_memory(folders):
    expected, reward = reward_with(folders, None).score(RESPONSES, ROWS), reward_with(folders, "cpu")
    for _ in range(2):
        found = reward.score(RESPONSES, ROWS)
        assert all(torch.equal(found.terms[name], expected.terms[name]) for name in folders)
