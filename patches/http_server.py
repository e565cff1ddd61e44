"""sglang.srt.entrypoints.http_server

Why: ``GET /precache/state``; every id that ``/v1/models`` lists can be retrieved, while SGLang
knows the served model only; ``/generate`` takes the role from a header, too.
How: include our router in SGLang's app before it serves, and put our route for one model ahead
of SGLang's; settle the role at the door of ``/generate``, see `precache_sglang.request_role`.
Gone when: plugins can register routers; SGLang retrieves what it lists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.request_role import settle


def before_launch_server(*_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    from precache_sglang.http import models, router

    app.include_router(router)
    app.router.routes[:0] = models.routes


async def around_serve_generate_request(
    original: Callable[..., Awaitable[Any]], obj: Any, request: Any
) -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    await settle(request, get_global_state().tokenizer_manager, obj)
    return await original(obj, request)


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.http_server.launch_server",
        "before",
        before_launch_server,
        main_process_only=True,
    ),
    Patch(
        "sglang.srt.entrypoints.http_server.serve_generate_request",
        "around",
        around_serve_generate_request,
        main_process_only=True,
    ),
]
