"""What a load test saw: records, figures, thresholds, table and page. No network, no Locust."""

from __future__ import annotations

import html
import io
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from precache_sglang.launch.serving import percentile

ORIGINS = ("shared", "own", "replayed", "computed")


class ThresholdError(ValueError):
    """A threshold cannot be read; the message says why."""


@dataclass
class Turn:
    """One answer that came whole. Times in seconds; `at` counts from the start of the run.

    `gaps_s` lie between events of the stream: tokens that come together are one.
    `shared`, `own`, `replayed` and `computed` say where the prompt's tokens came from, as in
    ``usage.precache``; stock SGLang knows only `own` and `computed`.
    """

    role: str
    at: float
    ttft_s: float
    turn_s: float
    gaps_s: list[float]
    prompt_tokens: int
    output_tokens: int
    shared: int
    own: int
    replayed: int
    computed: int


@dataclass
class Failure:
    """What should not have happened. `request` has lengths in the place of prompts."""

    what: str
    request: Any
    status: int | None
    body: str


@dataclass
class Sample:
    """A look at the server while the load ran."""

    at: float
    health_s: float
    backlog_tokens: int = 0
    backlog_age_s: float = 0.0
    provisional_tokens: int = 0
    base_tokens_in_use: int = 0


@dataclass
class Run:
    """All that one run saw.

    Attributes:
        counts: How often what is not a turn happened: ``cancelled`` (hung up in mid-stream),
            ``aborted``, ``refused`` (a bad name), ``loads``, ``trajectories`` that came to
            their end.
        pools: Whether and how they were checked after the load, see `client.settle`.
    """

    duration_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    pools: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Run:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            values["duration_s"],
            [Turn(**turn) for turn in values["turns"]],
            [Sample(**sample) for sample in values["samples"]],
            [Failure(**failure) for failure in values["failures"]],
            Counter(values["counts"]),
            values["pools"],
        )

    def write(self, path: Path) -> None:
        # asdict makes nonsense of a Counter.
        values = asdict(self) | {"counts": dict(self.counts)}
        path.write_text(json.dumps(values) + "\n", encoding="utf-8")

    @property
    def roles(self) -> list[str]:
        return sorted({turn.role for turn in self.turns})


# -- figures -----------------------------------------------------------------

# Figures, as thresholds name them. NaN where there is nothing to measure.
FIGURES = {
    "turns": "answers that came whole",
    "turns_per_minute": "",
    "trajectories": "that came to their end",
    "ttft_p50_s": "from the sending of a request to its first token",
    "ttft_p95_s": "",
    "itl_p50_ms": "between tokens of an answer",
    "itl_p95_ms": "",
    "turn_p50_s": "from the sending of a request to its last token",
    "turn_p95_s": "",
    "tokens_per_s": "output tokens of all users",
    "shared_share": "of the prompt tokens, read from what another role fed",
    "computed_share": "of the prompt tokens, computed",
    "cancelled": "hung up in mid-stream",
    "aborted": "by /abort_request",
    "refused": "bad names answered with a 4xx",
    "loads": "of an unrelated adapter, each with an unload",
    "errors": "anything else",
    "health_max_s": "longest answer of /health",
    "backlog_max_tokens": "neutral tokens owed",
    "backlog_age_max_s": "age of what is owed",
    "drain_s": "until nothing was owed after the load",
}


def figures(run: Run, role: str | None = None) -> dict[str, float]:
    """Everything in `FIGURES`; with `role`, only what its turns say."""
    turns = [turn for turn in run.turns if role in (None, turn.role)]
    gaps = [1e3 * gap for turn in turns for gap in turn.gaps_s]
    prompt = sum(turn.prompt_tokens for turn in turns)

    def share(origin: str) -> float:
        return sum(getattr(turn, origin) for turn in turns) / prompt if prompt else math.nan

    def quantile(values: Sequence[float], p: int) -> float:
        return percentile(values, p) if values else math.nan

    found: dict[str, float] = {"turns": len(turns)}
    for name, unit, values in (
        ("ttft", "s", [turn.ttft_s for turn in turns]),
        ("itl", "ms", gaps),
        ("turn", "s", [turn.turn_s for turn in turns]),
    ):
        found |= {f"{name}_p{p}_{unit}": quantile(values, p) for p in (50, 95)}
    found |= {f"{origin}_share": share(origin) for origin in ORIGINS}
    if role is not None:
        return found
    minutes = run.duration_s / 60
    tokens = sum(turn.output_tokens for turn in turns)
    return found | {
        "turns_per_minute": len(turns) / minutes if minutes else math.nan,
        "tokens_per_s": tokens / run.duration_s if minutes else math.nan,
        **{
            name: run.counts[name]
            for name in ("trajectories", "cancelled", "aborted", "refused", "loads")
        },
        "errors": len(run.failures),
        "health_max_s": max((sample.health_s for sample in run.samples), default=math.nan),
        "backlog_max_tokens": max((s.backlog_tokens for s in run.samples), default=math.nan),
        "backlog_age_max_s": max((s.backlog_age_s for s in run.samples), default=math.nan),
        "drain_s": run.pools.get("drain_s", math.nan),
    }


