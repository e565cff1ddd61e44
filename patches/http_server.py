"""sglang.srt.entrypoints.http_server

Why: our routes, for administrators; and SGLang's app lets every origin in, takes bodies of any
size, and ends or hangs on SIGTERM as it happens.
How: include our router in SGLang's app before it serves, and put `precache_sglang.guard`
around it.
Gone when: plugins can register routers and middleware.
"""

from __future__ import annotations

from typing import Any

from fastapi.routing import APIRoute
from precache_sglang.patches import Patch

from precache_sglang.config import Settings
from precache_sglang.guard import install

_WITH_KEYS = ("/server_info", "/get_server_info")


def before_launch_server(server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    from precache_sglang.http import PAGE_PATHS, router

    for route in (*router.routes, *app.router.routes):
        # SGLang's report of its arguments has the keys in it.
        is_private = route in router.routes or getattr(route, "path", None) in _WITH_KEYS
        if isinstance(route, APIRoute) and is_private and route.path not in PAGE_PATHS:
            auth_level(AuthLevel.ADMIN_OPTIONAL)(route.endpoint)
    # Not `include_router`: what it adds, SGLang's check of keys does not look into.
    app.router.routes.extend(router.routes)
    settings = Settings.of(server_args)
    if settings is not None and settings.policy is not None:
        install(app, settings)


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.http_server.launch_server",
        "before",
        before_launch_server,
        main_process_only=True,
    ),
]
