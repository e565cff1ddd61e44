"""The attention backend for CPUs: one request after the other, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from precache_sglang.attention import PrecacheAttnBackend
from precache_sglang.kernels.reference import attend, expand_keys, expand_values, write_rows
from precache_sglang.roles import Adapter
from precache_sglang.runtime import Runtime

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class _Span:
    """One request of the batch, or one span behind them.

    Attributes:
        start, num_new: Its query rows.
        slots: Base slots of all its tokens; a range where they lie in one run.
        lr_slots: ``[tokens]`` int64 LR slots of its adapter, None if it reads none.
        adapter: None for an adapter-free pass.
    """

    start: int
    num_new: int
    slots: torch.Tensor | slice
    lr_slots: torch.Tensor | None
    adapter: Adapter | None
    num_tokens: int


class TorchAttnBackend(PrecacheAttnBackend):
    """Per-request attention in plain PyTorch; see `precache_sglang.kernels.reference`."""

    def __init__(self, runner: ModelRunner, runtime: Runtime) -> None:
        super().__init__(runner, runtime, write_rows)
        self.spans: list[_Span] = []

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        runtime = self.runtime
        lengths = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode_or_idle():
            new_lengths = [1] * len(lengths)
        else:
            new_lengths = forward_batch.extend_seq_lens.tolist()
        self.spans = []
        start = 0
        for row, num_tokens, num_new, lora_id in zip(
            forward_batch.req_pool_indices.tolist(),
            lengths,
            new_lengths,
            forward_batch.lora_ids or [None] * len(lengths),
            strict=True,
        ):
            adapter = None if lora_id is None else runtime.roles.adapters[lora_id]
            lr_slots = None
            if adapter is not None and adapter.rows_key is not None:
                lr_slots = runtime.req_to_lr[row, :num_tokens].to(torch.int64)
            slots = self.req_to_token[row, :num_tokens].to(torch.int64)
            self.spans.append(_Span(start, num_new, _as_run(slots), lr_slots, adapter, num_tokens))
            start += num_new
        for span in runtime.neutral_spans:
            slots = torch.cat((span.prefix, span.slots))
            num_new = len(span.tokens)
            self.spans.append(_Span(start, num_new, _as_run(slots), None, None, span.end))
            start += num_new

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        """Args and result are ``[tokens, heads * head_dim]``, as SGLang passes them."""
        layer_id = layer.layer_id
        if save_kv_cache:
            self.store(layer, forward_batch, k, v)
        keys = self.kv_pool.get_key_buffer(layer_id)
        values = self.kv_pool.get_value_buffer(layer_id)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.empty_like(queries)
        for span in self.spans:
            rows = slice(span.start, span.start + span.num_new)
            out[rows] = attend(
                queries[rows],
                self._keys(keys, span, layer_id),
                self._values(values, span, layer_id),
                span.num_new,
                layer.scaling,
            )
        return out.view(q.shape[0], -1)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A decode step is an extend by one token."""
        return self.forward_extend(*args, **kwargs)

    def _values(self, pool: torch.Tensor, span: _Span, layer_id: int) -> torch.Tensor:
        base = _gather(pool, span.slots)
        if span.lr_slots is None or span.adapter is None or span.adapter.v is None:
            return base
        assert self.runtime.lr_pool is not None
        rows = self.runtime.lr_pool.v[layer_id].index_select(0, span.lr_slots)
        b = span.adapter.v.b[layer_id]
        return expand_values(base, rows[:, : b.shape[0]], b)

    def _keys(self, pool: torch.Tensor, span: _Span, layer_id: int) -> torch.Tensor:
        base = _gather(pool, span.slots)
        if span.lr_slots is None or span.adapter is None or span.adapter.k is None:
            return base
        assert self.runtime.lr_pool is not None and self.runtime.lr_pool.k is not None
        rows = self.runtime.lr_pool.k[layer_id].index_select(0, span.lr_slots)
        b = span.adapter.k.b[layer_id]
        rotary = self.rotary[layer_id]
        return expand_keys(
            base,
            rows[:, : b.shape[0]],
            b,
            rotary.cos_sin_cache[: span.num_tokens],
            rotary.is_neox_style,
        )


def _as_run(slots: torch.Tensor) -> torch.Tensor | slice:
    """A slice if the slots lie in one ascending run: a view then replaces a gather."""
    first, count = int(slots[0]), slots.numel()
    if int(slots[-1]) - first == count - 1 and bool((slots.diff() == 1).all()):
        return slice(first, first + count)
    return slots


def _gather(pool: torch.Tensor, slots: torch.Tensor | slice) -> torch.Tensor:
    return pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)
