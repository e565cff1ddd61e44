"""sglang.srt.lora.lora_registry

Why: a request that is aborted before its adapter was looked up releases an adapter all the same;
that fails in a task that nobody waits for, with a traceback in the log.
How: without an id there is nothing to release.
Gone when: SGLang releases only what a request has acquired.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from precache_sglang.patches import Patch


async def around_release(
    original: Callable[..., Awaitable[None]], registry: Any, lora_id: str | list[str] | None
) -> None:
    if lora_id is not None:
        await original(registry, lora_id)


PATCHES = [
    Patch(
        "sglang.srt.lora.lora_registry.LoRARegistry.release",
        "around",
        around_release,
        main_process_only=True,
    )
]
