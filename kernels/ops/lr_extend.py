"""Extend attention over base KV and low-rank rows, for a ragged batch, in one launch.

Every request brings some new tokens behind a prefix of any length; both lie in the pools
(the new ones are stored before the kernel runs), so a chunk of a prefill, a whole prompt
and a single token are the same case. Rows of different adapters, of different ranks, and
rows without an adapter may be mixed.

Cost of one request with P prefix and N new tokens, per query head, with D the head size,
r the rank, T the pairs of query and key (about N P + N²/2):

    FLOPs    4 D T for base attention; 2 r T for value rows, that is r / 2D of it (3 % at
             r = 8, D = 128); key rows 4 r D for every key and query block, that is
             r / BLOCK_M of the base
    bytes    4 D (P + N) for every query block with 16-bit KV; value rows add 2 r (P + N), that
             is r / 2D of it; key rows as much again, and 4 D (P + N) for cosines and sines in
             float32, the same ones for all heads and requests, mostly from cache

Key rows are expanded in registers, anew for each query block. kernels/README.md counts what
expanding them once per chunk would save, and the memory that it would take.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .lr_rows import AttentionInputs
from .lr_tile import add_low_rank, attend_tile, half_offsets


def lr_extend(
    q: torch.Tensor,
    out: torch.Tensor,
    inputs: AttentionInputs,
    q_indptr: torch.Tensor,
    max_new_tokens: int,
) -> None:
    """Causal attention of each request's new tokens over all of its tokens; fills `out`.

    Args:
        q, out: ``[new tokens of all requests, heads, head_dim]``, fp16, bf16 or fp32; the
            last dimension contiguous.
        inputs: Pools, tables and adapters.
        q_indptr: ``[requests + 1]`` int32; request i's queries are ``q[q_indptr[i] :
            q_indptr[i + 1]]``, the last tokens of its ``seq_lens[i]``.
        max_new_tokens: At least the largest number of new tokens; known on the host.

    Raises:
        ValueError: on shapes that the kernel does not serve.
    """
    inputs.check(q, out)
    num_requests, num_heads = inputs.seq_lens.shape[0], q.shape[1]
    if not q.shape[0]:
        return
    config = extend_config(
        q.shape[2], inputs.block_r, inputs.has_rows, inputs.rows_k is not None, q.dtype
    )
    grid = (triton.cdiv(max_new_tokens, config["BLOCK_M"]), num_heads, num_requests)
    _extend[grid](
        q,
        out,
        q_indptr,
        *inputs.pointers(),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *inputs.strides(),
        **inputs.constants(num_heads),
        **config,
    )


def extend_config(
    head_dim: int, block_r: int, has_rows: bool, has_keys: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Tile sizes and launch settings; chosen so that nothing spills at head sizes 64 and 128."""
    wide = head_dim > 128 or dtype == torch.float32
    block_m = 64 if wide or (has_rows and block_r > 32) else 128
    if has_keys and block_r > 32 and head_dim > 64:
        block_m = 32
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 32 if wide or has_rows else 64,
        "num_warps": 8 if has_rows or head_dim > 64 else 4,
        "num_stages": 2,
    }


@triton.jit
def _extend(
    Q,
    Out,
    QIndptr,
    K,
    V,
    LK,
    LV,
    BK,
    BV,
    CosSin,
    ReqToToken,
    ReqToLr,
    Rows,
    SeqLens,
    Adapters,
    Ranks,
    scale,
    logit_cap,
    window,
    stride_q_token,
    stride_q_head,
    stride_o_token,
    stride_o_head,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_lk_slot,
    stride_lv_slot,
    stride_b_adapter,
    stride_b_rank,
    stride_cos,
    stride_req,
    stride_lr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NEOX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_start = tl.load(QIndptr + request)
    num_new = tl.load(QIndptr + request + 1) - q_start
    if block * BLOCK_M >= num_new:
        return
    seq_len = tl.load(SeqLens + request).to(tl.int32)
    row = tl.load(Rows + request).to(tl.int64)
    adapter = tl.load(Adapters + request)
    kv_head = head // GROUP
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first, second, in_half = half_offsets(HALF, BLOCK_HALF, NEOX)
    q_at = Q + (q_start + m)[:, None].to(tl.int64) * stride_q_token + head * stride_q_head
    q_mask = (m < num_new)[:, None] & in_half[None, :]
    q1 = tl.load(q_at + first[None, :], mask=q_mask, other=0.0)
    q2 = tl.load(q_at + second[None, :], mask=q_mask, other=0.0)

    position = seq_len - num_new + m
    first_visible = position - window
    end = tl.minimum(seq_len, seq_len - num_new + (block + 1) * BLOCK_M)
    start = 0
    if WINDOW:
        start = tl.maximum(0, seq_len - num_new + block * BLOCK_M - window)
        start = start // BLOCK_N * BLOCK_N
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_rows = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    if (HAS_KEYS or HAS_VALUES) and adapter >= 0:
        rank = tl.load(Ranks + adapter)
        for n in range(start, end, BLOCK_N):
            max_score, total, acc, acc_rows = attend_tile(
                q1, q2, max_score, total, acc, acc_rows,
                n, end, first_visible, position, row, kv_head, rank,
                BK + adapter * stride_b_adapter,
                K, V, LK, LV, CosSin, ReqToToken, ReqToLr, scale, logit_cap,
                stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
                stride_lk_slot, stride_lv_slot, stride_b_rank, stride_cos, stride_req, stride_lr,
                HEAD_DIM, HALF, BLOCK_D, BLOCK_HALF, BLOCK_R, BLOCK_N,
                HAS_KEYS, HAS_VALUES, CAP, WINDOW, NEOX,
            )  # fmt: skip
    else:
        for n in range(start, end, BLOCK_N):
            max_score, total, acc, acc_rows = attend_tile(
                q1, q2, max_score, total, acc, acc_rows,
                n, end, first_visible, position, row, kv_head, 0, BK,
                K, V, LK, LV, CosSin, ReqToToken, ReqToLr, scale, logit_cap,
                stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
                stride_lk_slot, stride_lv_slot, stride_b_rank, stride_cos, stride_req, stride_lr,
                HEAD_DIM, HALF, BLOCK_D, BLOCK_HALF, BLOCK_R, BLOCK_N,
                False, False, CAP, WINDOW, NEOX,
            )  # fmt: skip

    # Beyond the last query, a window may hold no key at all.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    if HAS_VALUES and adapter >= 0:
        acc = add_low_rank(
            acc, acc_rows / total[:, None], BV + adapter * stride_b_adapter, kv_head,
            tl.load(Ranks + adapter), stride_b_rank, HEAD_DIM, BLOCK_D, BLOCK_R,
        )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    o_at = Out + (q_start + m)[:, None].to(tl.int64) * stride_o_token + head * stride_o_head
    tl.store(
        o_at + d[None, :],
        acc.to(Out.dtype.element_ty),
        mask=(m < num_new)[:, None] & (d < HEAD_DIM)[None, :],
    )
