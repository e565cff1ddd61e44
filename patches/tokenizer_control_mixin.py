"""sglang.srt.managers.tokenizer_control_mixin

Why: SGLang remembers where an adapter came from that was unloaded by request, and the next
caller who names it loads it again: an administrator cannot take a role away.
How: forget it. What SGLang unloads by itself to make room is still loaded again on demand.
Gone when: SGLang tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.config import Settings


async def around_unload_lora_adapter(
    original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    if settings is None or settings.policy is None:
        return await original(manager, obj, *args, **kwargs)
    # Before, too: an unload waits for the role's requests, and there shall be no new ones.
    known = manager.lora_ref_cache.pop(obj.lora_name, None)
    result = await original(manager, obj, *args, **kwargs)
    if result.success:
        manager.lora_ref_cache.pop(obj.lora_name, None)
    elif known is not None:
        manager.lora_ref_cache.setdefault(obj.lora_name, known)
    return result


PATCHES = [
    Patch(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.unload_lora_adapter",
        "around",
        around_unload_lora_adapter,
        main_process_only=True,
    ),
]