@dataclass(frozen=True)
class Threshold:
    """What a run must keep, such as ``ttft_p95_s<=8``."""

    name: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*(\d+(?:\.\d+)?)\s*", text)
        if match is None:
            raise ThresholdError(f"{text!r} is no threshold; write NAME<=NUMBER or NAME>=NUMBER")
        name, sign, limit = match.groups()
        if name not in FIGURES:
            raise ThresholdError(f"{text!r}: {name!r} is none of {', '.join(FIGURES)}")
        return cls(name, sign, float(limit))

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.limit:g}"

    def kept(self, found: Mapping[str, float]) -> bool:
        """False too where there was nothing to measure."""
        value = found[self.name]
        return value <= self.limit if self.sign == "<=" else value >= self.limit


def wrong(run: Run, thresholds: Sequence[Threshold]) -> list[str]:
    """Why the run fails; empty if it does not."""
    found = figures(run)
    broken = [
        f"{threshold.name} is {number(found[threshold.name])}, must be "
        f"{threshold.sign} {threshold.limit:g}"
        for threshold in thresholds
        if not threshold.kept(found)
    ]
    return broken + [f"pools: {problem}" for problem in run.pools.get("problems", [])]


# -- text --------------------------------------------------------------------

_COLUMNS = {
    "turns_per_minute": "turns/min",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_p95_s": "p95",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p95_ms": "p95",
    "turn_p50_s": "turn p50 s",
    "turn_p95_s": "p95",
    "tokens_per_s": "tokens/s",
    "shared_share": "shared",
    "computed_share": "computed",
    "errors": "errors",
    "drain_s": "drain s",
}
_ROLE_COLUMNS = {
    "turns": "turns",
    "ttft_p50_s": "TTFT p50 s",
    "ttft_p95_s": "p95",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p95_ms": "p95",
    "turn_p50_s": "turn p50 s",
    "turn_p95_s": "p95",
    **{f"{origin}_share": origin for origin in ORIGINS},
}


def number(value: float, name: str = "") -> str:
    """`value` for people; shares in per cent."""
    if math.isnan(value):
        return "-"
    if name.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.2f}"


def _rows(found: Mapping[str, Mapping[str, float]], columns: Mapping[str, str]) -> list[list[str]]:
    return [
        [name, *(number(values[column], column) for column in columns)]
        for name, values in found.items()
    ]


