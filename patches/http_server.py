"""sglang.srt.entrypoints.http_server

Why: our routes, ``GET /precache/state`` and the like; headers that every request may carry
(`precache_sglang.hints`); every id that ``/v1/models`` lists can be retrieved, while SGLang knows
the served model only; ``/generate`` takes the role from a header, too.
How: include our router in SGLang's app before it serves, put our route for one model ahead of
SGLang's, and wrap the app's middleware: what SGLang adds later (API keys) has to lie inside. A
streamed /generate sends its headers before the request is normalised, so its id and its role
(`precache_sglang.request_role`) are settled as it comes in.
Gone when: plugins can register routers and middleware; SGLang retrieves what it lists.

Why: SGLang's app lets every origin in, takes bodies of any size, and ends or hangs on SIGTERM as
it happens; our routes are for administrators.
How: put `precache_sglang.guard` around it.
Gone when: SGLang has such limits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi.routing import APIRoute
from precache_sglang.patches import Patch

from precache_sglang import guard
from precache_sglang.config import Settings
from precache_sglang.hints import HintsMiddleware, adopt_request_id
from precache_sglang.request_role import settle

_WITH_KEYS = ("/server_info", "/get_server_info")


def before_launch_server(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from precache_sglang.http import PAGE_PATHS, models, router

    for route in (*router.routes, *app.router.routes):
        # SGLang's report of its arguments has the keys in it.
        is_private = route in router.routes or getattr(route, "path", None) in _WITH_KEYS
        if isinstance(route, APIRoute) and is_private and route.path not in PAGE_PATHS:
            auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)
    # Not `include_router`: what it adds, SGLang's check of keys does not look into.
    app.router.routes.extend(router.routes)
    settings = Settings.of(server_args)
    if settings is not None and settings.policy is not None:
        guard.install(app, settings)
    app.router.routes[:0] = models.routes
    build: Callable[[], Any] = app.build_middleware_stack
    app.build_middleware_stack = lambda: HintsMiddleware(build(), _in_flight, _refuse)


async def around_serve_generate_request(
    original: Callable[..., Awaitable[Any]], obj: Any, request: Any
) -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    adopt_request_id(obj)
    await settle(request, get_global_state().tokenizer_manager, obj)
    return await original(obj, request)


def _in_flight() -> Iterable[str]:
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    return () if state is None else state.tokenizer_manager.rid_to_state


async def _refuse(scope: Any, text: str) -> Any:
    """SGLang's own answer with status 400, in the shape that the path has for it.

    The guard lies inside of what refuses here, so that its `error` object is added here, too.
    """
    from fastapi import HTTPException, Request, Response
    from sglang.srt.entrypoints.http_server import app

    handler: Any = app.exception_handlers[HTTPException]
    answer = await handler(Request(scope), HTTPException(400, text))
    if guard.current() is None:
        return answer
    body = guard.error_body(400, scope["path"], answer.body)
    return Response(body, 400, media_type="application/json")


_SERVER = "sglang.srt.entrypoints.http_server"
PATCHES = [
    Patch(f"{_SERVER}.launch_server", "before", before_launch_server, main_process_only=True),
    Patch(
        f"{_SERVER}.serve_generate_request",
        "around",
        around_serve_generate_request,
        main_process_only=True,
    ),
]
