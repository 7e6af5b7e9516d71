"""FlashAttention's functions in plain torch, by the signatures of the packages, in any dtype."""

import sys
from types import SimpleNamespace

import torch

from rft.actor.packing.kernels import choose, rows


def masked_products(q, k, query_ends, key_ends, scale, causal, window, softcap):
    """The products (heads, n, m) of all queries and keys, minus infinity where a query does not see a key."""
    copies = q.shape[1] // k.shape[1]
    products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(copies, 1)) * scale
    if softcap:
        products = softcap * torch.tanh(products / softcap)
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for row in range(len(query_ends) - 1):
        (start, end), (first, last) = (ends[row : row + 2].tolist() for ends in (query_ends, key_ends))
        places = torch.arange(end - start)[:, None] + (last - first) - (end - start)  # of the last key, the last query
        keys = torch.arange(last - first)
        own = torch.ones(end - start, last - first, dtype=torch.bool)
        if causal or window[1] >= 0:
            own &= keys <= places + max(window[1], 0)
        if window[0] >= 0:
            own &= keys >= places - window[0]
        seen[start:end, first:last] = own
    return products.masked_fill(~seen, -torch.inf)


def forward(q, k, v, query_ends, key_ends, scale, causal, window, softcap):
    """Results (n, heads, width) and log-sum-exp (heads, n)."""
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and q.shape[-1] % 8 == 0
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert query_ends[-1] == len(q) and key_ends[-1] == len(k)
    products = masked_products(q, k, query_ends, key_ends, scale, causal, window, softcap)
    lse = products.logsumexp(-1)
    copies = q.shape[1] // k.shape[1]
    out = torch.einsum("hqk,khd->qhd", (products - lse[..., None]).exp(), v.repeat_interleave(copies, 1))
    return out.contiguous(), lse.contiguous()


def backward(gradient, q, k, v, out, lse, query_ends, key_ends, scale, causal, window, softcap):
    """As the kernels: probabilities from the given log-sum-exp, the gradient of the softmax from the given results."""
    assert all(tensor.is_contiguous() for tensor in (gradient, q, k, v, out, lse))
    assert lse.shape == (q.shape[1], len(q)) and out.shape == gradient.shape == q.shape
    copies = q.shape[1] // k.shape[1]
    products = masked_products(q, k, query_ends, key_ends, scale, causal, window, softcap)
    probabilities = (products - lse[..., None]).exp()  # (H, n, m)
    dv = torch.einsum("hqk,qhd->khd", probabilities, gradient)
    dp = torch.einsum("qhd,khd->hqk", gradient, v.repeat_interleave(copies, 1))
    ds = probabilities * (dp - (gradient * out).sum(-1).T[..., None])
    if softcap:
        ds = ds * (1 - (products.masked_fill(products.isinf(), 0.0) / softcap).square())
    ds = ds * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(copies, 1))
    dk = torch.einsum("hqk,qhd->khd", ds, q)
    return dq, *(full.unflatten(1, (-1, copies)).sum(2) for full in (dk, dv))


def second_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    """`_flash_attn_varlen_forward` of flash-attn 2.8."""
    assert dropout_p == 0.0 and max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    window = (window_size_left, window_size_right)
    out, lse = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window, softcap)
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def second_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    """`_flash_attn_varlen_backward` of flash-attn 2.8."""
    window = (window_size_left, window_size_right)
    ends = cu_seqlens_q, cu_seqlens_k
    found = backward(dout, q, k, v, out, softmax_lse, *ends, softmax_scale, causal, window, softcap)
    for place, gradient in zip((dq, dk, dv), found, strict=True):
        place.copy_(gradient)
    return torch.empty(0)


def third_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """`_flash_attn_forward` of FlashAttention 3."""
    window = (window_size_left, window_size_right)
    out, lse = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window, softcap)
    return out, lse, torch.empty(0), torch.empty(0)


def third_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    """`_flash_attn_backward` of FlashAttention 3."""
    window = (window_size_left, window_size_right)
    ends = cu_seqlens_q, cu_seqlens_k
    found = backward(dout, q, k, v, out, softmax_lse, *ends, softmax_scale, is_causal, window, softcap)
    for place, gradient in zip((dq, dk, dv), found, strict=True):
        place.copy_(gradient)
    return torch.empty(0)


def aten_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
):  # fmt: skip
    """torch.ops.aten._flash_attention_forward."""
    assert dropout_p == 0.0 and not return_debug_mask
    window = tuple(-1 if size is None else size for size in (window_size_left, window_size_right))
    out, lse = forward(query, key, value, cum_seq_q, cum_seq_k, scale, is_causal, window, 0.0)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def aten_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """torch.ops.aten._flash_attention_backward."""
    assert rng_state.dtype == torch.uint64 and not len(unused)
    window = tuple(-1 if size is None else size for size in (window_size_left, window_size_right))
    ends = cum_seq_q, cum_seq_k
    return backward(grad_out, query, key, value, out, logsumexp, *ends, scale, is_causal, window, 0.0)


PACKAGES = {
    "flash_attn": {"_flash_attn_varlen_forward": second_forward, "_flash_attn_varlen_backward": second_backward},
    "flash_attn_interface": {"_flash_attn_forward": third_forward, "_flash_attn_backward": third_backward},
}
KERNELS = (*PACKAGES, "varlen")


def install_package(name, patch):
    """Lets a package of FlashAttention be installed, with the functions above."""
    module = "flash_attn.flash_attn_interface" if name == "flash_attn" else name
    patch.setitem(sys.modules, module, SimpleNamespace(**PACKAGES[name]))
    patch.setattr(rows, "flash_package", lambda: name)


def install(name, patch):
    """Lets packed rows attend by the kernel of a package of PACKAGES, or by varlen, on a CPU."""
    if name in PACKAGES:
        install_package(name, patch)
    patch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    patch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)
    patch.setattr(choose, "kernels_to_try", lambda *_: ["flash" if name in PACKAGES else name])
