"""Our HTTP routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse

router = APIRouter(prefix="/precache")
models = APIRouter()


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
