"""The keys that commands send to a running server."""

from __future__ import annotations

import os

# In the environment, so that they are in no list of processes, shell history or report.
API_KEY, ADMIN_API_KEY = "PRECACHE_API_KEY", "PRECACHE_ADMIN_API_KEY"
# Of the routes that our commands call, those that an admin key opens where the server has one.
_ADMIN_PATHS = (
    *("/load_lora_adapter", "/unload_lora_adapter"),
    *("/flush_cache", "/abort_request", "/precache/"),
)


def key_headers(path: str, api_key: str | None = None) -> dict[str, str]:
    """HTTP headers with the environment's key for `path`; empty without one.

    Args:
        path: Of the route, with or without a query.
        api_key: In the place of the environment's `API_KEY`.
    """
    key = api_key or os.environ.get(API_KEY)
    if path.startswith(_ADMIN_PATHS):
        key = os.environ.get(ADMIN_API_KEY) or key
    return bearer(key)


def bearer(key: str | None) -> dict[str, str]:
    """HTTP headers with `key`; empty without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}
