"""A load test in one command: starts a server, sends users to it, checks, reports, stops it.

    python loadtest/run.py --users 10 --minutes 5
    python loadtest/run.py --compare off nonshared prelrshared rebaseshared:auto
    python loadtest/run.py --mix soak --users 8 --minutes 10

`--mix agents` (the default): each user is a trajectory, whose roles take turns over one growing
context, hang up now and then, and get a name wrong; an admin loads and unloads an unrelated
adapter. `--mix soak`: impatient users on pools too small for them. The users are Locust's
(`locustfile.py`), one each for the admin and for monitoring beside `--users`.

Ends with a table and `report.html`. Status 1: an unexpected error, a broken threshold
(`--thresholds`), a slot that did not come back, or a traceback in the server's log. `--compare`
runs one server after the other and, unless `--thresholds` says more, expects no errors of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import report
import shapes
from precache_sglang.launch.demo import len_vocabulary
from precache_sglang.launch.keys import ADMIN_API_KEY, API_KEY
from precache_sglang.launch.model import ensure_demo_model, random_adapter, trace_adapters
from precache_sglang.launch.process import LONG_CONTEXT, ServerProcess
from precache_sglang.launch.traces import VOCABULARY
from precache_sglang.launch.variants import SYNTAX, Variant
from traces import Scripts

HERE = Path(__file__).parent
VISITOR_RANK = 4  # no more than the shipped adapters, whose ranks the server's buffers have
STOP_LIMIT = 120  # seconds that turns may take to end when the time is up


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5)
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--variant", type=Variant.parse, metavar=SYNTAX, help="of the one server")
    server.add_argument("--compare", nargs="+", type=Variant.parse, metavar=SYNTAX)
    server.add_argument(
        "--url",
        help=f"a running server (its keys: ${API_KEY}, ${ADMIN_API_KEY}), whose cache is flushed",
    )
    parser.add_argument("--model", type=Path, help="model folder; default: the demo model")
    parser.add_argument("--adapters", nargs="+", metavar="ROLE=PATH", help="default: shipped")
    shapes.add_arguments(parser)
    parser.add_argument("server_args", nargs="*", help="after --: more flags for the server")
    args = parser.parse_args()
    raise SystemExit(run(args))


def run(args: argparse.Namespace) -> int:
    if args.url:
        return load(args, args.url, args.out)
    model = args.model or ensure_demo_model()
    args.vocab_size = min(VOCABULARY, len_vocabulary(model))
    roles = Scripts.load(args.trajectories, args.traces, args.vocab_size).roles
    adapters: dict[str, Any] = (
        dict(item.split("=", 1) for item in args.adapters)
        if args.adapters
        else dict(trace_adapters(model, roles))
    )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.visitor is None:
        args.visitor = random_adapter(model, "visitor", args.out / "visitor", VISITOR_RANK)
    if not args.compare:
        return serve(args, args.variant or Variant("rebaseshared", "auto"), model, adapters)

    if not args.thresholds:
        args.thresholds = [report.Threshold.parse("errors<=0")]
    out, runs, status = args.out, {}, 0
    for variant in dict.fromkeys(args.compare):
        args.out = out / str(variant).replace(":", "-")
        status |= serve(args, variant, model, adapters)
        saved = args.out / "load.json"
        runs[str(variant)] = report.Run.read(saved) if saved.exists() else report.Run()
    about = (
        f"{args.users} users, {args.minutes:g} min each, mix {args.mix}, {date.today()}, "
        f"{os.cpu_count()} x {platform.machine()}"
    )
    page = report.page(runs, args.thresholds, about)
    (out / "report.html").write_text(page, encoding="utf-8")
    print(f"\n{about}\n{report.table(runs)}\n\nReport: {out / 'report.html'}")
    return status


def serve(args: argparse.Namespace, variant: Variant, model: Path, adapters: dict[str, Any]) -> int:
    """One server, one load. The status."""
    flags = [
        *variant.flags(),
        # Room for the visitor, and for requests without an adapter.
        *("--max-loras-per-batch", str(len(adapters) + 2)),
        *("--precache-team", f"agents={','.join(adapters)}"),
        *("--enable-cache-report", "--log-level", "warning"),
        *shapes.SHAPES[args.mix].server,
    ]
    print(f"[{variant}] starting the server", flush=True)
    with ServerProcess(model, adapters, flags + args.server_args, LONG_CONTEXT) as server:
        status = load(args, server.url, args.out)
        log = server.log()
        if not server.alive() or "Traceback" in log or "leak" in log.lower():
            print(f"WRONG: the server's log\n{server.log_tail()}")
            status = 1
    return status


def load(args: argparse.Namespace, url: str, out: Path) -> int:
    """Send the users to `url`. Locust's status."""
    shape = shapes.SHAPES[args.mix]
    out.mkdir(parents=True, exist_ok=True)
    (out / "load.json").unlink(missing_ok=True)  # of a run before this one
    command = [
        *(sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py"), *shape.user_classes),
        *("--headless", "--only-summary", "--host", url),
        *("--users", str(args.users + len(shape.others)), "--spawn-rate", "2"),
        *("--run-time", f"{60 * args.minutes:.0f}s", "--stop-timeout", str(STOP_LIMIT)),
        *("--html", str(out / "locust.html"), *shapes.forwarded(args)),
    ]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    main()
