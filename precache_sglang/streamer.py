"""Tells the user where the prompt's tokens came from (``meta_info["precache"]``)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from precache_sglang.request import PromptCounts, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

INFO_KEY = "precache"


class PromptTokens(int):
    """A prompt length that remembers where the tokens came from."""

    counts: dict[str, int]

    @classmethod
    def of(cls, length: int, counts: dict[str, int]) -> PromptTokens:
        result = cls(length)
        result.counts = counts
        return result


class PrecacheOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer with one field more per request."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
        return {INFO_KEY: [asdict(state_of(req).counts or PromptCounts()) for req in reqs]}

    def is_request_level_customized_info_key(self, key: str) -> bool:
        return key == INFO_KEY
