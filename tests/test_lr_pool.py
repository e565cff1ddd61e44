"""The LR pool: slots, where rows are stored, and what they cost."""

from __future__ import annotations

import pytest
import torch
from standins import quiet_imports

with quiet_imports():
    from precache_sglang.kernels.reference import write_rows

    from precache_sglang.lr_pool import LRPool


pytestmark = pytest.mark.usefixtures("one_thread")


def make_pool(
    size: int = 10,
    num_layers: int = 2,
    width: int = 4,
    has_k: bool = False,
    dtype: torch.dtype = torch.float32,
) -> LRPool:
    return LRPool(size, num_layers, width, has_k, dtype, "cpu")


def take(pool: LRPool, num_slots: int) -> torch.Tensor:
    slots = pool.alloc(num_slots)
    assert slots is not None
    return slots


# -- slots -------------------------------------------------------------------------


def test_every_slot_but_the_dump_is_handed_out_once() -> None:
    pool = make_pool(size=10)
    slots = torch.cat([take(pool, 4), take(pool, 6)])
    assert slots.dtype == torch.int64
    assert sorted(slots.tolist()) == list(range(1, 11)), "slot 0 is where unread writes go"
    assert pool.available_size() == 0


def test_a_request_for_more_than_is_free_takes_nothing() -> None:
    pool = make_pool(size=10)
    take(pool, 7)
    assert pool.alloc(4) is None
    assert pool.available_size() == 3


def test_freed_slots_are_handed_out_again() -> None:
    pool = make_pool(size=4)
    slots = take(pool, 4)
    pool.free(slots[1:3])
    assert pool.available_size() == 2
    assert sorted(take(pool, 2).tolist()) == sorted(slots[1:3].tolist())


def test_no_slots_can_be_asked_for_and_freed() -> None:
    pool = make_pool(size=4)
    none = take(pool, 0)
    assert none.numel() == 0
    pool.free(none)
    assert pool.available_size() == 4


def test_clearing_frees_every_slot() -> None:
    pool = make_pool(size=4)
    take(pool, 3)
    pool.clear()
    assert sorted(take(pool, 4).tolist()) == [1, 2, 3, 4]


# -- writing -----------------------------------------------------------------------


def write(
    pool: LRPool,
    layer: int,
    slots: torch.Tensor,
    x: torch.Tensor,
    blocks: list[list[torch.Tensor]],
    width: int,
) -> None:
    """What a pass does: ``x`` times every A, padded to `width`, stored at `slots`.

    Args:
        blocks: Per adapter its A matrices ``[rank, hidden]``: v, then k if the pool has keys.
    """
    stack = []
    for parts in blocks:
        for a in parts:
            padded = torch.zeros(width, x.shape[1])
            padded[: a.shape[0]] = a
            stack.append(padded)
    rows_k = None if pool.k is None else pool.k[layer]
    write_rows(x, torch.cat(stack), slots, pool.v[layer], rows_k)


def test_rows_of_each_adapter_land_in_its_own_slots() -> None:
    pool = make_pool(size=10, width=4)
    x = torch.randn(3, 8)
    a = [torch.randn(4, 8), torch.randn(4, 8)]
    slots = torch.tensor([[1, 2, 3], [9, 5, 7]])
    write(pool, 1, slots, x, [[a[0]], [a[1]]], 4)
    for block in range(2):
        torch.testing.assert_close(pool.v[1][slots[block]], x @ a[block].T)
    assert not pool.v[0].any(), "the other layer is untouched"
    assert not pool.v[1][[4, 6, 8, 10]].any(), "the other slots are untouched"


def test_key_rows_are_stored_beside_value_rows() -> None:
    pool = make_pool(size=10, width=4, has_k=True)
    x = torch.randn(3, 8)
    v, k = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    slots = torch.tensor([[1, 2, 3], [9, 5, 7]])
    write(pool, 0, slots, x, [[v[0], k[0]], [v[1], k[1]]], 4)
    assert pool.k is not None
    for block in range(2):
        torch.testing.assert_close(pool.v[0][slots[block]], x @ v[block].T)
        torch.testing.assert_close(pool.k[0][slots[block]], x @ k[block].T)


def test_rows_of_a_smaller_rank_are_followed_by_zeros() -> None:
    pool = make_pool(size=10, width=8)
    pool.v.fill_(7.0)  # leftovers of an adapter of larger rank
    x = torch.randn(2, 8)
    small, large = torch.randn(2, 8), torch.randn(8, 8)
    slots = torch.tensor([[1, 2], [3, 4]])
    write(pool, 0, slots, x, [[small], [large]], 8)
    torch.testing.assert_close(pool.v[0][[1, 2], :2], x @ small.T)
    assert not pool.v[0][[1, 2], 2:].any()
    torch.testing.assert_close(pool.v[0][[3, 4]], x @ large.T)


def test_tokens_that_are_not_kept_go_to_the_dump() -> None:
    pool = make_pool(size=10, width=4)
    x, a = torch.randn(3, 8), torch.randn(4, 8)
    write(pool, 0, torch.tensor([[0, 6, 0]]), x, [[a]], 4)
    torch.testing.assert_close(pool.v[0][6], x[1] @ a.T)
    assert not pool.v[0][1:6].any() and not pool.v[0][7:].any()


# -- bytes -------------------------------------------------------------------------


@pytest.mark.parametrize("has_k", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reported_bytes_are_the_allocated_ones(has_k: bool, dtype: torch.dtype) -> None:
    pool = make_pool(size=10, num_layers=3, width=5, has_k=has_k, dtype=dtype)
    tensors = [pool.v] if pool.k is None else [pool.v, pool.k]
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert pool.nbytes == allocated
    per_slot = LRPool.bytes_per_slot(3, 5, has_k, dtype)
    assert pool.nbytes == 11 * per_slot, "ten slots and the dump"
    assert pool.slot_bytes == per_slot


def test_rows_of_three_adapters_of_rank_8_cost_at_most_2_percent_of_the_base() -> None:
    """Llama 3.1 8B: 32 layers, 8 KV heads of size 128. Adapters of q and v."""
    num_layers, kv_heads, head_dim, dtype = 32, 8, 128, torch.bfloat16
    base = num_layers * 2 * kv_heads * head_dim * dtype.itemsize
    rows = 3 * LRPool.bytes_per_slot(num_layers, 8, has_k=False, dtype=dtype)
    assert rows <= 0.02 * base, f"{rows / base:.2%}"
