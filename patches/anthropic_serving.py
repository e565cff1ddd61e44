"""sglang.srt.entrypoints.anthropic.serving

Why: ``/v1/messages`` serves names that it does not know by the model without an adapter. It makes
its ``usage`` of a chat's, without our fields.
How: settle the role at the door, see `precache_sglang.request_role`; copy the fields.
Gone when: SGLang resolves the names that it lists, and refuses others; and see `openai_usage`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from precache_sglang.patches import Patch
from precache_sglang.patches.openai_usage import allow_extra_fields

from precache_sglang.request_role import settle


async def around_handle_messages(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    await settle(raw_request, serving.openai_serving_chat.tokenizer_manager)
    return await original(serving, request, raw_request)


def around_usage_from_openai(original: Callable[..., Any], usage: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.anthropic import protocol

    allow_extra_fields(protocol.AnthropicUsage)
    converted = original(usage, **kwargs)
    for name, value in (getattr(usage, "model_extra", None) or {}).items():
        setattr(converted, name, value)
    return converted


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.anthropic.serving._anthropic_usage_from_openai",
        "around",
        around_usage_from_openai,
        main_process_only=True,
    ),
    Patch(
        "sglang.srt.entrypoints.anthropic.serving.AnthropicServing.handle_messages",
        "around",
        around_handle_messages,
        main_process_only=True,
    ),
]
