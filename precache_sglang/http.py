"""Our HTTP routes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import HTMLResponse, JSONResponse

from precache_sglang.view import VIEW_ID, SharedView

router = APIRouter(prefix="/precache")
models = APIRouter()
# What of ours needs no key (`patches/auth.py`): a page without data.
PAGE_PATHS = ("/precache", "/precache/")
# A page that waits for longer says so and asks again.
_VIEW_TIMEOUT = 5.0
_OFF = "precache is off on this server; start it with adapters and --precache-method."


@router.get("/state")
async def state() -> dict[str, Any]:
    """What the prefix cache, the pools and the backlog hold now."""
    from sglang.srt.entrypoints.http_server import get_global_state

    (internal, *_) = await get_global_state().tokenizer_manager.get_internal_state()
    if "precache" not in internal:
        raise HTTPException(404, _OFF)
    report: dict[str, Any] = internal["precache"]
    return report


async def _take_view() -> dict[str, Any] | None:
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    (answer, *_) = await manager.get_internal_state_communicator(GetInternalStateReq(rid=VIEW_ID))
    view: dict[str, Any] | None = answer.internal_state.get("precache_view")
    return view


_view = SharedView(_take_view)


@router.get("/view")
async def view(
    response: Response,
    since: int = Query(0, description="Serial of the last sample that the caller has"),
) -> dict[str, Any]:
    """What the live page shows; the tree is cut at a bounded number of nodes."""
    try:
        found = await _view.get(_VIEW_TIMEOUT)
    except asyncio.TimeoutError:
        raise HTTPException(
            503,
            f"The scheduler has not answered for {_VIEW_TIMEOUT:.0f} s; it may be in a long step.",
            {"Retry-After": "1"},
        ) from None
    if found is None:
        raise HTTPException(404, _OFF)
    response.headers["Cache-Control"] = "no-store"
    history = [sample for sample in found["history"] if sample["serial"] > since]
    return {**found, "history": history}


@router.get("", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """The live page, which asks its reader for the key that its data needs."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return HTMLResponse(text, headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The page, and a policy under which it runs its own script and talks to this server alone."""
    text = files("precache_sglang").joinpath("page.html").read_text(encoding="utf-8")

    def source(tag: str) -> str:
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {source('script')}; style-src {source('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, policy


@models.get("/v1/models/{model:path}", response_model=None)
async def retrieve_model(model: str) -> Any:
    """The card of any id that ``/v1/models`` lists: the served model or a role."""
    from sglang.srt.entrypoints.http_server import available_models

    cards = {card.id: card for card in reversed((await available_models()).data)}
    if model in cards:
        return cards[model]
    error = {
        "message": f"The model {model!r} does not exist; known: {', '.join(reversed(cards))}.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return JSONResponse({"error": error}, status_code=404)
