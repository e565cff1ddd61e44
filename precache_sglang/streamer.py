"""Tells the user where the prompt's tokens came from (``meta_info["precache"]``), and why no
more of them from the cache (``meta_info["precache_match"]``)."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from precache_sglang.request import PromptCounts, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

INFO_KEY = "precache"
MATCH_KEY = "precache_match"


class PromptTokens(int):
    """A prompt length that remembers where the tokens came from, and the match."""

    counts: dict[str, int]
    match: dict[str, Any] | None

    @classmethod
    def of(
        cls, length: int, counts: dict[str, int], match: dict[str, Any] | None = None
    ) -> PromptTokens:
        result = cls(length)
        result.counts = counts
        result.match = match
        return result


class PrecacheOutputStreamer(SchedulerOutputStreamer):
    """SGLang's streamer with two fields more per request."""

    has_additional_customized_info = True

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
        states = [state_of(req) for req in reqs]
        return {
            INFO_KEY: [asdict(state.counts or PromptCounts()) for state in states],
            MATCH_KEY: [state.match.as_dict() if state.match else None for state in states],
        }

    def is_request_level_customized_info_key(self, key: str) -> bool:
        return key in (INFO_KEY, MATCH_KEY)
