"""Figures of one scheduler process, for ``GET /precache/state`` and for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precache_sglang.runtime import Runtime

_EXPORT_EVERY = 1.0  # seconds
_GAUGES = {
    "backlog_tokens": "Neutral tokens owed for finished turns",
    "backlog_age_s": "Seconds for which the oldest neutral work has been owed",
    "provisional_tokens": "Cached tokens that a neutral pass is to replace",
    "own_base_tokens": "Tokens that have base KV of their role's own pass beside neutral base KV",
    "shadow_tokens": "Neutral tokens computed beside running turns, not published yet",
    "base_tokens": "Tokens in the prefix cache",
    "lr_slots_in_use": "Low-rank slots in use",
}


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
        evicted_own: Own base slots evicted.
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
    evicted_own: int = 0
    evicted_base: int = 0
    evicted_rows: int = 0
    evicted_slices: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Exporter:
    """Prometheus metrics under ``precache_``, beside SGLang's, renewed once a second.

    Totals are counters, ``precache_neutral_total`` and so on; what is so now are gauges.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        # SGLang chooses the directory of multi-process metrics before it starts a scheduler,
        # and prometheus_client looks for it when it is imported.
        from prometheus_client import Counter, Gauge

        def gauge(name: str, text: str) -> Any:
            metric = Gauge(
                f"precache_{name}", text, labelnames=list(labels), multiprocess_mode="mostrecent"
            )
            return metric.labels(**labels)

        self._gauges = {name: gauge(name, text) for name, text in _GAUGES.items()}
        self._counters = {
            name: Counter(
                f"precache_{name}", f"{name} of precache_sglang.metrics.Stats", list(labels)
            ).labels(**labels)
            for name in Stats().as_dict()
        }
        self._counted = Stats().as_dict()
        self._next = 0.0

    def update(self, runtime: Runtime) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EXPORT_EVERY
        for name, value in runtime.gauges().items():
            self._gauges[name].set(value)
        totals = runtime.stats.as_dict()
        for name, counter in self._counters.items():
            counter.inc(totals[name] - self._counted[name])
        self._counted = totals
