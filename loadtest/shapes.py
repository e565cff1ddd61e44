"""Shapes of load: who the users are, what server they get, and what the run must keep."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precache_sglang.launch.traces import VOCABULARY
from report import Threshold, ThresholdError


@dataclass(frozen=True)
class Shape:
    """A mix of users.

    Attributes:
        users: The class in ``locustfile.py`` that ``--users`` counts.
        others: Classes of which there is one user each, beside them.
        server: Flags of the server that ``run.py`` starts.
        thresholds: Unless others are given. Chosen for two CPU cores with nothing else to do.
    """

    users: str
    others: tuple[str, ...]
    server: tuple[str, ...]
    thresholds: tuple[str, ...]

    @property
    def user_classes(self) -> list[str]:
        return [self.users, *self.others]


SHAPES = {
    # Agents at work, and an operator who changes adapters under them.
    "agents": Shape(
        "AgentUser",
        ("AdminUser", "WatchUser"),
        ("--max-total-tokens", "24000", "--max-running-requests", "16"),
        (
            *("errors<=0", "turns>=30", "cancelled>=1", "refused>=1", "loads>=3"),
            *("ttft_p50_s<=3", "ttft_p95_s<=12", "itl_p95_ms<=4000", "turn_p95_s<=30"),
            *("shared_share>=0.3", "health_max_s<=10", "backlog_age_max_s<=120", "drain_s<=60"),
        ),
    ),
    # Impatient users, contexts that several extend at once, pools too small for them.
    "soak": Shape(
        "ImpatientUser",
        ("WatchUser",),
        (
            *("--precache-max-neutral-wait", "50", "--chunked-prefill-size", "512"),
            *("--max-total-tokens", "9000", "--max-running-requests", "8"),
        ),
        (
            *("errors<=0", "turns>=1", "aborted>=1", "cancelled>=1"),
            *("backlog_age_max_s<=300", "drain_s<=180"),
        ),
    ),
}


def add_arguments(parser: Any) -> None:
    """What the users do and what they must see; the same flags for Locust and for `run.py`."""
    parser.add_argument("--mix", choices=list(SHAPES), default="agents", help="kind of users")
    parser.add_argument(
        "--trajectories", type=Path, help="JSONL file; default: the shipped ones, unless --traces"
    )
    parser.add_argument(
        "--traces", nargs="+", default=[], help="names or CSV files: turns of random tokens"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=VOCABULARY, help="token ids of traces lie below it"
    )
    parser.add_argument(
        "--think", type=float, default=10.0, help="mean seconds of a tool call or a user's pause"
    )
    parser.add_argument("--cancel-share", type=float, default=0.08, help="turns that are hung up")
    parser.add_argument(
        "--abort-share", type=float, default=0.2, help="of --mix soak: requests that are given up"
    )
    parser.add_argument(
        "--bad-name-share", type=float, default=0.05, help="turns first sent under a wrong name"
    )
    parser.add_argument("--visitor", type=Path, help="adapter that the admin loads and unloads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--thresholds",
        nargs="+",
        type=_threshold,
        metavar="FIGURE<=NUMBER",
        help="that set the exit status; default: those of the mix in shapes.py",
    )
    parser.add_argument("--out", type=Path, default=Path("loadtest-results"))


def thresholds(args: Any) -> list[Threshold]:
    """As given, or those of the mix."""
    return args.thresholds or [Threshold.parse(text) for text in SHAPES[args.mix].thresholds]


def forwarded(args: argparse.Namespace) -> list[str]:
    """The flags of `add_arguments` again, for another process."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags: list[str] = []
    for name in vars(parser.parse_args([])):
        value = getattr(args, name)
        if value not in (None, []):
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags


def _threshold(text: str) -> Threshold:
    try:
        return Threshold.parse(text)
    except ThresholdError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
