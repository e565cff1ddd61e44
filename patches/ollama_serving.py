"""sglang.srt.entrypoints.ollama.serving

Why: Ollama's routes never look at ``model``; every name is served by the model without an
adapter. And what the engine refuses is an internal error there, or, streamed, an answer without
text that ends like any other.
How: settle the role at the door, see `precache_sglang.request_role`; a `ValueError` is status 400,
as on SGLang's other routes; an abort is raised in streams, too (`tokenizer_manager`), which start
when they have something to say, and tell of a later one as Ollama's server does, by a line with
``error``.
Gone when: SGLang resolves the names that it lists, and refuses others; and answers so.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from precache_sglang.patches import Patch

from precache_sglang.request_role import around_route

is_ollama: ContextVar[bool] = ContextVar("is_ollama", default=False)  # of a request's task


async def around_handler(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    is_ollama.set(True)
    try:
        answer = await around_route(original, serving, request, raw_request)
        if isinstance(answer, StreamingResponse):
            rest = aiter(answer.body_iterator)
            answer.body_iterator = stream_from(await anext(rest), rest)
        return answer
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


async def stream_from(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    try:
        async for chunk in rest:
            yield chunk
    except HTTPException as error:
        yield json.dumps({"error": error.detail}) + "\n"


PATCHES = [
    Patch(
        f"sglang.srt.entrypoints.ollama.serving.OllamaServing.{handler}",
        "around",
        around_handler,
        main_process_only=True,
    )
    for handler in ("handle_chat", "handle_generate")
]
