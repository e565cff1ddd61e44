"""Decode attention over base KV and low-rank rows: one new token per request, split KV.

The tokens of a request are divided among `num_splits` programs per KV head, each of which
serves all query heads of its KV head at once, so that keys, values and rows are read once. A
second kernel joins the parts. The number of splits is fixed by the launch, the range of each
follows from ``seq_lens`` on the device: nothing is planned on the host, and a captured graph
serves any length.

Cost per request of n tokens and KV head, with D the head size, r the rank, 16-bit KV:

    bytes    4 D n for keys and values; value rows add 2 r n, which is r / 2D of it: 3.1 % at
             r = 8, D = 128. B_v is read once per split: 2 r D. Key rows add 2 r n, and 4 D n for
             cosines and sines, the same ones for all heads and requests
    FLOPs    4 D n per query head; value rows add 2 r n, r / 2D of it; key rows 4 r D n per KV
             head

Decoding waits for memory, so the bytes say what rows cost: at n = 17,000, r = 8, D = 128, eight
KV heads, 33 splits, the rows of one adapter are 272 KB for all heads where they stay in cache
between them (2.2 MB where they do not) beside 69.6 MB, and B_v 0.5 MB: 1.1 % to 3.9 %.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .lr_rows import AttentionInputs
from .lr_tile import add_low_rank, attend_tile, half_offsets

MAX_SPLITS = 128


def lr_decode(
    q: torch.Tensor,
    out: torch.Tensor,
    inputs: AttentionInputs,
    parts: torch.Tensor,
    part_lse: torch.Tensor,
) -> None:
    """Attention of each request's last token over all of its tokens; fills `out`.

    Args:
        q, out: ``[requests, heads, head_dim]``, fp16, bf16 or fp32.
        inputs: Pools, tables and adapters. A request of length 0 (padding of a captured
            graph) gets zeros.
        parts: ``[requests, heads, splits, head_dim]`` float32, scratch; see `scratch`.
        part_lse: ``[requests, heads, splits]`` float32, scratch.

    Raises:
        ValueError: on shapes that the kernel does not serve.
    """
    inputs.check(q, out)
    num_requests, num_heads, head_dim = q.shape
    if not num_requests:
        return
    num_splits = parts.shape[2]
    if num_splits > MAX_SPLITS:
        raise ValueError(f"{num_splits} splits; at most {MAX_SPLITS} are joined")
    if parts.shape[:2] != q.shape[:2] or not (parts.is_contiguous() and part_lse.is_contiguous()):
        raise ValueError(f"parts is {tuple(parts.shape)}, q is {tuple(q.shape)}")
    constants = inputs.constants(num_heads)
    group = constants["GROUP"]
    _decode_part[(num_requests, inputs.k.shape[1], num_splits)](
        q,
        parts,
        part_lse,
        *inputs.pointers(),
        q.stride(0),
        q.stride(1),
        *inputs.strides(),
        num_splits,
        **constants,
        **decode_config(head_dim, inputs.block_r, inputs.rows_k is not None, group, q.dtype),
    )
    _join_parts[(num_requests, num_heads)](
        parts,
        part_lse,
        out,
        out.stride(0),
        out.stride(1),
        num_splits,
        HEAD_DIM=head_dim,
        BLOCK_D=constants["BLOCK_D"],
        BLOCK_SPLITS=MAX_SPLITS,
        num_warps=4,
    )


def scratch(
    num_requests: int, num_heads: int, head_dim: int, num_splits: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``parts`` and ``part_lse`` for `lr_decode`; allocate once for the largest batch."""
    shape = (num_requests, num_heads, num_splits)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
    return parts, torch.empty(shape, dtype=torch.float32, device=device)


def splits_for(num_requests: int, kv_heads: int, num_processors: int, context_len: int) -> int:
    """Programs per request and KV head that fill the device, each with enough to do."""
    wanted = triton.cdiv(2 * num_processors, max(1, num_requests * kv_heads))
    return max(1, min(wanted, triton.cdiv(context_len, 256), MAX_SPLITS))


