"""The bytes of a tracker against what tensors say of themselves, and of placeholders against real tensors."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import record_function

from rft.actor.forward.logits import LogitOptions
from rft.actor.logprobs import token_logprobs
from rft.distributed import start
from rft.modes.plan.memory_tracker import MemoryTracker, device_bytes
from rft.modes.plan.skip_compute import SkipCompute
from rft.rollout.engine.kv_cache import GrowingLayer, capacity
from rft.strategy.fsdp2 import FSDP2
from tests.helpers import TERMS, make_algorithm, make_batch, small_actor, update

KIB = 1024


def kib(count):
    return torch.zeros(count * KIB // 4)


@pytest.fixture
def tracker():
    tracker = MemoryTracker(FSDP2.memory_labels)
    with tracker.watch():
        yield tracker


def test_the_peak_of_a_stage_is_its_fullest_moment(tracker):
    with tracker.stage("first"):
        kept = kib(8)
        passing = kib(16)
        del passing
        kib(4)
    with tracker.stage("second"):
        kept = kept + 1  # both are there for a moment
    assert tracker.peaks() == {"first": {"activations": 24 * KIB}, "second": {"activations": 16 * KIB}}


def test_a_stage_that_comes_again_counts_when_it_is_the_fullest(tracker):
    with tracker.stage("step"):
        kib(8)
    with tracker.stage("step"):
        kib(32)
    with tracker.stage("step"):
        kib(16)
    assert tracker.peaks() == {"step": {"activations": 32 * KIB}}


def test_a_view_takes_nothing_and_a_storage_lives_as_long_as_a_view_of_it(tracker):
    with tracker.stage("whole"):
        view = kib(8)[:1].detach().view(1, 1)
    with tracker.stage("view"):
        assert view.shape == (1, 1)
    del view
    with tracker.stage("nothing"):
        pass
    assert tracker.peaks() == {
        "whole": {"activations": 8 * KIB},
        "view": {"activations": 8 * KIB},
        "nothing": {"activations": 0},
    }


def test_a_storage_that_is_resized_counts_with_its_new_size(tracker):
    tensor = kib(8)
    tensor.untyped_storage().resize_(0)
    with tracker.stage("empty"):
        pass
    with tracker.stage("full"):
        tensor.untyped_storage().resize_(4 * KIB)
    tensor.resize_(12 * KIB // 4)
    with tracker.stage("larger"):
        pass
    found = tracker.peaks()
    assert [found[stage]["activations"] for stage in ("empty", "full", "larger")] == [0, 4 * KIB, 12 * KIB]


def test_outside_nothing_is_watched():
    tracker, resize = MemoryTracker(FSDP2.memory_labels), torch.UntypedStorage.resize_
    with tracker.watch():
        assert torch.UntypedStorage.resize_ is not resize
    tensor = kib(8)
    with tracker.watch(), tracker.stage("later"):
        assert len(tensor) == 2048
    assert tracker.peaks() == {"later": {}}
    assert torch.UntypedStorage.resize_ is resize


def test_a_term_that_is_assigned_holds_from_the_creation_on(tracker):
    with tracker.stage("before"):
        weight, other = kib(8), kib(4)
    tracker.assign("weights", [weight])
    assert tracker.peaks() == {"before": {"weights": 8 * KIB, "activations": 4 * KIB}}
    assert len(other)


def test_a_storage_counts_for_the_innermost_known_label():
    tracker = MemoryTracker({"FSDP::": "gathered"})
    with tracker.watch(), tracker.stage("labels"):
        with record_function("update"), record_function("FSDP::all_gather (layers.0)"):
            kept = [kib(1)]
            with record_function("unknown"):
                kept.append(kib(2))
            with record_function("logits"):
                kept.append(kib(4))
            kept.append(kib(8))
        kept.append(kib(16))
    assert tracker.peaks() == {"labels": {"gathered": 11 * KIB, "logits": 4 * KIB, "activations": 16 * KIB}}


class Restarting(MemTracker):
    """Torch's tracker refuses a module that is called again, unless what it knows of the module is dropped."""

    def _pre_fw_hook(self, module, inputs):
        self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)


@pytest.mark.slow
def test_the_peak_of_updates_is_the_one_that_torch_finds():
    world = start("cpu")

    def updates():
        actor = small_actor(world, cap=30)
        for _ in range(2):
            update(actor, make_batch(), make_algorithm(terms=TERMS))

    tracker, torchs = MemoryTracker(FSDP2.memory_labels), Restarting()
    with tracker.watch(), tracker.stage("all"):
        updates()
    with torchs:
        updates()
    found = torchs.get_tracker_snapshot("peak")[torch.device("cpu")]  # beside the meta device
    assert device_bytes(tracker.peaks()["all"]) == found["Total"]  # the new model was drawn at another time


def test_what_the_head_and_the_cache_allocate_goes_by_their_names(tracker):
    with tracker.stage("head"):
        hidden, weight, targets = torch.randn(8, 4), torch.randn(64, 4), torch.zeros(8, dtype=torch.int64)
        token_logprobs(hidden, weight, None, targets, LogitOptions(1.0), False)
    with tracker.stage("cache"):
        layer = GrowingLayer()
        for tokens in (40, 1):
            layer.update(torch.zeros(2, 1, tokens, 4), torch.zeros(2, 1, tokens, 4))
    found = tracker.peaks()
    assert found["head"]["logits"] > 8 * 64 * 4
    storages = 2 * (2 * 1 * capacity(41, 1) * 4) * 4
    assert storages <= found["cache"]["kv cache"] < storages + 100


def test_without_gradients_in_inference_mode_the_same_is_seen(tracker):
    def work():
        states = torch.zeros(1, 1, 64, 8)
        scaled_dot_product_attention(states, states, states, dropout_p=0.5)  # holds all weights for a while

    for name, mode in (("plain", torch.no_grad()), ("inference", torch.inference_mode())):
        with tracker.stage(name), mode:
            work()
    found = tracker.peaks()
    assert found["plain"] == found["inference"]


@pytest.mark.parametrize("rows", [{"packing": True}, pytest.param({"packing": False}, marks=pytest.mark.slow)])
def test_an_actor_without_numbers_takes_to_the_byte_what_a_real_one_takes(rows):
    """Everything but the numbers is the same: forward, backward, FSDP, clipping, the optimizer."""
    world, found = start("cpu"), []
    for mode in (nullcontext(), SkipCompute()):
        tracker = MemoryTracker(FSDP2.memory_labels)
        with mode, tracker.watch():
            with tracker.stage("load"), mode.creating() if isinstance(mode, SkipCompute) else nullcontext():
                actor = small_actor(world, cap=30, rows=rows)
            for number in range(2):
                with tracker.stage(f"update {number}"):
                    update(actor, make_batch(), make_algorithm(terms=TERMS))
            tracker.assign("weights", actor.network.state_dict().values())
            found.append(tracker.peaks())
    assert found[0] == found[1]
    first, second = (found[0][f"update {number}"] for number in range(2))
    weights = sum(parameter.numel() for parameter in actor.network.parameters()) * 4
    assert first["weights"] == second["weights"] == weights
    assert sum(second.values()) > sum(first.values()), "the optimizer's state came with the first"
