"""LoRA B of every adapter in device tables, for kernels that serve mixed batches in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from precache_sglang.errors import AdapterError

if TYPE_CHECKING:
    from precache_sglang.roles import Adapter, Projection

NO_ADAPTER = -1


class AdapterTables:
    """One row per loaded adapter that has LR rows; the row stays the same while it is loaded.

    Attributes:
        ranks: ``[capacity]`` int32.
        b_v: Per layer ``[capacity, width, kv_size]``, LoRA B times its scale; rows beyond an
            adapter's rank are zero.
        b_k: The same for keys, or None if no adapter adapts them.
        is_fixed: Tensors keep their addresses, which captured graphs hold: there is no more
            room than `capacity`.
    """

    def __init__(
        self,
        capacity: int,
        num_layers: int,
        width: int,
        kv_size: int,
        has_k: bool,
        dtype: torch.dtype,
        device: str,
        is_fixed: bool,
    ) -> None:
        self.is_fixed = is_fixed
        self.rows: dict[str, int] = {}  # lora_id -> row
        self.ranks = torch.zeros(capacity, dtype=torch.int32, device=device)
        shape = (capacity, width, kv_size)
        self.b_v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.b_k = [torch.zeros_like(b) for b in self.b_v] if has_k else None

    @property
    def capacity(self) -> int:
        return self.ranks.numel()

    def row_of(self, adapter: Adapter | None) -> int:
        """`NO_ADAPTER` for adapter-free passes and adapters without LR rows."""
        return NO_ADAPTER if adapter is None else self.rows.get(adapter.lora_id, NO_ADAPTER)

    def require_room(self, adapter: Adapter) -> None:
        """Raises AdapterError if `adapter` has rows and the tables are full."""
        if self.is_fixed and adapter.rows_key is not None and len(self.rows) >= self.capacity:
            raise AdapterError(
                f"Adapter {adapter.name!r} is one more than the {self.capacity} that fit beside "
                "captured CUDA graphs; unload one, or start with a larger --max-loaded-loras, or "
                "without --precache-cuda-graph."
            )

    def add(self, adapter: Adapter) -> None:
        self.require_room(adapter)
        if adapter.rows_key is None:
            return
        taken = set(self.rows.values())
        row = next(row for row in range(len(taken) + 1) if row not in taken)
        if row >= self.capacity:
            self._grow()
        self.rows[adapter.lora_id] = row
        self.ranks[row] = adapter.rank
        self._fill(self.b_v, row, adapter.v)
        if self.b_k is not None:
            self._fill(self.b_k, row, adapter.k)

    def remove(self, lora_id: str) -> None:
        self.rows.pop(lora_id, None)

    def _fill(self, tables: list[torch.Tensor], row: int, projection: Projection | None) -> None:
        for layer, table in enumerate(tables):
            table[row].zero_()
            if projection is not None:
                b = projection.b[layer]
                table[row, : b.shape[0]] = b

    def _grow(self) -> None:
        self.ranks = _doubled(self.ranks)
        self.b_v = [_doubled(table) for table in self.b_v]
        if self.b_k is not None:
            self.b_k = [_doubled(table) for table in self.b_k]


def _doubled(table: torch.Tensor) -> torch.Tensor:
    return torch.cat((table, torch.zeros_like(table)))
