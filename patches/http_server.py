"""sglang.srt.entrypoints.http_server

Why: our routes, ``GET /precache/state`` and the like.
How: include our router in SGLang's app before it serves.
Gone when: plugins can register routers.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch


def before_launch_server(*_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    from precache_sglang.http import router

    app.include_router(router)


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.http_server.launch_server",
        "before",
        before_launch_server,
        main_process_only=True,
    ),
]
