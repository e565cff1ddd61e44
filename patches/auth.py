"""sglang.srt.utils.auth

Why: a browser that opens the live page has no key to send yet. The page is public and holds no
data; it asks its reader for the key and sends it with every request for data.
How: allow ``GET`` of exactly the page's addresses, whatever the key; leave the rest to SGLang.
Gone when: SGLang has an auth level for public routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precache_sglang.patches import Patch


def around_decide_request_auth(
    original: Callable[..., Any], *, method: str, path: str, **rest: Any
) -> Any:
    from sglang.srt.utils.auth import AuthDecision

    from precache_sglang.http import PAGE_PATHS

    if method in ("GET", "HEAD") and path in PAGE_PATHS:
        return AuthDecision(allowed=True)
    return original(method=method, path=path, **rest)


PATCHES = [
    Patch(
        "sglang.srt.utils.auth.decide_request_auth",
        "around",
        around_decide_request_auth,
        main_process_only=True,
    ),
]
