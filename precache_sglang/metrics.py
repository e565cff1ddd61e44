"""Counters of one scheduler process, reported by ``GET /precache/state``."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Stats:
    """Totals since start-up; tokens unless the name says otherwise.

    Attributes:
        shared, own, replayed, computed: Prompt tokens by where they came from.
        neutral: Tokens computed by neutral passes.
        neutral_beside: Those of them that rode along in the steps of users' requests.
        neutral_steps: Scheduler steps given to neutral passes.
        provisional: Tokens published provisionally.
        rebased: Those of them that a neutral pass has replaced.
        dropped_neutral: Neutral tokens given up because the pool was full.
        dropped_rows: LR slots of other roles that were not written for lack of room.
        conflicts: Turns that stopped publishing because another role published other
            base KV for the same tokens first.
        evicted_base: Base slots evicted from the tree.
        evicted_rows, evicted_slices: LR slots and slices evicted on their own.
    """

    shared: int = 0
    own: int = 0
    replayed: int = 0
    computed: int = 0
    neutral: int = 0
    neutral_beside: int = 0
    neutral_steps: int = 0
    provisional: int = 0
    rebased: int = 0
    dropped_neutral: int = 0
    dropped_rows: int = 0
    conflicts: int = 0
    evicted_base: int = 0
    evicted_rows: int = 0
    evicted_slices: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
