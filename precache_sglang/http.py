"""Our HTTP routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException

router = APIRouter(prefix="/precache")
# What of ours needs no key (`patches/auth.py`): a page without data.
PAGE_PATHS = ("/precache", "/precache/")


@router.get("/state")
async def state() -> dict[str, Any]:
    """What the prefix cache, the pools and the backlog hold now."""
    from sglang.srt.entrypoints.http_server import get_global_state

    (internal, *_) = await get_global_state().tokenizer_manager.get_internal_state()
    if "precache" not in internal:
        raise HTTPException(
            404, "precache is off on this server; start it with adapters and --precache-method."
        )
    report: dict[str, Any] = internal["precache"]
    return report
