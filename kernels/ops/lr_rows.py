"""What the attention kernels read: pools, tables and adapters of one layer and batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

HEAD_DIMS = (64, 96, 128, 256)
MAX_RANK = 64
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class AttentionInputs:
    """One layer's pools, and who reads what of them. All tensors on one device.

    Attributes:
        k, v: ``[slots, kv_heads, head_dim]``, base KV by slot; keys after RoPE.
        rows_k, rows_v: ``[lr slots, width]``, LR rows by LR slot; None where no adapter
            adapts keys (values). Columns from an adapter's rank on are never read.
        b_k, b_v: ``[adapters, width, kv_heads * head_dim]``, LoRA B times its scale; None
            together with the rows.
        ranks: ``[adapters]`` int32.
        cos_sin: ``[positions, head_dim]``, cosines then sines, as in SGLang's
            ``cos_sin_cache``; read with key rows only.
        req_to_token, req_to_lr: ``[rows, context]`` int32, slots by position.
        rows: ``[requests]`` int, each request's row in both tables.
        seq_lens: ``[requests]`` int, tokens of each request, new ones included.
        adapters: ``[requests]`` int32, index of the adapter; -1 for none.
        scale: Of the scores before softmax.
        logit_cap: Scores are bounded to ``cap * tanh(score / cap)``; 0: they are not.
        window: A query sees that many tokens before itself; -1: all of them.
        is_neox_style: RoPE rotates halves against each other; else neighbours.
    """

    k: torch.Tensor
    v: torch.Tensor
    rows_k: torch.Tensor | None
    rows_v: torch.Tensor | None
    b_k: torch.Tensor | None
    b_v: torch.Tensor | None
    ranks: torch.Tensor
    cos_sin: torch.Tensor | None
    req_to_token: torch.Tensor
    req_to_lr: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    adapters: torch.Tensor
    scale: float
    logit_cap: float = 0.0
    window: int = -1
    is_neox_style: bool = True

    @property
    def width(self) -> int:
        rows = self.rows_v if self.rows_v is not None else self.rows_k
        return 0 if rows is None else rows.shape[1]

    @property
    def block_r(self) -> int:
        # Tensor cores multiply no less than 16 columns; what lies beyond a rank is masked.
        return max(16, triton.next_power_of_2(self.width))

    @property
    def has_rows(self) -> bool:
        return self.rows_k is not None or self.rows_v is not None

    def check(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Raises ValueError where a kernel would compute something else."""
        head_dim = q.shape[2]
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head size {head_dim} is not one of {HEAD_DIMS}")
        if q.dtype not in DTYPES or not q.dtype == out.dtype == self.k.dtype == self.v.dtype:
            raise ValueError(
                f"q is {q.dtype}, out {out.dtype}, K {self.k.dtype}, V {self.v.dtype}; all must "
                f"have one of {DTYPES}"
            )
        if q.shape != out.shape:
            raise ValueError(f"out is {tuple(out.shape)}, q is {tuple(q.shape)}")
        if q.shape[1] % self.k.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads do not share {self.k.shape[1]} KV heads")
        if self.width > MAX_RANK:
            raise ValueError(f"low-rank rows are {self.width} wide; at most {MAX_RANK} fit")
        if self.rows_k is not None and (self.cos_sin is None or self.cos_sin.shape[1] != head_dim):
            raise ValueError(
                f"key rows are rotated over the whole head: cos_sin must be [positions, {head_dim}]"
            )
        for name in ("k", "v", "rows_k", "rows_v", "b_k", "b_v", "cos_sin", "req_to_token"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.stride(-1) != 1:
                raise ValueError(f"{name}: the last dimension must be contiguous")
        if q.stride(-1) != 1 or out.stride(-1) != 1 or self.req_to_lr.stride(-1) != 1:
            raise ValueError("q, out and req_to_lr: the last dimension must be contiguous")

    def pointers(self) -> tuple[Any, ...]:
        """In the order of the kernels' arguments; a stand-in where there is nothing to read."""
        none = self.k
        return (
            self.k,
            self.v,
            *(none if t is None else t for t in (self.rows_k, self.rows_v, self.b_k, self.b_v)),
            none if self.cos_sin is None else self.cos_sin,
            self.req_to_token,
            self.req_to_lr,
            self.rows,
            self.seq_lens,
            self.adapters,
            self.ranks,
            self.scale,
            self.logit_cap,
            self.window,
        )

    def strides(self) -> tuple[int, ...]:
        b = self.b_v if self.b_v is not None else self.b_k
        return (
            self.k.stride(0),
            self.k.stride(1),
            self.v.stride(0),
            self.v.stride(1),
            0 if self.rows_k is None else self.rows_k.stride(0),
            0 if self.rows_v is None else self.rows_v.stride(0),
            0 if b is None else b.stride(0),
            0 if b is None else b.stride(1),
            0 if self.cos_sin is None else self.cos_sin.stride(0),
            self.req_to_token.stride(0),
            self.req_to_lr.stride(0),
        )

    def constants(self, num_heads: int) -> dict[str, Any]:
        head_dim = self.k.shape[2]
        return {
            "GROUP": num_heads // self.k.shape[1],
            "HEAD_DIM": head_dim,
            "HALF": head_dim // 2,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
            "BLOCK_R": self.block_r,
            "HAS_KEYS": self.rows_k is not None,
            "HAS_VALUES": self.rows_v is not None,
            "CAP": self.logit_cap > 0,
            "WINDOW": self.window >= 0,
            "NEOX": self.is_neox_style,
        }
