"""sglang.srt.mem_cache.allocation

Why: replayed tokens need no KV slot, a neutral piece is written in place, and LR slots
are handed out together with KV slots.
How: around the two allocation functions, and around the slot source they use.
Gone when: SGLang has an allocation hook that receives the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from precache_sglang.patches import Patch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from precache_sglang.runtime import current


def around_alloc_for_extend(original: Callable[..., Any], batch: ScheduleBatch) -> Any:
    runtime = current()
    if runtime is None:
        return original(batch)
    runtime.before_extend(batch)
    with runtime.extend_layout(batch):
        result = original(batch)
    runtime.after_extend(batch)
    return result


def around_alloc_for_decode(
    original: Callable[..., torch.Tensor], batch: ScheduleBatch, token_per_req: int
) -> torch.Tensor:
    slots = original(batch, token_per_req)
    runtime = current()
    if runtime is not None:
        runtime.after_decode(batch)
    return slots


def around_alloc_token_slots(
    original: Callable[..., torch.Tensor], tree_cache: Any, num_tokens: int
) -> torch.Tensor:
    runtime = current()
    if runtime is None or not runtime.extending:
        return original(tree_cache, num_tokens)
    return runtime.base_slots(lambda count: original(tree_cache, count), num_tokens)


PATCHES = [
    Patch("sglang.srt.mem_cache.allocation.alloc_for_extend", "around", around_alloc_for_extend),
    Patch("sglang.srt.mem_cache.allocation.alloc_for_decode", "around", around_alloc_for_decode),
    Patch("sglang.srt.mem_cache.allocation.alloc_token_slots", "around", around_alloc_token_slots),
]