def _text(rows: list[list[str]], header: list[str]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table(runs: Mapping[str, Run]) -> str:
    """One line for each run."""
    found = {name: figures(run) for name, run in runs.items()}
    return _text(_rows(found, _COLUMNS), ["", *_COLUMNS.values()])


def table_by_role(run: Run) -> str:
    """One line for each role."""
    found = {role: figures(run, role) for role in run.roles}
    return _text(_rows(found, _ROLE_COLUMNS), ["role", *_ROLE_COLUMNS.values()])


# -- page --------------------------------------------------------------------

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 78em; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border-bottom: 1px solid #ccc; padding: .2em .7em; text-align: right }
th:first-child, td:first-child { text-align: left }
.bar { display: flex; height: 1.3em; width: 30em; max-width: 100%; border: 1px solid #555;
  text-align: left }
.bar span { overflow: hidden; white-space: nowrap; font-size: 12px; padding-left: 2px }
.shared { background: #8fd19e } .own { background: #9ec5fe }
.replayed { background: #ffe69c } .computed { background: #f1aeb5 }
.wrong { border-left: .5em solid #b02a37; padding-left: .7em }
.right { border-left: .5em solid #198754; padding-left: .7em }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .7em }
svg { max-width: 100%; height: auto }
"""


def page(runs: Mapping[str, Run], thresholds: Sequence[Threshold], about: str) -> str:
    """The report as one HTML file that needs nothing else. `about`: how the runs were made."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>precache-sglang load test</title>",
        f"<style>{_STYLE}</style><h1>Load test</h1><p>{html.escape(about)}</p>",
    ]
    found = {name: figures(run) for name, run in runs.items()}
    parts.append(_html_table(_rows(found, _COLUMNS), ["", *_COLUMNS.values()]))
    parts.append("<h2>Share of the prompt tokens of each role, by where they came from</h2>")
    for name, run in runs.items():
        parts.append(f"<h3>{html.escape(name)}</h3>{_shares(run)}")
    for name, run in runs.items():
        parts.append(_section(name, run, thresholds))
    return "\n".join(parts) + "</html>\n"


def _shares(run: Run) -> str:
    rows = []
    for role in run.roles:
        shares = {origin: figures(run, role)[f"{origin}_share"] for origin in ORIGINS}
        bar = "".join(
            f"<span class={origin} style='width:{100 * share:.1f}%'>{origin}</span>"
            for origin, share in shares.items()
            if share > 0
        )
        cells = "".join(f"<td>{share:.1%}</td>" for share in shares.values())
        rows.append(f"<tr><td>{html.escape(role)}</td>{cells}<td><div class=bar>{bar}</div></td>")
    header = "".join(f"<th>{title}</th>" for title in ("role", *ORIGINS, ""))
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"


def _section(name: str, run: Run, thresholds: Sequence[Threshold]) -> str:
    found = figures(run)
    problems = wrong(run, thresholds)
    verdict = (
        "<ul class=wrong>" + "".join(f"<li>{html.escape(p)}</li>" for p in problems) + "</ul>"
        if problems
        else "<p class=right>Every threshold was kept.</p>"
    )
    checks = [
        [str(t), number(found[t.name], t.name), "kept" if t.kept(found) else "BROKEN"]
        for t in thresholds
    ]
    all_figures = [[key, number(found[key], key), text] for key, text in FIGURES.items()]
    by_role = _rows({role: figures(run, role) for role in run.roles}, _ROLE_COLUMNS)
    failures = "".join(
        f"<pre>{html.escape(json.dumps(asdict(failure), indent=1))}</pre>"
        for failure in run.failures[:50]
    )
    return "\n".join(
        [
            f"<h2>{html.escape(name)}</h2>{verdict}",
            _html_table(checks, ["threshold", "found", ""]) if checks else "",
            _html_table(by_role, ["role", *_ROLE_COLUMNS.values()]),
            _chart(run) if run.turns else "",
            f"<h3>Pools</h3><p>{html.escape(pools_text(run))}</p>",
            f"<h3>{len(run.failures)} unexpected errors</h3>{failures}",
            "<h3>All figures</h3>" + _html_table(all_figures, ["figure", "", "what"]),
        ]
    )


def pools_text(run: Run) -> str:
    """What `client.settle` found."""
    pools = run.pools
    if not pools:
        return "Not checked."
    if problems := pools["problems"]:
        return "; ".join(problems)
    if pools["after_drain"] is None:
        return "Stock SGLang does not report its pools; it was idle and its cache was flushed."
    held = pools["after_drain"]
    return (
        f"Nothing was owed {pools['drain_s']:.1f} s after the load; then {held['base_tokens']} "
        f"tokens and {held['lr_slots_in_use']} low-rank slots were in the cache, and nothing "
        "else was held. After a flush all of both pools was free."
    )


def _html_table(rows: list[list[str]], header: list[str]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _chart(run: Run) -> str:
    """TTFT of every turn over time, and what the server owed and held; inline SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(11, 6), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    for role, marker in zip(run.roles, "osD^vP*X" * len(run.roles), strict=False):
        turns = [turn for turn in run.turns if turn.role == role]
        upper.plot([t.at for t in turns], [t.ttft_s for t in turns], marker, label=role, alpha=0.7)
    upper.set_yscale("log")
    upper.set_ylabel("TTFT [s]")
    upper.legend()
    at = [sample.at for sample in run.samples]
    for name, style in (
        ("base_tokens_in_use", "-"),
        ("backlog_tokens", "--"),
        ("provisional_tokens", ":"),
    ):
        lower.plot(at, [getattr(sample, name) for sample in run.samples], style, label=name)
    lower.set_ylabel("tokens")
    lower.set_xlabel("time [s]")
    lower.legend()
    for axes in (upper, lower):
        axes.grid(True, alpha=0.3)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
