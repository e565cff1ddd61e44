"""sglang.srt.entrypoints.anthropic.serving

Why: ``/v1/messages`` serves names that it does not know by the model without an adapter.
How: settle the role at the door; see `precache_sglang.request_role`.
Gone when: SGLang resolves the names that it lists, and refuses others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.request_role import settle


async def around_handle_messages(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    await settle(raw_request, serving.openai_serving_chat.tokenizer_manager)
    return await original(serving, request, raw_request)


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages",
        "around",
        around_handle_messages,
        main_process_only=True,
    ),
]
