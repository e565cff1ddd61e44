"""sglang.srt.model_executor.forward_batch_info

Why: the forward must know where to store the LR rows of its tokens, and neutral tokens ride
along in it.
How: note the slots that allocation left on the schedule batch (they cannot travel on the
forward batch: the eager runner copies it field by field), and append those tokens
behind the users'.
Gone when: forward batches carry a plugin's tensors.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from precache_sglang.runtime import current


def after_init_new(
    result: ForwardBatch, _cls: type, batch: ScheduleBatch, *_args: Any, **_kwargs: Any
) -> None:
    runtime = current()
    if runtime is not None:
        runtime.begin_forward(batch, result)


PATCHES = [
    Patch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        "after",
        after_init_new,
    ),
]
