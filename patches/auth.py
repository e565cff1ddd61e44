"""sglang.srt.utils.auth

Why: a browser that opens our page cannot send a key; the page asks for it, and holds no data. And
a key with other letters than ASCII's is an internal error.
How: the page's two addresses need none; such a key is none.
Gone when: SGLang has a level for public endpoints, and compares bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.http import PAGE_PATHS


def around_decide_request_auth(
    original: Callable[..., Any], *, method: str, path: str, **kwargs: Any
) -> Any:
    key = kwargs.get("authorization_header")
    if key is not None and not key.isascii():
        kwargs["authorization_header"] = None  # SGLang compares ASCII, and fails on the rest
    if method in ("GET", "HEAD") and path in PAGE_PATHS:
        from sglang.srt.utils.auth import AuthDecision

        return AuthDecision(allowed=True)
    return original(method=method, path=path, **kwargs)


PATCHES = [
    Patch(
        "sglang.srt.utils.auth.decide_request_auth",
        "around",
        around_decide_request_auth,
        main_process_only=True,
    ),
]
