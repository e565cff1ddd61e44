"""sglang.srt.entrypoints.ollama.serving

Why: Ollama's routes never look at ``model``; every name is served by the model without an
adapter. And what the engine refuses is an internal error there, or a stream that breaks off.
How: settle the role at the door, see `precache_sglang.request_role`; a `ValueError` is status 400,
as on SGLang's other routes, and a stream starts when it has something to say.
Gone when: SGLang resolves the names that it lists, and refuses others; and answers so.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from precache_sglang.patches import Patch

from precache_sglang.request_role import around_route


async def around_handler(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    try:
        answer = await around_route(original, serving, request, raw_request)
        if isinstance(answer, StreamingResponse):
            rest = aiter(answer.body_iterator)
            answer.body_iterator = _again(await anext(rest), rest)
        return answer
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


async def _again(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for chunk in rest:
        yield chunk


PATCHES = [
    Patch(
        f"sglang.srt.entrypoints.ollama.serving.OllamaServing.{handler}",
        "around",
        around_handler,
        main_process_only=True,
    )
    for handler in ("handle_chat", "handle_generate")
]
