"""sglang.srt.managers.tokenizer_manager

Why: ``meta_info["precache"]`` is one record per request; SGLang takes extra fields of an
answer for lists with one item per token. And the role that was settled at a route's door has to
reach the engine, by whatever way that route builds its request.
How: take our field out before SGLang joins the rest, see also `openai_usage`; set the adapter
where every request comes in, see `precache_sglang.request_role`.
Gone when: request-level extra fields reach ``meta_info`` as they are; SGLang resolves the names
that it lists, on every route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.request_role import apply
from precache_sglang.streamer import INFO_KEY, PromptTokens


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
    ours = customized_info.get(INFO_KEY)
    rest = {key: value for key, value in customized_info.items() if key != INFO_KEY}
    if rest:
        original(manager, meta_info, state, rest, index, finish_reason)
    if ours is not None:
        meta_info[INFO_KEY] = ours[index]
        meta_info["prompt_tokens"] = PromptTokens.of(meta_info["prompt_tokens"], ours[index])


PATCHES = [
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "before",
        before_generate_request,
    ),
    Patch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        "around",
        around_update_request_meta_info,
    ),
]
