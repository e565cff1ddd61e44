"""Random cases for the kernels, and what they must give.

Shapes are random, slots permuted, slots in use by nobody hold NaN. The oracles work in float64
on what each request reads. Plain PyTorch, on any device.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from ops.lr_rows import AttentionInputs

# For outputs of unit size: a few units in the last place of values near 1.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PADDING = 7.0  # what slots that must not be written hold


def make_case(
    seed: int, decode: bool, device: str = "cpu", kind: int | None = None
) -> tuple[torch.Tensor, AttentionInputs, torch.Tensor]:
    """``q``, inputs and ``q_indptr`` of a random batch.

    All that a kernel is compiled for follows from `kind`, where it is given, so that few kinds
    need few compilations; lengths, slots and adapters follow from `seed`.
    """
    draw = random.Random(seed if kind is None else kind)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
    head_dim = draw.choice([64, 64, 64, 96, 128, 128, 256])
    kv_heads, group = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3, 4, 7])
    num_adapters = draw.choice([1, 2, 3])
    ranks = [draw.choice([4, 6, 8, 16, 24, 32, 64]) for _ in range(num_adapters)]
    width = max(ranks)
    has_keys, has_values = draw.choice([(False, True), (True, True), (True, False), (False, False)])
    logit_cap, window = draw.choice([0.0, 0.0, 5.0]), draw.choice([-1, -1, 0, 20])
    is_neox_style = draw.random() < 0.7
    rng = random.Random(seed + 1)
    edges = [1, 1, 2, 2, 15, 16, 17, 17, 31, 32, 33, 63, 64, 65, 130]
    num_requests = rng.choice([1, 1, 2, 2, 3])
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
        logit_cap=logit_cap,
        window=window,
        is_neox_style=is_neox_style,
    )
    q_indptr = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    num_queries = num_requests if decode else int(q_indptr[-1])
    whole = normal(num_queries, kv_heads * group, head_dim + 8)
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            setattr(inputs, field.name, value.to(device))
    # Not contiguous between heads.
    return whole.to(device)[..., :head_dim], inputs, q_indptr.to(device)


def oracle(q: torch.Tensor, inputs: AttentionInputs, q_indptr: torch.Tensor) -> torch.Tensor:
    """The same in float64, from the definition, one request after the other."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    kv_heads = inputs.k.shape[1]
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
        position = torch.arange(length - (last - first), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)[None, :]
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


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error in units of the tolerance; infinite where a value was not written."""
    if out.isnan().any():
        return math.inf
    worst = (out.double() - expected).abs().max().item() if out.numel() else 0.0
    size = max(1.0, expected.abs().max().item()) if out.numel() else 1.0
    return worst / size / TOLERANCE[out.dtype]


class WriteCase(NamedTuple):
    """Arguments of `lr_write`, and what the rows must be afterwards."""

    x: torch.Tensor
    stack: torch.Tensor
    slots: torch.Tensor
    rows: list[torch.Tensor]
    expected: list[torch.Tensor]


def make_write_case(seed: int, device: str = "cpu", kind: int | None = None) -> WriteCase:
    draw, rng = random.Random(seed if kind is None else kind), random.Random(seed + 1)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.float16, torch.bfloat16])
    tokens, hidden = rng.choice([1, 5, 32, 33, 70]), rng.choice([48, 64, 200, 576])
    blocks, width = rng.choice([1, 3, 8]), draw.choice([4, 6, 8, 16, 40, 64])
    parts = draw.choice([1, 2])
    x = (torch.randn(tokens, hidden, generator=generator) / hidden**0.5).to(dtype)
    stack = torch.randn(blocks * parts * width, hidden, generator=generator).to(dtype)
    size = 2 * tokens * blocks + 1
    slots = 1 + torch.randperm(size - 1, generator=generator)[: blocks * tokens]
    slots = slots.view(blocks, tokens)
    slots[torch.rand(blocks, tokens, generator=generator) < 0.3] = 0
    product = (x.double() @ stack.double().T).view(tokens, blocks, parts, width)
    expected = []
    for part in range(parts):
        rows = torch.full((size, width), PADDING, dtype=torch.float64)
        for block in range(blocks):
            kept = slots[block] > 0
            rows[slots[block][kept]] = product[kept, block, part]
        expected.append(rows.to(device))
    rows = [torch.full((size, width), PADDING, dtype=dtype, device=device) for _ in range(parts)]
    return WriteCase(x.to(device), stack.to(device), slots.to(device), rows, expected)
