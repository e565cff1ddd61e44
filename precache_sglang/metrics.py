"""Figures of one scheduler process, for ``GET /precache/state``, Prometheus and the live page."""

from __future__ import annotations

import bisect
import itertools
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from precache_sglang.request import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from precache_sglang.runtime import Runtime

_EXPORT_EVERY = 1.0  # seconds
_SAMPLE_EVERY = 3.0  # seconds
_NUM_SAMPLES = 120
# Seconds. SGLang's own first bucket of TTFT, 0.1, would hold every prompt that is shared.
_TTFT_BOUNDS = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
)
_ITL_BOUNDS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0),
)

# What stands for a role's name where there is none, and where there are too many.
NO_ROLE = "(base)"
OTHER_ROLES = "other"
RESERVED = (NO_ROLE, OTHER_ROLES)
_MAX_NAME = 80  # characters

SOURCES = ("shared", "own", "replayed", "computed")

_GAUGES = {
    "backlog_tokens": "Neutral tokens owed for finished turns",
    "backlog_age_s": "Seconds for which the oldest neutral work has been owed",
    "provisional_tokens": "Cached tokens that a neutral pass is to replace",
    "own_base_tokens": "Tokens that have base KV of their role's own pass beside neutral base KV",
    "shadow_tokens": "Neutral tokens computed beside running turns, not published yet",
    "tree_nodes": "Nodes of the prefix cache",
    "base_tokens": "Tokens in the prefix cache",
    "base_tokens_in_use": "KV slots in use, by the prefix cache, running turns and the backlog",
    "base_pool_tokens": "KV slots that there are",
    "lr_slots_in_use": "Low-rank slots in use",
    "lr_pool_slots": "Low-rank slots that there are",
}
_COUNTERS = {
    "neutral_steps": "Scheduler steps given to neutral passes",
    "provisional": "Tokens published provisionally",
    "rebased": "Provisional tokens that a neutral pass has replaced",
    "dropped_neutral": "Neutral tokens given up because the pool was full",
    "dropped_rows": "Low-rank slots of other roles not written for lack of room",
    "conflicts": "Turns that stopped publishing: another role was first with the same tokens",
    "evicted_own": "KV slots of roles' own base evicted",
    "evicted_base": "KV slots evicted from the prefix cache",
    "evicted_nodes": "Nodes evicted from the prefix cache",
    "evicted_rows": "Low-rank slots evicted on their own",
    "evicted_slices": "Slices evicted on their own",
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
        evicted_base, evicted_nodes: Base slots and nodes evicted from the tree.
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
    evicted_nodes: int = 0
    evicted_rows: int = 0
    evicted_slices: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Histogram:
    """Observations by bucket, as Prometheus counts them.

    Attributes:
        bounds: Upper bounds, ascending; one bucket more holds what is above the last.
        counts: Observations of each bucket, not cumulative.
        sum: Of all observations.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """Interpolated in its bucket; the last bound at most. None without observations."""
        rank = q * self.count
        below = 0
        for index, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                lower = self.bounds[index - 1] if index else 0.0
                return lower + (self.bounds[index] - lower) * (rank - below) / count
            below += count
        return self.bounds[-1] if self.counts[-1] else None

    def as_dict(self) -> dict[str, float | None]:
        """Milliseconds, and the number of observations."""
        count = self.count

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1e3, 2)

        return {
            "count": count,
            "mean_ms": ms(self.sum / count) if count else None,
            "p50_ms": ms(self.quantile(0.5)),
            "p95_ms": ms(self.quantile(0.95)),
            "p99_ms": ms(self.quantile(0.99)),
        }


@dataclass(eq=False)
class RoleTotals:
    """Of one role since start-up; internal requests are never counted.

    Attributes:
        requests: Prompts admitted.
        shared, own, replayed, computed: Their tokens by where they came from.
        output: Tokens sampled.
        ttft: Seconds from a request's arrival at the HTTP server to its first token, waits
            included.
        itl: Seconds between tokens of one answer.
        new_ttft: What `History` has not sampled yet.
    """

    requests: int = 0
    shared: int = 0
    own: int = 0
    replayed: int = 0
    computed: int = 0
    output: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(_TTFT_BOUNDS))
    itl: Histogram = field(default_factory=lambda: Histogram(_ITL_BOUNDS))
    new_ttft: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            **{source: getattr(self, source) for source in SOURCES},
            "output": self.output,
            "ttft": self.ttft.as_dict(),
            "itl": self.itl.as_dict(),
        }


class RoleTable:
    """Totals by role name. Names come from whoever loads adapters, so their number is bounded.

    The first `limit` names have a row each; what comes later, or is very long, shares one. A
    row stays when its adapter is unloaded, as a counter of Prometheus does.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows: dict[str, RoleTotals] = {}

    def __contains__(self, label: str) -> bool:
        return label in self._rows

    def label(self, name: str | None) -> str:
        """The row that counts for a role, made if there is none; None is "without an adapter"."""
        if name is None:
            label = NO_ROLE
        else:
            num_named = len(self._rows.keys() - {*RESERVED})
            has_place = name in self._rows or num_named < self.limit
            is_good = has_place and name not in RESERVED and len(name) <= _MAX_NAME
            label = name if is_good else OTHER_ROLES
        self._rows.setdefault(label, RoleTotals())
        return label

    def of(self, name: str | None) -> RoleTotals:
        return self._rows[self.label(name)]

    def items(self) -> Iterable[tuple[str, RoleTotals]]:
        return self._rows.items()

    def note_tokens(self, reqs: Iterable[Req]) -> None:
        """A step of users' requests is over: count what it sampled, and the time it took."""
        now = time.perf_counter()  # SGLang's clock of requests
        # Most requests of a step had their last token in one step, too.
        intervals: Counter[tuple[RoleTotals, float]] = Counter()
        for req in reqs:
            state = state_of(req)
            row, new = state.totals, len(req.output_ids) - state.num_output
            if row is None or new <= 0:
                continue
            row.output += new
            if state.token_time:
                intervals[row, state.token_time] += new
            elif arrived := req.time_stats.created_time:
                row.ttft.observe(now - arrived)
                row.new_ttft.append(now - arrived)
            state.num_output += new
            state.token_time = now
        for (row, before), count in intervals.items():
            row.itl.observe(now - before, count)


class History:
    """The last minutes, in samples a few seconds apart, for the live page."""

    def __init__(self) -> None:
        self.samples: deque[dict[str, Any]] = deque(maxlen=_NUM_SAMPLES)
        self._serial = itertools.count(1)
        self._next = 0.0
        self._prompts: dict[str, tuple[int, int]] = {}

    def update(self, runtime: Runtime) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SAMPLE_EVERY
        gauges = runtime.gauges()
        self.samples.append(
            {
                "serial": next(self._serial),
                "time": round(time.time(), 1),
                "roles": dict(self._roles(runtime.by_role)),
                **{
                    name: gauges[name]
                    for name in (
                        *("backlog_tokens", "provisional_tokens"),
                        *("base_tokens_in_use", "lr_slots_in_use"),
                    )
                },
            }
        )

    def _roles(self, table: RoleTable) -> Iterator[tuple[str, dict[str, Any]]]:
        """What each role did since the last sample; nothing for those that did nothing."""
        for name, row in table.items():
            before_all, before_hit = self._prompts.get(name, (0, 0))
            hit = row.shared + row.own
            prompt = hit + row.replayed + row.computed
            ttft, row.new_ttft = row.new_ttft, []
            self._prompts[name] = (prompt, hit)
            if prompt > before_all or ttft:
                yield (
                    name,
                    {
                        "prompt": prompt - before_all,
                        "hit": hit - before_hit,
                        "ttft_ms": round(statistics.median(ttft) * 1e3, 1) if ttft else None,
                    },
                )


class Exporter:
    """Prometheus metrics under ``precache_``, beside SGLang's, renewed once a second.

    What is so now are gauges, totals are counters. What a role does has the label ``role``;
    `RoleTable` bounds its values.
    """

    def __init__(self, labels: Mapping[str, Any], schedule: str) -> None:
        # SGLang chooses the directory of multi-process metrics before it starts a scheduler,
        # and prometheus_client looks for it when it is imported.
        from prometheus_client import Counter, Gauge
        from prometheus_client import Histogram as PrometheusHistogram

        self._labels = labels
        self._schedule = schedule
        names = list(labels)

        def gauge(name: str, text: str, *more: str) -> Any:
            return Gauge(
                f"precache_{name}", text, labelnames=[*names, *more], multiprocess_mode="mostrecent"
            )

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(f"precache_{name}", text, [*names, *more])

        self._gauges = {name: gauge(name, text).labels(**labels) for name, text in _GAUGES.items()}
        self._counters = {name: counter(name, text) for name, text in _COUNTERS.items()}
        self._counters["neutral"] = counter(
            "neutral",
            "Tokens computed by neutral passes, in steps of their own or beside users' tokens",
            "schedule",
            "where",
        )
        for name, text, *more in (
            ("requests", "Prompts admitted", "role"),
            ("prompt_tokens", "Prompt tokens by where they came from", "role", "source"),
            ("output_tokens", "Tokens sampled", "role"),
        ):
            self._counters[name] = counter(name, text, *more)
        self._histograms = {
            "ttft": PrometheusHistogram(
                "precache_ttft_seconds",
                "From a request's arrival to its first token, waits included",
                [*names, "role"],
                buckets=_TTFT_BOUNDS,
            ),
            "itl": PrometheusHistogram(
                "precache_itl_seconds",
                "Between tokens of one answer",
                [*names, "role"],
                buckets=_ITL_BOUNDS,
            ),
        }
        self._lr_bytes = gauge("lr_bytes", "Bytes of low-rank rows in the prefix cache", "role")
        self._exported: dict[tuple[Any, ...], float] = {}
        self._with_rows: set[str] = set()
        self._next = 0.0

    def update(self, runtime: Runtime) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EXPORT_EVERY
        for name, value in runtime.gauges().items():
            self._gauges[name].set(value)
        totals = runtime.stats.as_dict()
        for name in _COUNTERS:
            self._count(name, totals[name])
        beside = totals["neutral_beside"]
        for where, total in (("beside", beside), ("alone", totals["neutral"] - beside)):
            self._count("neutral", total, schedule=self._schedule, where=where)
        for role, row in runtime.by_role.items():
            self._count("requests", row.requests, role=role)
            self._count("output_tokens", row.output, role=role)
            for source in SOURCES:
                self._count("prompt_tokens", getattr(row, source), role=role, source=source)
            self._observe("ttft", row.ttft, role)
            self._observe("itl", row.itl, role)
        rows = runtime.lr_bytes_by_role()
        for role in self._with_rows | rows.keys():
            self._lr_bytes.labels(**self._labels, role=role).set(rows.get(role, 0))
        self._with_rows |= rows.keys()

    def _count(self, name: str, total: int, **labels: str) -> None:
        self._counters[name].labels(**self._labels, **labels).inc(
            self._growth((name, *labels.values()), total)
        )

    def _observe(self, name: str, histogram: Histogram, role: str) -> None:
        """Add many observations at once; `observe` takes one. SGLang does it in the same way."""
        child = self._histograms[name].labels(**self._labels, role=role)
        child._sum.inc(self._growth((name, role, "sum"), histogram.sum))
        for index, count in enumerate(histogram.counts):
            child._buckets[index].inc(self._growth((name, role, index), count))

    def _growth(self, key: tuple[Any, ...], total: float) -> float:
        growth = total - self._exported.get(key, 0)
        self._exported[key] = total
        return growth
