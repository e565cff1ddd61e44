"""sglang.srt.managers.tokenizer_manager

Why: ``meta_info["precache"]`` is one record per request; SGLang takes extra fields of an
answer for lists with one item per token. So is ``precache_match``, whose tokens are to be text.
And the role that was settled at a route's door has to reach the engine, by whatever way that route
builds its request.
How: take our fields out before SGLang joins the rest, and decode, see also `openai_usage`; set the
adapter where every request comes in, see `precache_sglang.request_role`.
Gone when: request-level extra fields reach ``meta_info`` as they are; SGLang resolves the names
that it lists, on every route.

Why: after SIGTERM, SGLang takes new requests until it happens to find none running; one that
arrives after that is never answered, and the process never ends.
How: drain first, in bounded time (`precache_sglang.guard`); SGLang then finds none.
Gone when: SGLang refuses requests while it drains, and bounds it.

Why: SGLang hands an abort to a stream as one more answer, of which Ollama's routes read the text.
How: raise it there, as for an answer in one piece, see `ollama_serving`.
Gone when: Ollama's routes look at ``finish_reason``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from precache_sglang.patches import Patch
from precache_sglang.patches.ollama_serving import is_ollama

from precache_sglang.guard import current
from precache_sglang.request_role import apply
from precache_sglang.streamer import INFO_KEY, MATCH_KEY, PromptTokens

_OURS = (INFO_KEY, MATCH_KEY)
logger = logging.getLogger(__name__)


def before_generate_request(_manager: Any, obj: Any, request: Any = None) -> None:
    apply(request, obj)


def around_update_request_meta_info(
    original: Callable[..., None],
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, Any],
    index: int,
    finish_reason: Any,
) -> None:
    ours = {key: customized_info[key][index] for key in _OURS if key in customized_info}
    rest = {key: value for key, value in customized_info.items() if key not in _OURS}
    if rest:
        original(manager, meta_info, state, rest, index, finish_reason)
    if INFO_KEY in ours:
        match = ours.get(MATCH_KEY)
        if match is not None:
            _decode(match, manager.tokenizer)
        meta_info.update(ours)
        meta_info["prompt_tokens"] = PromptTokens.of(
            meta_info["prompt_tokens"], ours[INFO_KEY], match
        )


def _decode(match: dict[str, Any], tokenizer: Any) -> None:
    """Add the text of the tokens shown; there is none without a tokenizer."""
    for shown in match.get("end", {}).values():
        shown["text"] = None if tokenizer is None else tokenizer.decode(shown["tokens"])


async def around_handle_abort_finish_reason(
    original: Callable[..., Awaitable[Any]],
    manager: Any,
    out: dict[str, Any],
    state: Any,
    is_stream: bool,
) -> Any:
    return await original(manager, out, state, is_stream and not is_ollama.get())


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
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "before",
        before_generate_request,
    ),
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
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
        "around",
        around_handle_abort_finish_reason,
        main_process_only=True,
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        "around",
        around_update_request_meta_info,
    ),
]
