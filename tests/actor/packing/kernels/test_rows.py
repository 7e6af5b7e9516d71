"""The calls of functions over rows, worked by hand, and what they refuse."""

from dataclasses import replace

import torch

from rft.actor.packing.kernels import rows
from rft.actor.packing.kernels.base import AttentionNeeds, AttentionRule
from rft.actor.packing.kernels.rows import VarlenKernel
from rft.actor.packing.layout import PackedSegment

CPU = torch.device("cpu")
RULE = AttentionRule(scaling=None, window=None, softcap=None, sinks=None)
# two rows of 2 tokens; a prefix of 3 tokens, before one row of 1 token and two rows of 2; a prefix of 1 before one of 2
SEGMENTS = (
    PackedSegment(2, 2),
    PackedSegment(1, 3),
    PackedSegment(1, 1, prefix=1),
    PackedSegment(2, 2, prefix=1),
    PackedSegment(1, 1),
    PackedSegment(1, 2, prefix=4),
)


def rows_calls(segments, window, device):
    found = rows.rows_calls(segments, window, 0.5, 9.0, device)
    assert all((call.scaling, call.softcap) == (0.5, 9.0) for call in found)
    return found


def shown(call):
    tensors = (call.queries, call.keys, call.query_ends, call.key_ends)
    listed = [None if tensor is None else tensor.tolist() for tensor in tensors]
    return *listed, call.longest_query, call.longest_key, call.causal, call.window


def test_rows_behind_prefixes_have_two_calls():
    own, behind = rows_calls(SEGMENTS, None, CPU)
    ends = [0, 2, 4, 7, 8, 10, 12, 13, 15]
    assert shown(own) == (None, None, ends, ends, 3, 3, True, None)
    queries = [7, 8, 9, 10, 11, 13, 14]
    assert shown(behind) == (queries, [4, 5, 6, 12], [0, 5, 7], [0, 3, 4], 5, 3, False, None)
    assert own.query_ends.dtype == own.key_ends.dtype == torch.int32


def test_with_a_window_each_row_has_its_prefix_among_its_keys():
    [call] = rows_calls(SEGMENTS, 4, CPU)
    keys = [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 4, 5, 6, 8, 9, 4, 5, 6, 10, 11, 12, 12, 13, 14]
    ends = [0, 2, 4, 7, 8, 10, 12, 13, 15], [0, 2, 4, 7, 11, 16, 21, 22, 25]
    assert shown(call) == (None, keys, *ends, 3, 5, True, 4)


def test_a_window_of_a_whole_row_is_none():
    assert rows_calls(SEGMENTS, 5, CPU)[0].window is None and len(rows_calls(SEGMENTS, 5, CPU)) == 2
    [call] = rows_calls(SEGMENTS[:1], 1, CPU)
    assert shown(call) == (None, None, [0, 2, 4], [0, 2, 4], 2, 2, True, 1)


def test_layers_share_the_calls_of_a_forward():
    assert rows_calls(SEGMENTS, None, CPU) is rows_calls(tuple(SEGMENTS), None, CPU)


def test_wide_heads_and_soft_caps_are_refused_by_name():
    needs = AttentionNeeds(softcap=False, sinks=True, windows=True, width=256, heads=4, key_heads=2)
    assert VarlenKernel().refuses(needs) is None
    assert VarlenKernel().refuses(replace(needs, width=320)) == "heads of 320 numbers: at most 256"
    assert VarlenKernel().refuses(replace(needs, softcap=True)) == "soft-capped logits"


class FirstKernel(rows.RowsKernel):
    """Returns the queries."""

    def forward(self, q, k, v, call):
        self.given = q, k, v
        return q, torch.zeros(q.shape[1], q.shape[0])

    def backward(self, *given):
        raise NotImplementedError


def test_states_are_copied_only_where_they_are_padded_or_in_another_order():
    """A model projects to (1, N, heads, D) and turns two dimensions."""
    kernel, projected = FirstKernel(), torch.randn(1, 4, 2, 16)
    states = projected.transpose(1, 2)
    kernel.attend_forward(states, states.contiguous(), states, (PackedSegment(2, 2),), RULE)
    first, second, third = kernel.given
    assert first.data_ptr() == third.data_ptr() == projected.data_ptr() != second.data_ptr()
    assert torch.equal(first, projected[0]) and torch.equal(second, projected[0]) and second.is_contiguous()
    narrow = states[..., :13]
    kernel.attend_forward(narrow, narrow, narrow, (PackedSegment(2, 2),), RULE)
    assert torch.equal(kernel.given[0], torch.nn.functional.pad(projected[0, ..., :13], (0, 3)))
    assert kernel.given[0].is_contiguous()
