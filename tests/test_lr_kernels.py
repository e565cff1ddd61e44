"""Triton kernels against plain PyTorch, in Triton's interpreter: no GPU is needed.

Every case: random shapes, permuted slots, pools whose unused slots hold NaN, outputs that are
poisoned before the launch. The oracle works in float64 on what each request reads.

Tolerances are for outputs of unit size: 1e-4 in float32, 4e-3 in float16, 3e-2 in bfloat16,
which is a few units in the last place of values near 1.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from precache_sglang.kernels.lr_decode import lr_decode, scratch
from precache_sglang.kernels.lr_extend import lr_extend
from precache_sglang.kernels.lr_rows import AttentionInputs
from precache_sglang.kernels.lr_write import lr_write

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
def make_case(seed: int, decode: bool) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """``q``, inputs and ``q_indptr`` of a random batch."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    head_dim = rng.choice([64, 64, 96, 128, 128, 256])
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4, 7])
    num_adapters = rng.choice([1, 2, 3])
    ranks = [rng.choice([4, 6, 8, 16, 24, 32, 64]) for _ in range(num_adapters)]
    width = max(ranks)
    has_keys, has_values = rng.choice([(False, True), (True, True), (True, False), (False, False)])
    edges = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130]
    num_requests = rng.choice([1, 2, 4])
    new = [1 if decode else rng.choice(edges) for _ in range(num_requests)]
    prefix = [rng.choice([0, 0, 1, *edges]) for _ in range(num_requests)]
    if decode and rng.random() < 0.3:
        new[-1] = prefix[-1] = 0  # padding of a captured graph
    lengths = [a + b for a, b in zip(new, prefix, strict=True)]
    context = max(lengths) + 3

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    def pool(num_slots: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A pool in which only some slots, in random order, hold numbers."""
        size = 2 * num_slots + 5
        slots = torch.randperm(size, generator=generator)[:num_slots]
        values = torch.full((size, *shape), math.nan, dtype=dtype)
        values[slots] = normal(num_slots, *shape)
        return values, slots.to(torch.int32)

    total = sum(lengths)
    k, slots = pool(total, kv_heads, head_dim)
    v = torch.full_like(k, math.nan)
    v[slots.long()] = normal(total, kv_heads, head_dim)
    rows_v, lr_slots = pool(total, width)
    rows_k = torch.full_like(rows_v, math.nan)
    rows_k[lr_slots.long()] = normal(total, width)
    rows = torch.randperm(num_requests + 4, generator=generator)[:num_requests]
    # What a table holds beyond a request's tokens is left over from others.
    req_to_token = torch.full((num_requests + 4, context), 10**6, dtype=torch.int32)
    req_to_lr = req_to_token.clone()
    at = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        req_to_token[row, :length] = slots[at : at + length]
        req_to_lr[row, :length] = lr_slots[at : at + length]
        at += length
    adapters = [rng.randrange(-1, num_adapters) for _ in range(num_requests)]
    for row, length, adapter in zip(rows.tolist(), lengths, adapters, strict=True):
        if adapter < 0:
            req_to_lr[row] = 10**6  # never read
        else:  # columns beyond the rank are not the adapter's
            mine = req_to_lr[row, :length].long()
            rows_v[mine, ranks[adapter] :] = math.nan
            rows_k[mine, ranks[adapter] :] = math.nan
    angles = torch.rand(context, head_dim // 2, generator=generator) * 6
    inputs = AttentionInputs(
        k=k,
        v=v,
        rows_k=rows_k if has_keys else None,
        rows_v=rows_v if has_values else None,
        b_k=normal(num_adapters, width, kv_heads * head_dim, scale=0.2) if has_keys else None,
        b_v=normal(num_adapters, width, kv_heads * head_dim, scale=0.2) if has_values else None,
        ranks=torch.tensor(ranks, dtype=torch.int32),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1),
        req_to_token=req_to_token,
        req_to_lr=req_to_lr,
        rows=rows,
        seq_lens=torch.tensor(lengths),
        adapters=torch.tensor(adapters, dtype=torch.int32),
        scale=head_dim**-0.5,
        logit_cap=rng.choice([0.0, 0.0, 5.0]),
        window=rng.choice([-1, -1, 0, 20]),
        is_neox_style=rng.random() < 0.7,
    )
    q_indptr = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    num_queries = num_requests if decode else int(q_indptr[-1])
    whole = normal(num_queries, kv_heads * group, head_dim + 8)
    return whole[..., :head_dim], inputs, q_indptr  # not contiguous between heads


def oracle(q: torch.Tensor, inputs: Any, q_indptr: torch.Tensor) -> torch.Tensor:
    """The same in float64, from the definition, one request after the other."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    kv_heads, head_dim = inputs.k.shape[1:]
    for i, (row, length, adapter) in enumerate(
        zip(inputs.rows, inputs.seq_lens, inputs.adapters, strict=True)
    ):
        first, last = int(q_indptr[i]), int(q_indptr[i + 1])
        if not length:
            continue
        slots = inputs.req_to_token[row, :length].long()
        k, v = inputs.k[slots].double(), inputs.v[slots].double()
        if adapter >= 0:
            rank = int(inputs.ranks[adapter])
            mine = inputs.req_to_lr[row, :length].long()
            if inputs.rows_v is not None:
                delta = inputs.rows_v[mine, :rank].double() @ inputs.b_v[adapter, :rank].double()
                v = v + delta.view(v.shape)
            if inputs.rows_k is not None:
                delta = inputs.rows_k[mine, :rank].double() @ inputs.b_k[adapter, :rank].double()
                k = k + rotate(delta.view(k.shape), inputs.cos_sin[:length], inputs.is_neox_style)
        group = q.shape[1] // kv_heads
        queries = q[first:last].double()
        scores = torch.einsum("qhd,nhd->hqn", queries, k.repeat_interleave(group, 1))
        scores = scores * inputs.scale
        if inputs.logit_cap:
            scores = inputs.logit_cap * torch.tanh(scores / inputs.logit_cap)
        position = torch.arange(length - (last - first), length)[:, None]
        key = torch.arange(length)[None, :]
        visible = key <= position
        if inputs.window >= 0:
            visible = visible & (key >= position - inputs.window)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out[first:last] = torch.einsum("hqn,nhd->qhd", weights, v.repeat_interleave(group, 1))
    return out


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, is_neox_style: bool) -> torch.Tensor:
    cos, sin = (part[:, None, :] for part in cos_sin.double().chunk(2, dim=-1))
    if is_neox_style:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert not out.isnan().any(), "a value was not written, or a slot read that is nobody's"
    worst = (out.double() - expected).abs().max().item()
    assert worst <= TOLERANCE[out.dtype] * max(1.0, expected.abs().max().item()), worst


