"""The key that a command sends to a running server."""

from __future__ import annotations

import os

# In the environment, so that it is in no list of processes, shell history or report.
API_KEY = "PRECACHE_API_KEY"


def key_headers(key: str | None = None) -> dict[str, str]:
    """HTTP headers with `key`, by default the environment's; empty without one.

    A server with an admin key takes that one for everything; commands that flush a cache or look
    at its state need it there.
    """
    key = key or os.environ.get(API_KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}
