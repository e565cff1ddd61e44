"""sglang.srt.managers.schedule_batch

Why: a decode step needs an LR slot for the adapter of every request, or it must retract.
How: SGLang's own capacity check, and ours; its retraction loop converges on the sum.
Gone when: the check asks every allocator of a request.
"""

from __future__ import annotations

from collections.abc import Callable

from precache_sglang.patches import Patch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from precache_sglang.runtime import current


def around_check_decode_mem(
    original: Callable[..., bool],
    batch: ScheduleBatch,
    selected_indices: list[int] | None = None,
) -> bool:
    runtime = current()
    fits = original(batch, selected_indices)
    if runtime is None or not fits:
        return fits
    indices = range(len(batch.reqs)) if selected_indices is None else selected_indices
    return runtime.can_decode([batch.reqs[i] for i in indices])


PATCHES = [
    Patch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        "around",
        around_check_decode_mem,
    ),
]
