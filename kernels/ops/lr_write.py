"""Compute the LR rows of a whole team and store them at their slots, in one launch.

``rows = x A_allᵀ`` for the tokens of a forward, each adapter's part scattered to the slot
that it was given. The product never lies in memory in between, nothing is allocated, and
nothing is read back to the host.

Cost for T tokens, hidden size h, a adapters of width w (times two with key rows):

    FLOPs    2 T h a w
    bytes    2 T h for x, read once per block of 64 columns of A; 2 h a w for A, read once per
             block of tokens; 2 T a w written, plus 8 T a for the slots
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .lr_tile import dot


def lr_write(
    x: torch.Tensor,
    stack: torch.Tensor,
    slots: torch.Tensor,
    rows_v: torch.Tensor,
    rows_k: torch.Tensor | None,
) -> None:
    """Fill `rows_v` (and `rows_k`) at `slots`.

    Args:
        x: ``[tokens, hidden]``, the input of the layer's attention projections.
        stack: ``[blocks * parts * width, hidden]``: per adapter A_v, then, with key rows,
            A_k; rows beyond an adapter's rank are zero.
        slots: ``[blocks, tokens]`` int64; 0 where nothing is to be stored.
        rows_v, rows_k: ``[lr slots, width]``, contiguous.

    Raises:
        ValueError: on shapes that do not fit together.
    """
    num_blocks, num_tokens = slots.shape
    width = rows_v.shape[1]
    parts = 1 if rows_k is None else 2
    if x.shape[0] != num_tokens or stack.shape != (num_blocks * parts * width, x.shape[1]):
        raise ValueError(
            f"x is {tuple(x.shape)}, stack {tuple(stack.shape)}, slots {tuple(slots.shape)}, "
            f"rows {width} wide in {parts} parts: they do not fit together"
        )
    if not num_tokens or not num_blocks:
        return
    block_c = max(16, triton.next_power_of_2(width))
    config = write_config(x.dtype)
    grid = (triton.cdiv(num_tokens, config["BLOCK_T"]), num_blocks * parts)
    _write[grid](
        x,
        stack,
        slots,
        rows_v,
        rows_v if rows_k is None else rows_k,
        num_tokens,
        x.shape[1],
        x.stride(0),
        stack.stride(0),
        slots.stride(0),
        WIDTH=width,
        PARTS=parts,
        BLOCK_C=block_c,
        **config,
    )


def write_config(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "BLOCK_T": 32,
        "BLOCK_H": 64 if dtype == torch.float32 else 128,
        "num_warps": 8,
        "num_stages": 3,
    }


@triton.jit
def _write(
    X,
    Stack,
    Slots,
    RowsV,
    RowsK,
    num_tokens,
    hidden,
    stride_x,
    stride_stack,
    stride_slots,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    block, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    slot = tl.load(Slots + block * stride_slots + t, mask=t < num_tokens, other=0)
    kept = slot > 0
    if tl.sum(kept.to(tl.int32), 0) == 0:
        return  # tokens that this adapter has rows of already
    c = tl.arange(0, BLOCK_C)
    column = tl.program_id(1) * WIDTH + c
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, hidden, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        x = tl.load(
            X + t[:, None].to(tl.int64) * stride_x + h[None, :],
            mask=kept[:, None] & (h < hidden)[None, :],
            other=0.0,
        )
        a = tl.load(
            Stack + column[None, :] * stride_stack + h[:, None],
            mask=(c < WIDTH)[None, :] & (h < hidden)[:, None],
            other=0.0,
        )
        acc += dot(x, a)
    mask = kept[:, None] & (c < WIDTH)[None, :]
    if part == 0:
        tl.store(
            RowsV + slot[:, None] * WIDTH + c[None, :], acc.to(RowsV.dtype.element_ty), mask=mask
        )
    else:
        tl.store(
            RowsK + slot[:, None] * WIDTH + c[None, :], acc.to(RowsK.dtype.element_ty), mask=mask
        )
