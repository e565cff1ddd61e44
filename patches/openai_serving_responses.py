"""sglang.srt.entrypoints.openai.serving_responses

Why: ``/v1/responses`` accepts the names of roles and serves them all by the model without an
adapter.
How: settle the role at the door; see `precache_sglang.request_role`.
Gone when: SGLang passes the adapter on, and refuses unknown names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.request_role import settle


async def around_create_responses(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    await settle(raw_request, serving.tokenizer_manager)
    return await original(serving, request, raw_request)


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses.create_responses",
        "around",
        around_create_responses,
        main_process_only=True,
    ),
]
