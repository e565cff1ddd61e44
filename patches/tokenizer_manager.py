"""sglang.srt.managers.tokenizer_manager

Why: ``meta_info["precache"]`` is one record per request; SGLang takes extra fields of an
answer for lists with one item per token.
How: take ours out before SGLang joins the rest. See also `openai_usage`.
Gone when: request-level extra fields reach ``meta_info`` as they are.

Why: after SIGTERM, SGLang takes new requests until it happens to find none running; one that
arrives after that is never answered, and the process never ends.
How: drain first, in bounded time (`precache_sglang.guard`); SGLang then finds none.
Gone when: SGLang refuses requests while it drains, and bounds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.guard import current
from precache_sglang.streamer import INFO_KEY, PromptTokens

logger = logging.getLogger(__name__)


def around_update_request_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    ours = customized_info.get(INFO_KEY)
    rest = {key: value for key, value in customized_info.items() if key != INFO_KEY}
    if rest:
        original(manager, meta_info, state, rest, index, finish_reason)
    if ours is not None:
        meta_info[INFO_KEY] = ours[index]
        meta_info["prompt_tokens"] = PromptTokens.of(meta_info["prompt_tokens"], ours[index])


async def around_sigterm_watchdog(original: Callable[..., Any], manager: Any) -> None:
    guard = current()
    if guard is not None:
        await guard.drain(manager)
    await original(manager)


def before_abort_request(
    manager: Any, rid: str = "", abort_all: bool = False, *_args: Any, **_kwargs: Any
) -> None:
    """The line of a request that has no end (`patches/request_logger.py`)."""
    state = manager.rid_to_state.get(rid)
    if current() is not None and state is not None and not state.abort_sent:
        logger.info("request rid=%r role=%r is aborted", rid, state.obj.lora_path)


PATCHES = [
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request",
        "before",
        before_abort_request,
        main_process_only=True,
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
        "around",
        around_sigterm_watchdog,
        main_process_only=True,
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        "around",
        around_update_request_meta_info,
    ),
]
