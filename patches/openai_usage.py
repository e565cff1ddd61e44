"""sglang.srt.entrypoints.openai.usage_processor

Why: clients of the OpenAI endpoints see where their prompt's tokens came from, too.
How: ``usage`` gets two fields more: ``precache``, summed over prompts like ``prompt_tokens``,
and ``precache_match``, a list with one item per prompt. SGLang's streaming code keeps only
token counts, so there the records ride on the count itself (`PromptTokens`).
Gone when: ``UsageInfo`` takes extra fields and streaming passes ``meta_info`` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.streamer import INFO_KEY, MATCH_KEY, PromptTokens

# Counts and match of one prompt.
_Records = tuple[Mapping[str, int] | None, Mapping[str, Any] | None]

_allowed = False


def _with_records(usage: Any, records: Iterable[_Records]) -> Any:
    found = [(counts, match) for counts, match in records if counts]
    if found:
        _allow_extra_field()
        total = {name: sum(counts[name] for counts, _ in found) for name in found[0][0]}
        setattr(usage, INFO_KEY, total)
        setattr(usage, MATCH_KEY, [match for _, match in found])
    return usage


def _allow_extra_field() -> None:
    """Let `UsageInfo` carry a field it does not declare, in every response that embeds it."""
    global _allowed
    if _allowed:
        return
    _allowed = True
    from pydantic import BaseModel
    from sglang.srt.entrypoints.openai import protocol

    protocol.UsageInfo.model_config["extra"] = "allow"
    protocol.UsageInfo.model_rebuild(force=True)
    # A response model holds a compiled copy of the models inside it.
    for model in list(vars(protocol).values()):
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            continue
        if "usage" in model.model_fields:
            model.model_rebuild(force=True)


def around_calculate_response_usage(
    original: Callable[..., Any], responses: list[dict[str, Any]], n_choices: int = 1, **kw: Any
) -> Any:
    _allow_extra_field()
    usage = original(responses, n_choices, **kw)
    first_of_each = responses[::n_choices]
    infos = (response["meta_info"] for response in first_of_each)
    return _with_records(usage, ((info.get(INFO_KEY), info.get(MATCH_KEY)) for info in infos))


def around_calculate_streaming_usage(
    original: Callable[..., Any], prompt_tokens: Mapping[int, int], *args: Any, **kwargs: Any
) -> Any:
    _allow_extra_field()
    usage = original(prompt_tokens, *args, **kwargs)
    n_choices = kwargs.get("n_choices", 1)
    return _with_records(
        usage,
        (
            (count.counts, count.match) if isinstance(count, PromptTokens) else (None, None)
            for index, count in sorted(prompt_tokens.items())
            if index % n_choices == 0
        ),
    )


_PROCESSOR = "sglang.srt.entrypoints.openai.usage_processor.UsageProcessor"
PATCHES = [
    Patch(
        f"{_PROCESSOR}.calculate_response_usage",
        "around",
        around_calculate_response_usage,
        main_process_only=True,
    ),
    Patch(
        f"{_PROCESSOR}.calculate_streaming_usage",
        "around",
        around_calculate_streaming_usage,
        main_process_only=True,
    ),
]
