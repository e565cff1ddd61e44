"""sglang.srt.entrypoints.ollama.serving

Why: Ollama's routes never look at ``model``; every name is served by the model without an
adapter. And what the engine refuses is an internal error there, or, streamed, an answer without
text that ends like any other.
How: settle the role at the door, see `precache_sglang.request_role`; a `ValueError` is status 400,
as on SGLang's other routes; an abort is raised in streams, too, which start when they have
something to say, and which tell of a later one as Ollama's server does, by a line with ``error``.
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

_is_ollama: ContextVar[bool] = ContextVar("is_ollama", default=False)  # of a request's task


async def around_handler(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    _is_ollama.set(True)
    try:
        answer = await around_route(original, serving, request, raw_request)
        if isinstance(answer, StreamingResponse):
            rest = aiter(answer.body_iterator)
            answer.body_iterator = rest_of_stream(await anext(rest), rest)
        return answer
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


async def rest_of_stream(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    try:
        async for chunk in rest:
            yield chunk
    except HTTPException as error:
        yield json.dumps({"error": error.detail}) + "\n"


async def around_abort(
    original: Callable[..., Awaitable[Any]],
    manager: Any,
    out: dict[str, Any],
    state: Any,
    is_stream: bool,
) -> Any:
    return await original(manager, out, state, is_stream and not _is_ollama.get())


PATCHES = [
    *(
        Patch(
            f"sglang.srt.entrypoints.ollama.serving.OllamaServing.{handler}",
            "around",
            around_handler,
            main_process_only=True,
        )
        for handler in ("handle_chat", "handle_generate")
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
        "around",
        around_abort,
        main_process_only=True,
    ),
]
