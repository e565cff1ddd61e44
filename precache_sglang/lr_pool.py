"""LR pool: storage for low-rank rows, addressed by slot.

One slot is one (token, adapter) pair over all layers. Slots are not mirrors of KV
slots: a published node may pair base slots from one pass with rows from another, and
slices of different adapters live and die apart.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator


class LRPool:
    """Tensors and slot allocator.

    Attributes:
        v: ``[layers, slots + 1, width]`` in the KV dtype; unscaled rows ``x A_v``.
        k: The same for ``x A_k``, or None if no adapter targets ``k_proj``.
        size: Slots that can be handed out. Slot 0 takes writes that nobody reads.
    """

    def __init__(
        self,
        size: int,
        num_layers: int,
        width: int,
        has_k: bool,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.size = size
        self.width = width
        shape = (num_layers, size + 1, width)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.k = torch.zeros(shape, dtype=dtype, device=device) if has_k else None
        self._allocator = TokenToKVPoolAllocator(size, torch.int64, device, None, need_sort=False)

    @staticmethod
    def bytes_per_slot(num_layers: int, width: int, has_k: bool, dtype: torch.dtype) -> int:
        return num_layers * width * (2 if has_k else 1) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.v.nbytes + (0 if self.k is None else self.k.nbytes)

    @property
    def slot_bytes(self) -> int:
        return self.nbytes // (self.size + 1)

    def available_size(self) -> int:
        return self._allocator.available_size()

    def alloc(self, num_slots: int) -> torch.Tensor | None:
        """``[num_slots]`` int64, or None if that many are not free."""
        return self._allocator.alloc(num_slots)

    def free(self, slots: torch.Tensor) -> None:
        self._allocator.free(slots)

    def clear(self) -> None:
        self._allocator.clear()
