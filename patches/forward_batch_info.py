"""sglang.srt.model_executor.forward_batch_info

Why: the forward must know where to store the LR rows of its tokens.
How: copy the slots that allocation left on the schedule batch.
Gone when: forward batches carry a plugin's tensors.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from precache_sglang.patches import Patch


def after_init_new(
    forward_batch: ForwardBatch, _cls: type, batch: ScheduleBatch, *_args: Any, **_kwargs: Any
) -> None:
    forward_batch.precache_write_slots = getattr(batch, "precache_write_slots", None)


PATCHES = [
    Patch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        "after",
        after_init_new,
    ),
]
