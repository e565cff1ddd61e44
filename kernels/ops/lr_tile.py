"""What the attention kernels have in common: one tile of base KV and low-rank rows.

A tile is `BLOCK_N` tokens of one KV head. Their slots come from SGLang's ``req_to_token``
and our ``req_to_lr``, one entry per token whatever the page size, so nothing here depends
on it. With ``s`` the LoRA scale, already inside the B matrices:

    scores   q (k + RoPE(l_k B_k))ᵀ         keys are expanded in registers, one tile at a time
    output   softmax(scores) v  +  (softmax(scores) l_v) B_v

The second product of the output stays `rank` wide inside the loop: B_v is applied once, to
the sum. For the keys that is not possible, since every position has a rotation of its own.

Head vectors are split in two halves, the two that RoPE rotates against each other; the
scores are the sum of both halves' products.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter keeps bf16 as 16-bit integers and multiplies those.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """``a b`` in float32, without rounding float32 inputs."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def half_offsets(HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, NEOX: tl.constexpr):
    """Columns of the first and the second half of a head, and which of them exist."""
    i = tl.arange(0, BLOCK_HALF)
    if NEOX:
        first = i
        second = i + HALF
    else:
        first = 2 * i
        second = 2 * i + 1
    return first, second, i < HALF


@triton.jit
def attend_tile(
    q1,
    q2,
    max_score,
    total,
    acc,
    acc_rows,
    start,
    end,
    first_visible,
    last_visible,
    row,
    kv_head,
    rank,
    b_k,
    K,
    V,
    LK,
    LV,
    CosSin,
    ReqToToken,
    ReqToLr,
    scale,
    logit_cap,
    stride_k_slot,
    stride_k_head,
    stride_v_slot,
    stride_v_head,
    stride_lk_slot,
    stride_lv_slot,
    stride_b_rank,
    stride_cos,
    stride_req,
    stride_lr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LR_KEYS: tl.constexpr,
    LR_VALUES: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NEOX: tl.constexpr,
):
    """Take tokens ``[start, start + BLOCK_N)`` below `end` into the running softmax.

    Args:
        q1, q2: ``[M, BLOCK_HALF]`` halves of the queries.
        max_score, total: ``[M]`` float32, in units of log2.
        acc: ``[M, BLOCK_D]`` float32; acc_rows: ``[M, BLOCK_R]`` float32.
        first_visible, last_visible: ``[M]``, the range of positions that each query sees.
    """
    first, second, in_half = half_offsets(HALF, BLOCK_HALF, NEOX)
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    n = start + tl.arange(0, BLOCK_N)
    in_range = n < end
    # Slots times strides pass 2^31 in pools of some GB.
    slot = tl.load(ReqToToken + row * stride_req + n, mask=in_range, other=0).to(tl.int64)
    if LR_KEYS or LR_VALUES:
        lr_slot = tl.load(ReqToLr + row * stride_lr + n, mask=in_range, other=0).to(tl.int64)

    k_at = K + slot[:, None] * stride_k_slot + kv_head * stride_k_head
    k_mask = in_range[:, None] & in_half[None, :]
    k1 = tl.load(k_at + first[None, :], mask=k_mask, other=0.0)
    k2 = tl.load(k_at + second[None, :], mask=k_mask, other=0.0)
    if LR_KEYS:
        rows = tl.load(
            LK + lr_slot[:, None] * stride_lk_slot + r[None, :],
            mask=in_range[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        b_at = b_k + r[:, None] * stride_b_rank + kv_head * HEAD_DIM
        b_mask = (r < rank)[:, None] & in_half[None, :]
        b1 = tl.load(b_at + first[None, :], mask=b_mask, other=0.0)
        b2 = tl.load(b_at + second[None, :], mask=b_mask, other=0.0)
        x1 = dot(rows, b1)
        x2 = dot(rows, b2)
        i = tl.arange(0, BLOCK_HALF)
        angle = CosSin + n[:, None] * stride_cos + i[None, :]
        cos = tl.load(angle, mask=k_mask, other=0.0).to(tl.float32)
        sin = tl.load(angle + HALF, mask=k_mask, other=0.0).to(tl.float32)
        k1 = (k1.to(tl.float32) + x1 * cos - x2 * sin).to(k1.dtype)
        k2 = (k2.to(tl.float32) + x2 * cos + x1 * sin).to(k2.dtype)
    scores = dot(q1, tl.trans(k1))
    scores += dot(q2, tl.trans(k2))
    scores *= scale
    if CAP:
        # tanh from exp: no library call, and the same in the interpreter.
        scores = logit_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / logit_cap)))
    scores *= 1.4426950408889634  # log2(e)
    visible = in_range[None, :] & (n[None, :] <= last_visible[:, None])
    if WINDOW:
        visible = visible & (n[None, :] >= first_visible[:, None])
    scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(max_score, tl.max(scores, 1))
    # A query that has seen nothing yet: any finite number will do.
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    old = tl.exp2(max_score - reference)
    p = tl.exp2(scores - reference[:, None])
    total = total * old + tl.sum(p, 1)
    v = tl.load(
        V + slot[:, None] * stride_v_slot + kv_head * stride_v_head + d[None, :],
        mask=in_range[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    p = p.to(v.dtype)
    acc = acc * old[:, None] + dot(p, v)
    if LR_VALUES:
        rows = tl.load(
            LV + lr_slot[:, None] * stride_lv_slot + r[None, :],
            mask=in_range[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        acc_rows = acc_rows * old[:, None] + dot(p, rows)
    return new_max, total, acc, acc_rows


@triton.jit
def add_low_rank(
    acc,
    acc_rows,
    b_v,
    kv_head,
    rank,
    stride_b_rank,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """``acc + acc_rows B_v``: ``[M, BLOCK_D]`` float32, both divided by the softmax's sum.

    16-bit B are multiplied by tensor cores, with `acc_rows` as the sum of two 16-bit numbers: a
    product of float32 numbers would take registers for all of B, and spill.
    """
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
    b = tl.load(
        b_v + r[:, None] * stride_b_rank + kv_head * HEAD_DIM + d[None, :],
        mask=(r < rank)[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    high = acc_rows.to(b.dtype)
    acc += dot(high, b)
    if b.dtype != tl.float32:
        acc += dot((acc_rows - high.to(tl.float32)).to(b.dtype), b)
    return acc
