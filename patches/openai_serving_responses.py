"""sglang.srt.entrypoints.openai.serving_responses

Why: ``/v1/responses`` accepts the names of roles and serves them all by the model without an
adapter. Its ``usage`` has fields of its own and leaves ours out. And what the engine refuses,
for now or for ever, is status 400 there, or a stream's error without a status.
How: settle the role at the door, see `precache_sglang.request_role`; write our fields of
`openai_usage` after its own; keep the engine's status.
Gone when: SGLang passes the adapter on, and refuses unknown names; and answers so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from precache_sglang.patches import Patch

from precache_sglang.guard import STATUS_KEY
from precache_sglang.request_role import around_route


def after_model_dump(dumped: dict[str, Any], model: Any, *_args: Any, **_kwargs: Any) -> None:
    """Of a response, or of an event that brings one."""
    response = getattr(model, "response", model)
    if response.usage is not None:
        shape = dumped if response is model else dumped["response"]
        shape["usage"].update(response.usage.model_extra or {})


async def around_full_generator(
    original: Callable[..., Awaitable[Any]], serving: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        return await original(serving, *args, **kwargs)
    except HTTPException as error:
        phrase = HTTPStatus(error.status_code).phrase
        return serving.create_error_response(error.detail, phrase, error.status_code)


def after_error_from_finish_reason(
    error: dict[str, Any] | None, _cls: type[Any], finish_reason: Any
) -> dict[str, Any] | None:
    if error is None or not isinstance(finish_reason, dict):
        return error
    status = finish_reason.get("status_code")
    return error if status is None else {**error, STATUS_KEY: int(status)}


_SERVING = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
_PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
PATCHES = [
    Patch(f"{_SERVING}.create_responses", "around", around_route, main_process_only=True),
    *(
        Patch(f"{_PROTOCOL}.{model}.model_dump", "after", after_model_dump, main_process_only=True)
        for model in ("ResponsesResponse", "ResponsesLifecycleEvent")
    ),
    Patch(
        f"{_SERVING}.responses_full_generator",
        "around",
        around_full_generator,
        main_process_only=True,
    ),
    Patch(
        f"{_SERVING}._error_from_finish_reason",
        "after",
        after_error_from_finish_reason,
        main_process_only=True,
    ),
]
