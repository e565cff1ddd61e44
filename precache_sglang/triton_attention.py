"""The attention backend for GPUs.

A batch in which somebody reads low-rank rows goes to our Triton kernels, in one launch
whatever adapters it mixes. A batch in which nobody does (neutral passes, requests without an
adapter, every batch of a method without rows) goes to SGLang's FlashInfer backend.

What the kernels need of a request they look up themselves, by its row of ``req_to_token``,
``req_to_lr`` and ``req_to_adapter``: planning a step reads nothing back from the device, and
a captured graph serves whoever is in the batch at its replay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from precache_sglang.adapter_tables import NO_ADAPTER, AdapterTables
from precache_sglang.attention import PrecacheAttnBackend
from precache_sglang.errors import UnsupportedError
from precache_sglang.kernels.lr_decode import lr_decode, most_parts, splits_for
from precache_sglang.kernels.lr_extend import lr_extend
from precache_sglang.kernels.lr_rows import HEAD_DIMS, MAX_RANK, AttentionInputs
from precache_sglang.kernels.lr_write import lr_write
from precache_sglang.runtime import Runtime

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass
class _Part:
    """Consecutive queries of a forward that one launch serves.

    Attributes:
        queries: Their place in ``q``.
        req_to_token: Table of base slots that `rows` refers to.
        rows, seq_lens, adapters: See `AttentionInputs`.
        q_indptr: ``[requests + 1]`` int32; None for a decode step.
        max_new_tokens: At least the largest number of queries of one request.
        max_tokens: At least the largest number of tokens of one request.
    """

    queries: slice
    req_to_token: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    adapters: torch.Tensor
    q_indptr: torch.Tensor | None
    max_new_tokens: int
    max_tokens: int


class TritonAttnBackend(PrecacheAttnBackend):
    """See the module's docstring.

    Attributes:
        flashinfer: SGLang's backend for batches without rows; None where it does not serve
            the model, and without a GPU: our kernels serve all then.
        parts: The launches of the forward in progress; empty where `flashinfer` serves it.
    """

    def __init__(self, runner: ModelRunner, runtime: Runtime) -> None:
        super().__init__(runner, runtime, lr_write)
        self.device = torch.device(runner.device)
        self.on_gpu = self.device.type == "cuda"
        self.context_len: int = self.req_to_token.shape[1]
        self.parts: list[_Part] = []
        self.num_processors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count
            if self.on_gpu
            else 4
        )
        self._span_table = self.req_to_token.new_zeros((1, self.context_len))
        layer = next(m for m in runner.model.modules() if isinstance(m, RadixAttention))
        self.num_heads, self.kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        self.head_dim: int = layer.qk_head_dim
        self._require_served_shapes()
        self.flashinfer = _flashinfer(runner, self.head_dim) if self.on_gpu else None
        if runtime.settings.cuda_graph and not runtime.method.base_kv and self.flashinfer is None:
            raise UnsupportedError(
                f"--precache-cuda-graph with method {runtime.method.name} needs FlashInfer, which "
                "is not there or does not serve this model; leave it out."
            )
        # For the largest batch at once: captured graphs must not see it move.
        most = (
            self.num_heads
            // self.kv_heads
            * most_parts(len(self.req_to_token), self.kv_heads, self.num_processors)
        )
        self._part_out = torch.empty(most * self.head_dim, dtype=torch.float32, device=self.device)
        self._part_lse = torch.empty(most, dtype=torch.float32, device=self.device)
        if runtime.method.base_kv:
            runtime.roles.use_tables(self._tables(runner))

    def _require_served_shapes(self) -> None:
        roles = self.runtime.roles
        problem = None
        if self.head_dim not in HEAD_DIMS:
            problem = f"The model's head size {self.head_dim} is not one of {HEAD_DIMS}"
        elif self.kv_pool.dtype != self.runtime.dtype:
            problem = f"KV is stored in {self.kv_pool.dtype}, the model in {self.runtime.dtype}"
        elif self.runtime.method.base_kv and roles.width > MAX_RANK:
            problem = f"--max-lora-rank {roles.width} is above {MAX_RANK}"
        elif roles.has_k and any(
            rotary.cos_sin_cache.shape[-1] != self.head_dim for rotary in self.rotary.values()
        ):
            problem = "The model rotates a part of each head, and an adapter adapts k_proj"
        if problem:
            raise UnsupportedError(
                f"{problem}, which the Triton kernels do not serve; start with "
                f"--precache-{'method off' if self.on_gpu else 'kernels torch'}."
            )

    def _tables(self, runner: ModelRunner) -> AdapterTables:
        runtime = self.runtime
        args = runner.server_args
        capacity = max(1, len(runtime.roles.adapters), runtime.lora_manager.max_loras_per_batch)
        return AdapterTables(
            max(capacity, args.max_loaded_loras or 0),
            runtime.num_layers,
            runtime.roles.width,
            runtime.kv_size,
            runtime.roles.has_k,
            runtime.dtype,
            str(self.device),
            is_fixed=runtime.settings.cuda_graph,
        )

    # -- planning a step -----------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        runtime = self.runtime
        runtime.end_capture()
        self.parts = []
        if self._flashinfer_serves(forward_batch):
            assert self.flashinfer is not None
            self.flashinfer.init_forward_metadata(forward_batch)
            return
        rows = forward_batch.req_pool_indices
        adapters = runtime.req_to_adapter[rows]
        is_decode = forward_batch.forward_mode.is_decode_or_idle()
        if is_decode:
            q_indptr, num_queries, longest = None, len(rows), 1
        else:
            lengths = forward_batch.extend_seq_lens
            q_indptr = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            new = forward_batch.extend_seq_lens_cpu
            num_queries, longest = sum(new), max(new, default=0)
        host_lengths = forward_batch.seq_lens_cpu
        self.parts.append(
            _Part(
                queries=slice(0, num_queries),
                req_to_token=self.req_to_token,
                rows=rows,
                seq_lens=forward_batch.seq_lens,
                adapters=adapters,
                q_indptr=q_indptr,
                max_new_tokens=longest,
                max_tokens=(
                    self.context_len
                    if host_lengths is None or not len(host_lengths)
                    else int(host_lengths.max())
                ),
            )
        )
        if runtime.neutral_spans:
            self.parts.append(self._spans_part(num_queries))

    def _flashinfer_serves(self, forward_batch: ForwardBatch) -> bool:
        if self.flashinfer is None or self.runtime.neutral_spans:
            return False
        adapters = self.runtime.roles.adapters
        return not any(
            lora_id is not None and adapters[lora_id].rows_key is not None
            for lora_id in forward_batch.lora_ids or ()
        )

    def _spans_part(self, start: int) -> _Part:
        """Neutral tokens behind the users'. They have no row in ``req_to_token``."""
        spans = self.runtime.neutral_spans
        if len(spans) > len(self._span_table):
            self._span_table = self.req_to_token.new_zeros((len(spans), self.context_len))
        for table, span in zip(self._span_table, spans, strict=False):
            table[: span.start] = span.prefix
            table[span.start : span.end] = span.slots
        new = [len(span.tokens) for span in spans]
        indptr = [0]
        for count in new:
            indptr.append(indptr[-1] + count)
        return _Part(
            queries=slice(start, start + indptr[-1]),
            req_to_token=self._span_table,
            rows=self._on_device(range(len(spans))),
            seq_lens=self._on_device([span.end for span in spans]),
            adapters=self._on_device([NO_ADAPTER] * len(spans)),
            q_indptr=self._on_device(indptr),
            max_new_tokens=max(new),
            max_tokens=max(span.end for span in spans),
        )

    def _on_device(self, values: Sequence[int]) -> torch.Tensor:
        """An int32 tensor, without waiting for the device."""
        tensor = torch.tensor(list(values), dtype=torch.int32, pin_memory=self.on_gpu)
        return tensor.to(self.device, non_blocking=True)

    # -- captured decode steps -----------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if not self.runtime.method.base_kv:
            assert self.flashinfer is not None
            self.flashinfer.init_cuda_graph_state(max_bs, max_num_tokens)
            return
        self._graph_adapters = torch.full(
            (max_bs,), NO_ADAPTER, dtype=torch.int32, device=self.device
        )
        self.runtime.hold_write_slots(max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # padding reads row 0, which SGLang keeps for it

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        if not self.runtime.method.base_kv:
            assert self.flashinfer is not None
            self.flashinfer.init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        size = forward_batch.batch_size
        if not in_capture:
            self.runtime.begin_replay(size)
            return
        self.runtime.begin_capture(size)
        self.parts = [
            _Part(
                queries=slice(0, size),
                req_to_token=self.req_to_token,
                rows=forward_batch.req_pool_indices,
                seq_lens=forward_batch.seq_lens,
                adapters=self._graph_adapters[:size],
                q_indptr=None,
                max_new_tokens=1,
                max_tokens=self.context_len,
            )
        ]

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if not self.runtime.method.base_kv:
            assert self.flashinfer is not None
            self.flashinfer.init_forward_metadata_in_graph(forward_batch)
            return
        torch.index_select(
            self.runtime.req_to_adapter,
            0,
            forward_batch.req_pool_indices,
            out=self._graph_adapters[: forward_batch.batch_size],
        )

    def on_after_cuda_graph_warmup(self) -> None:
        if self.flashinfer is not None and not self.runtime.method.base_kv:
            self.flashinfer.on_after_cuda_graph_warmup()

    # -- a layer -------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Args and result are ``[tokens, heads * head_dim]``, as SGLang passes them."""
        if not self.parts:
            assert self.flashinfer is not None
            forward = (
                self.flashinfer.forward_decode
                if forward_batch.forward_mode.is_decode_or_idle()
                else self.flashinfer.forward_extend
            )
            return forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if save_kv_cache:
            self.store(layer, forward_batch, k, v)
        queries = q.view(-1, self.num_heads, self.head_dim)
        out = torch.empty_like(queries)
        for part in self.parts:
            inputs = self._inputs(part, layer)
            mine, result = queries[part.queries], out[part.queries]
            if part.q_indptr is not None:
                lr_extend(mine, result, inputs, part.q_indptr, part.max_new_tokens)
            elif len(mine):
                splits = splits_for(len(mine), self.kv_heads, self.num_processors, part.max_tokens)
                lr_decode(mine, result, inputs, *self._scratch(len(mine), splits))
        return out.view(q.shape[0], -1)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward_extend(*args, **kwargs)

    def _inputs(self, part: _Part, layer: RadixAttention) -> AttentionInputs:
        layer_id = layer.layer_id
        rotary = self.rotary[layer_id]
        pool, tables = self.runtime.lr_pool, self.runtime.roles.tables
        inputs = AttentionInputs(
            k=self.kv_pool.get_key_buffer(layer_id),
            v=self.kv_pool.get_value_buffer(layer_id),
            rows_k=None,
            rows_v=None,
            b_k=None,
            b_v=None,
            ranks=part.adapters,
            cos_sin=None,
            req_to_token=part.req_to_token,
            req_to_lr=self.runtime.req_to_lr,
            rows=part.rows,
            seq_lens=part.seq_lens,
            adapters=part.adapters,
            scale=layer.scaling,
            is_neox_style=rotary.is_neox_style,
        )
        if pool is not None and tables is not None:
            inputs.ranks = tables.ranks
            inputs.rows_v, inputs.b_v = pool.v[layer_id], tables.b_v[layer_id]
            if pool.k is not None and tables.b_k is not None:
                inputs.rows_k, inputs.b_k = pool.k[layer_id], tables.b_k[layer_id]
                inputs.cos_sin = rotary.cos_sin_cache
        return inputs

    def _scratch(self, num_requests: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_requests, self.num_heads, num_splits)
        count = num_requests * self.num_heads * num_splits
        parts = self._part_out[: count * self.head_dim].view(*shape, self.head_dim)
        return parts, self._part_lse[:count].view(shape)


def _flashinfer(runner: ModelRunner, head_dim: int) -> AttentionBackend | None:
    """SGLang's FlashInfer backend, or None where its kernels lack the dtype or head size."""
    from sglang.srt.utils import is_flashinfer_available

    served = runner.dtype in (torch.float16, torch.bfloat16) and head_dim in (64, 128, 256)
    if not served or not is_flashinfer_available():
        logger.info("precache: batches without low-rank rows run on the Triton kernels too")
        return None
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    backend = FlashInferAttnBackend(runner, init_new_workspace=runner.init_new_workspace)
    # Its other way reads new tokens from the arguments. Those that are computed again, though
    # the tree holds them, must be read from the tree.
    backend.use_paged = True
    return backend