def most_parts(max_requests: int, kv_heads: int, num_processors: int) -> int:
    """An upper bound of requests times KV heads times `splits_for`, for any batch."""
    return 2 * num_processors + max_requests * kv_heads


def decode_config(
    head_dim: int, block_r: int, has_keys: bool, group: int, dtype: torch.dtype
) -> dict[str, Any]:
    """As `extend_config`."""
    wide = head_dim > 128 or block_r > 32 or has_keys or dtype == torch.float32
    return {
        "BLOCK_M": max(16, triton.next_power_of_2(group)),
        "BLOCK_N": 32 if wide else 64,
        "num_warps": 8 if has_keys else 4,
        "num_stages": 2,
    }


# The number of splits follows the context: a kernel for each would be compiled while serving.
@triton.jit(do_not_specialize=["num_splits"])
def _decode_part(
    Q,
    Parts,
    PartLse,
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
    num_splits,
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
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(SeqLens + request).to(tl.int32)
    row = tl.load(Rows + request).to(tl.int64)
    adapter = tl.load(Adapters + request)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, seq_len - 1 - window)
    share = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), BLOCK_N) * BLOCK_N
    start = begin + split * share
    end = tl.minimum(seq_len, start + share)

    m = tl.arange(0, BLOCK_M)
    in_group = m < GROUP
    head = kv_head * GROUP + m
    first, second, in_half = half_offsets(HALF, BLOCK_HALF, NEOX)
    q_at = Q + request.to(tl.int64) * stride_q_token + head[:, None] * stride_q_head
    q_mask = in_group[:, None] & in_half[None, :]
    q1 = tl.load(q_at + first[None, :], mask=q_mask, other=0.0)
    q2 = tl.load(q_at + second[None, :], mask=q_mask, other=0.0)

    position = tl.zeros([BLOCK_M], tl.int32) + seq_len - 1
    first_visible = position - window
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

    # A split without tokens has no weight in the join: its log-sum-exp is -inf.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    acc = acc / total[:, None]
    if HAS_VALUES and adapter >= 0:
        acc = add_low_rank(
            acc, acc_rows / total[:, None], BV + adapter * stride_b_adapter, kv_head,
            tl.load(Ranks + adapter), stride_b_rank, HEAD_DIM, BLOCK_D, BLOCK_R,
        )  # fmt: skip
    lse = tl.where(is_empty, float("-inf"), max_score + tl.log2(total))
    part = (request.to(tl.int64) * GROUP * tl.num_programs(1) + head) * num_splits + split
    d = tl.arange(0, BLOCK_D)
    tl.store(
        Parts + part[:, None] * HEAD_DIM + d[None, :],
        acc,
        mask=in_group[:, None] & (d < HEAD_DIM)[None, :],
    )
    tl.store(PartLse + part, lse, mask=in_group)


@triton.jit(do_not_specialize=["num_splits"])
def _join_parts(
    Parts,
    PartLse,
    Out,
    stride_o_token,
    stride_o_head,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Weighted mean of the parts of one query head; log-sum-exps are in units of log2."""
    request, head = tl.program_id(0), tl.program_id(1)
    s = tl.arange(0, BLOCK_SPLITS)
    d = tl.arange(0, BLOCK_D)
    first = (request.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    lse = tl.load(PartLse + first + s, mask=s < num_splits, other=float("-inf"))
    largest = tl.max(lse, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(lse - largest), 0)
    joined = tl.zeros([BLOCK_D], tl.float32)
    for split in range(num_splits):
        part = first + split
        weight = tl.exp2(tl.load(PartLse + part) - largest)
        joined += weight * tl.load(Parts + part * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    joined = joined / tl.where(total == 0.0, 1.0, total)
    at = Out + request.to(tl.int64) * stride_o_token + head * stride_o_head
    tl.store(at + d, joined.to(Out.dtype.element_ty), mask=d < HEAD_DIM)