@pytest.mark.parametrize("seed", range(120))
def test_extend(seed: int) -> None:
    q, inputs, q_indptr = make_case(seed, decode=False)
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    longest = int(q_indptr.diff().max())
    lr_extend(q, out, inputs, q_indptr, longest)
    assert_close(out, oracle(q, inputs, q_indptr))


@pytest.mark.parametrize("seed", range(120))
def test_decode(seed: int) -> None:
    q, inputs, q_indptr = make_case(1000 + seed, decode=True)
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    num_splits = random.Random(seed).choice([1, 2, 3, 8])
    parts, part_lse = scratch(*q.shape, num_splits, "cpu")
    parts.fill_(math.nan)
    part_lse.fill_(math.nan)
    lr_decode(q, out, inputs, parts, part_lse)
    # Requests are in order: row i of q is request i, of length 0 too.
    assert_close(out, oracle(q, inputs, torch.arange(len(q) + 1)))


@pytest.mark.parametrize("seed", range(24))
def test_write(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    tokens, hidden = rng.choice([1, 5, 32, 33, 70]), rng.choice([48, 64, 200, 576])
    blocks, width = rng.choice([1, 3, 8]), rng.choice([4, 6, 8, 16, 40, 64])
    has_keys = rng.random() < 0.5
    parts = 2 if has_keys else 1
    x = (torch.randn(tokens, hidden, generator=generator) / hidden**0.5).to(dtype)
    stack = torch.randn(blocks * parts * width, hidden, generator=generator).to(dtype)
    size = 2 * tokens * blocks + 1
    slots = 1 + torch.randperm(size - 1, generator=generator)[: blocks * tokens]
    slots = slots.view(blocks, tokens)
    slots[torch.rand(blocks, tokens, generator=generator) < 0.3] = 0
    rows = [torch.full((size, width), 7.0, dtype=dtype) for _ in range(parts)]
    lr_write(x, stack, slots, rows[0], rows[1] if has_keys else None)
    product = (x.double() @ stack.double().T).view(tokens, blocks, parts, width)
    for part in range(parts):
        expected = torch.full((size, width), 7.0, dtype=torch.float64)
        for block in range(blocks):
            kept = slots[block] > 0
            expected[slots[block][kept]] = product[kept, block, part]
        assert_close(rows[part], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_v": torch.zeros(9, 80)}, "80 wide"),
        ({"cos_sin": None}, "rotated over the whole head"),
        ({"cos_sin": torch.zeros(40, 32)}, "rotated over the whole head"),
        ({"k": torch.zeros(9, 5, 64)}, "do not share 5"),
        ({"v": torch.zeros(9, 2, 64, dtype=torch.float64)}, "float64"),
        ({"rows_k": torch.zeros(8, 9).T}, "contiguous"),
    ],
)
def test_shapes_that_are_not_served_are_refused(change: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 4, 64)
    inputs = AttentionInputs(
        k=torch.zeros(9, 2, 64),
        v=torch.zeros(9, 2, 64),
        rows_k=torch.zeros(9, 8),
        rows_v=torch.zeros(9, 8),
        b_k=torch.zeros(1, 8, 128),
        b_v=torch.zeros(1, 8, 128),
        ranks=torch.tensor([8]),
        cos_sin=torch.zeros(40, 64),
        req_to_token=torch.zeros(1, 40, dtype=torch.int32),
        req_to_lr=torch.zeros(1, 40, dtype=torch.int32),
        rows=torch.zeros(1),
        seq_lens=torch.ones(1),
        adapters=torch.zeros(1),
        scale=1.0,
    )
    inputs.check(q, q)
    with pytest.raises(ValueError, match=message):
        replace(inputs, **change).check(q, q)
    with pytest.raises(ValueError, match="head size 80"):
        inputs.check(torch.zeros(1, 4, 80), torch.zeros(1, 4, 80))
