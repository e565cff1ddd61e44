"""Attention over base KV plus low-rank rows in plain PyTorch.

This is the definition of the operation and the CPU path. Layouts follow SGLang's pools:
one row per token, ``[tokens, heads, head_dim]``.
"""

from __future__ import annotations

import torch


def expand_values(base: torch.Tensor, rows: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``base + rows @ b``: values as the adapter sees them.

    Args:
        base: ``[tokens, kv_heads, head_dim]`` base values.
        rows: ``[tokens, rank]`` LR rows.
        b: ``[rank, kv_heads * head_dim]``, the LoRA B times its scale.

    Returns:
        A new tensor shaped like `base`.
    """
    return torch.addmm(base.reshape(base.shape[0], -1), rows, b).view_as(base)


def expand_keys(
    base: torch.Tensor,
    rows: torch.Tensor,
    b: torch.Tensor,
    cos_sin: torch.Tensor,
    is_neox_style: bool = True,
) -> torch.Tensor:
    """``base + RoPE(rows @ b)``: base keys are stored rotated, the adapter's part is not.

    Args:
        base: ``[tokens, kv_heads, head_dim]`` base keys after RoPE.
        rows: ``[tokens, rank]`` LR rows.
        b: ``[rank, kv_heads * head_dim]``, the LoRA B times its scale.
        cos_sin: ``[tokens, rotary_dim]``, the cosines then the sines of the tokens'
            positions, as in SGLang's ``cos_sin_cache``.
        is_neox_style: Halves are rotated against each other; else neighbours.
    """
    delta = (rows @ b).view_as(base)
    cos, sin = cos_sin.to(delta.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary, rest = delta[..., : cos_sin.shape[-1]], delta[..., cos_sin.shape[-1] :]
    if is_neox_style:
        first, second = rotary.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotary[..., ::2], rotary[..., 1::2]
        rotated = torch.stack(
            (first * cos - second * sin, second * cos + first * sin), dim=-1
        ).flatten(-2)
    return base + torch.cat((rotated, rest), dim=-1)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_new: int, scale: float
) -> torch.Tensor:
    """Causal attention of the last `num_new` tokens over all of them.

    Two parts, joined by their log-sum-exps: the prefix, which every query sees whole,
    and the new tokens among themselves. No query is padded to the length of the keys,
    and the query heads of one KV head share its keys without a copy.

    Args:
        q: ``[num_new, heads, head_dim]``.
        k, v: ``[tokens, kv_heads, head_dim]``; the new tokens come last.
        num_new: Number of queries.
        scale: Softmax scale.

    Returns:
        ``[num_new, heads, head_dim]``.
    """
    num_heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    prefix = k.shape[0] - num_new
    if num_new == 1:
        # One query sees every key: a single part, and nothing to mask.
        prefix, num_own = k.shape[0], 0
    else:
        num_own = num_new
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if prefix:
        folded = q.view(num_new, kv_heads, num_heads // kv_heads, head_dim)
        folded = folded.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
        out, lse = _flash(folded, k[:prefix], v[:prefix], scale, causal=False)
        parts.append((out.reshape(num_heads, num_new, head_dim), lse.reshape(num_heads, num_new)))
    if num_own:
        out, lse = _flash(q.transpose(0, 1)[None], k[prefix:], v[prefix:], scale, causal=True)
        parts.append((out[0], lse[0]))
    if len(parts) == 1:
        return parts[0][0].transpose(0, 1)
    (out_a, lse_a), (out_b, lse_b) = parts
    weight = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)  # exp(a) / (exp(a) + exp(b))
    merged = torch.lerp(out_b.float(), out_a.float(), weight)
    return merged.to(q.dtype).transpose(0, 1)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's CPU flash attention, for its log-sum-exp.

    Args:
        q: ``[1, heads, queries, head_dim]``.
        k, v: ``[keys, kv_heads, head_dim]``.

    Returns:
        Output like `q`, and the float32 log-sum-exp ``[1, heads, queries]``.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=causal,
        scale=scale,
    )
    return out, lse


def write_rows(
    x: torch.Tensor,
    stack: torch.Tensor,
    slots: torch.Tensor,
    rows_v: torch.Tensor,
    rows_k: torch.Tensor | None,
) -> None:
    """Compute the LR rows of a whole team in one product and store them at `slots`.

    Args:
        x: ``[tokens, hidden]``, the input of the layer's attention projections.
        stack: ``[blocks * parts * width, hidden]``: per adapter A_v, then, with key rows,
            A_k; rows beyond an adapter's rank are zero.
        slots: ``[blocks, tokens]`` int64; 0 where nothing is to be kept.
        rows_v, rows_k: ``[lr slots, width]``; slot 0 takes what nobody reads.
    """
    num_blocks, num_tokens = slots.shape
    width = rows_v.shape[1]
    by_block = (x @ stack.T).view(num_tokens, num_blocks, -1, width)
    flat = slots.reshape(-1)
    for part, rows in enumerate((rows_v,) if rows_k is None else (rows_v, rows_k)):
        rows.index_copy_(0, flat, by_block[:, :, part].transpose(0, 1).reshape(-1, width))
