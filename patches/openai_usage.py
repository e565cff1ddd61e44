"""sglang.srt.entrypoints.openai.usage_processor and protocol

Why: clients of the OpenAI endpoints see where their prompt's tokens came from, too.
How: ``usage`` gets two fields more: ``precache``, summed over prompts like ``prompt_tokens``,
and ``precache_match``, a list with one item per prompt. SGLang's streaming code keeps only
token counts, so there the records ride on the count itself (`PromptTokens`), and
``/v1/responses`` makes its ``usage`` of that count.
Gone when: ``UsageInfo`` takes extra fields and streaming passes ``meta_info`` on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.streamer import INFO_KEY, MATCH_KEY, PromptTokens

# Counts and match of one prompt.
_Records = tuple[Mapping[str, int] | None, Mapping[str, Any] | None]


def _with_records(usage: Any, records: Iterable[_Records]) -> Any:
    found = [(counts, match) for counts, match in records if counts]
    if found:
        total = {name: sum(counts[name] for counts, _ in found) for name in found[0][0]}
        setattr(usage, INFO_KEY, total)
        setattr(usage, MATCH_KEY, [match for _, match in found])
    return usage


def allow_extra_fields(cls: Any) -> None:
    """Let a model carry fields it does not declare, in every response that embeds it."""
    from pydantic import BaseModel

    if cls.model_config.get("extra") == "allow":
        return
    cls.model_config["extra"] = "allow"
    cls.model_rebuild(force=True)
    models = [
        model
        for model in vars(sys.modules[cls.__module__]).values()
        if isinstance(model, type) and issubclass(model, BaseModel)
    ]
    # A response model holds a compiled copy of the models inside it, and an event one of that.
    for field in ("usage", "message"):
        for model in models:
            if field in model.model_fields:
                model.model_rebuild(force=True)


def around_usage_init(original: Callable[..., None], usage: Any, **fields: Any) -> None:
    allow_extra_fields(type(usage))
    original(usage, **fields)
    count = fields.get("prompt_tokens")
    if isinstance(count, PromptTokens):
        _with_records(usage, [(count.counts, count.match)])


def around_calculate_response_usage(
    original: Callable[..., Any], responses: list[dict[str, Any]], n_choices: int = 1, **kw: Any
) -> Any:
    usage = original(responses, n_choices, **kw)
    first_of_each = responses[::n_choices]
    infos = (response["meta_info"] for response in first_of_each)
    return _with_records(usage, ((info.get(INFO_KEY), info.get(MATCH_KEY)) for info in infos))


def around_calculate_streaming_usage(
    original: Callable[..., Any], prompt_tokens: Mapping[int, int], *args: Any, **kwargs: Any
) -> Any:
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
        "sglang.srt.entrypoints.openai.protocol.UsageInfo.__init__",
        "around",
        around_usage_init,
        main_process_only=True,
    ),
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
