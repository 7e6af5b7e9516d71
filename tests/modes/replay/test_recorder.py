"""What is recorded of an update: the gradient of every token in closed form, and products of gradients by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from rft.algorithm.check import build_algorithm
from rft.algorithm.options import AlgorithmOptions
from rft.distributed import SINGLE_PROCESS
from rft.modes.replay.compare import compare_updates, token_changes
from rft.modes.replay.recorder import ROW, RecordedMetrics, RecordedObjective, StepRecord, StepRecorder
from tests.helpers import CLIP, METHOD, batch_of

RATIOS = torch.tensor([[1.0, 1.15, 1.05], [1.0, 0.85, 1.3]], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -2.0], dtype=torch.float64)[:, None]
KEEP = [[0, 1, 1], [0, 1, 1]]
CLIPPED = CLIP | {"clip_low": 0.2, "clip_high": 0.2}


def taken(folder, loss, rows=(0, 1), **options):
    """The record of one update on the two rows, of which each is a micro-batch; `rows` are their numbers."""
    algorithm = build_algorithm(AlgorithmOptions(**METHOD | {"loss": loss, "terms": {}} | options), "algorithm", {})
    batch = batch_of(KEEP, advantages=ADVANTAGES.expand(2, 3).clone(), old_logprobs=torch.zeros(2, 3).double())
    algorithm.compute_loss_weights(batch, lambda tensor: tensor)
    batch[ROW] = torch.tensor(rows)
    record = StepRecord(SINGLE_PROCESS, (2, 4), folder, reference=True)  # another rank has a longer row
    record.begin_update()
    objective = RecordedObjective(algorithm.policy, record)
    for row in range(2):
        objective({"logprobs": RATIOS[row : row + 1].log().requires_grad_()}, batch[row : row + 1], None)
    return record


def test_the_gradient_of_a_token_is_its_weight_times_advantage_times_ratio(tmp_path):
    """d/dlogp of -w A ratio, with w = 1 / (2 rows x 2 tokens); tokens that do not train have none."""
    [update] = taken(tmp_path, CLIPPED).updates
    expected = torch.zeros(2, 4).double()
    expected[:, 1:3] = -ADVANTAGES * RATIOS[:, 1:] / 4
    torch.testing.assert_close(update.gradient, expected, rtol=1e-12, atol=0)
    assert update.trained.tolist() == [[False, True, True, False]] * 2
    assert float(update.loss) == pytest.approx(float((-ADVANTAGES * RATIOS[:, 1:]).sum() / 4), rel=1e-12)
    torch.testing.assert_close(update.ratio[:, :3], RATIOS)


def test_a_narrower_clip_loses_exactly_the_tokens_beyond_it(tmp_path):
    """Of 1.15 with A > 0 and 0.85 with A < 0 the gradient ends; of 1.05, and of 1.3 with A < 0, it stays."""
    run, command = taken(tmp_path, CLIPPED), taken(tmp_path, CLIP | {"clip_low": 0.1, "clip_high": 0.1})
    [update] = compare_updates(run, command)
    assert (update.tokens, update.differ, update.lost, update.gained, update.turned) == (4, 2, 2, 0, 0)
    changes = token_changes(run, command)
    assert [(token.row, token.position, token.command) for token in changes] == [(1, 1, 0.0), (0, 1, 0.0)]
    assert [token.run for token in changes] == pytest.approx([2 * 0.85 / 4, -1.15 / 4])


def test_gspo_gives_every_token_of_a_row_the_same_gradient(tmp_path):
    """d/dlogp of -A s / 2 is -A s / (2 x 2 tokens), s the geometric mean of the ratios of the row."""
    [update] = taken(tmp_path, {"name": "gspo", "clip_low": 0.9, "clip_high": 9.0}).updates
    for row, advantage in enumerate(ADVANTAGES[:, 0].tolist()):
        s = math.sqrt(math.prod(RATIOS[row, 1:].tolist()))
        assert update.gradient[row, 1:3].tolist() == pytest.approx([-advantage * s / 4] * 2, rel=1e-12)


def test_a_row_that_was_drawn_twice_has_the_sum_of_both_gradients(tmp_path):
    once, twice = taken(tmp_path, CLIPPED), taken(tmp_path, CLIPPED, rows=(1, 1))
    assert not twice.updates[0].gradient[0].any()
    torch.testing.assert_close(twice.updates[0].gradient[1], once.updates[0].gradient.sum(0))


def test_the_cosine_is_that_of_the_whole_gradients(tmp_path):
    """(3, 0, 4) and (0, 0, 4 | 3): r·r = 25, r·g = 16, g·g = 25. A parameter without a gradient counts as zero."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 1, 1)]
    run, command = (StepRecord(SINGLE_PROCESS, (1, 1), tmp_path, reference) for reference in (True, False))
    for record, gradients in ((run, ([3.0, 0.0], [4.0], None)), (command, (None, [4.0], [3.0]))):
        record.begin_update()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else torch.tensor(gradient)
        record.add_gradient(torch.optim.SGD(parameters))
    assert run.updates[0].products.tolist() == [25, 25, 25]
    assert command.updates[0].products.tolist() == [25, 16, 25]
    [update] = compare_updates(run, command)
    assert update.cosine == pytest.approx(0.64)


def test_the_metrics_add_the_norm_of_every_update(tmp_path):
    record = StepRecord(SINGLE_PROCESS, (1, 1), tmp_path, reference=True)
    metrics = RecordedMetrics(record)
    for norm in (2.0, 3.0):
        record.begin_update()
        metrics.add("grad_norm", torch.tensor(norm))
        metrics.add("critic/grad_norm", 7.0)
    assert [update.grad_norm for update in record.updates] == [2, 3]
    assert metrics.reduce(lambda thing: [thing])["grad_norm"] == 2.5


def test_an_update_that_is_taken_again_has_one_record(tmp_path):
    recorder, record = StepRecorder(), StepRecord(SINGLE_PROCESS, (1, 1), tmp_path, reference=True)
    metrics, policy = RecordedMetrics(record), SimpleNamespace(key="actor")

    with recorder.recording(record):
        with pytest.raises(ArithmeticError), recorder.on_update(policy):
            raise ArithmeticError
        recorder.on_retry(SimpleNamespace(key="critic"))
        recorder.on_retry(policy)
        with recorder.on_update(policy):
            metrics.add("grad_norm", 2.0)
    recorder.on_retry(policy)
    assert [update.grad_norm for update in record.updates] == [2.0]
