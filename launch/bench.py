"""``precache-sglang bench``: methods side by side over controlled traces.

``single-stream``, one trajectory at a time, is here; ``serving``, many at once, in
`precache_sglang.launch.serving`.

For every method one server; on it every trace `--repeats` times, the cache flushed in
between. TTFT counts from an agent's call, which follows the neutral pass of the turn
before it; total time includes the neutral passes.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from precache_sglang.launch import serving
from precache_sglang.launch.model import ensure_demo_model, trace_adapters
from precache_sglang.launch.process import LONG_CONTEXT, ServerProcess
from precache_sglang.launch.replay import Replay, replay_trace
from precache_sglang.launch.report import median_of, plot_ttft, table, write_json
from precache_sglang.launch.traces import VOCABULARY, load_trace, tokens_for, total_len

from precache_sglang.methods import METHODS, OFF

DEFAULT_METHODS = ("off", "nonshared", "fullshared", "baseshared", "prelrshared", "rebaseshared")


def bench(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="precache-sglang bench", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    single = commands.add_parser("single-stream", help="one trajectory at a time")
    single.add_argument("--traces", nargs="+", default=["5.0k"], help="names or CSV files")
    single.add_argument(
        "--methods", nargs="+", default=list(DEFAULT_METHODS), choices=[*METHODS, OFF]
    )
    single.add_argument("--repeats", type=int, default=3)
    single.add_argument("--model", help="model folder; default: the demo model, built once")
    single.add_argument("--adapters", nargs="+", metavar="ROLE=PATH", help="default: shipped")
    single.add_argument("--dtype", default="bfloat16")
    single.add_argument("--out", type=Path, default=Path("bench-results"))
    single.add_argument("server_args", nargs="*", help="after --: more flags for the servers")
    many = commands.add_parser("serving", help="many trajectories at once")
    serving.add_arguments(many)
    args = parser.parse_args(argv)
    if args.what == "serving":
        serving.serving(args)
    else:
        single_stream(args)


def single_stream(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run the comparison; print and save it. Returns trace -> method -> medians."""
    model = Path(args.model) if args.model else ensure_demo_model()
    traces = {name: load_trace(name) for name in args.traces}
    agents = {turn.agent for trace in traces.values() for turn in trace}
    adapters = (
        dict(item.split("=", 1) for item in args.adapters)
        if args.adapters
        else trace_adapters(model, agents)
    )
    longest = max(total_len(trace) for trace in traces.values())
    runs: dict[str, dict[str, list[Replay]]] = {name: {} for name in traces}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    for method in args.methods:
        flags = server_flags(method, longest, len(adapters), args.dtype) + args.server_args
        print(f"[{method}] starting the server", flush=True)
        with ServerProcess(model, adapters, flags, env=LONG_CONTEXT) as server:
            warm_up(server, list(adapters))
            for name, trace in traces.items():
                for repeat in range(args.repeats):
                    replay = replay_trace(server, trace, tokens_for(trace, VOCABULARY, seed=repeat))
                    runs[name].setdefault(method, []).append(replay)
                    print(
                        f"[{method}] {name} run {repeat + 1}/{args.repeats}: "
                        f"TTFT {replay.ttft_ms / 1e3:.2f} s, total {replay.total_ms / 1e3:.2f} s",
                        flush=True,
                    )
        # Written after every method: a long comparison that is cut short keeps what it has.
        results = {
            name: {done: median_of(replays) for done, replays in by_method.items()}
            for name, by_method in runs.items()
        }
        write_json(
            args.out / "single_stream.json",
            {
                "date": date.today().isoformat(),
                "machine": f"{os.cpu_count()} x {platform.machine()}, {args.dtype}",
                "repeats": args.repeats,
                "traces": results,
            },
        )
    for name, by_method in results.items():
        print(f"\ntrace {name}, medians of {args.repeats}, {args.dtype}\n{table(by_method)}")
        plot_ttft(by_method, f"TTFT by turn, trace {name}", args.out / f"ttft_{name}.png")
    print(f"\nNumbers and plots: {args.out}")
    return results


def server_flags(method: str, longest: int, num_adapters: int, dtype: str) -> list[str]:
    """Flags for a comparison: room for the whole trajectory of every role, one dtype."""
    context = longest + 512
    tokens = context * (num_adapters + 1)
    return [
        *("--precache-method", method),
        *("--dtype", dtype),
        *("--context-length", str(context)),
        *("--max-total-tokens", str(tokens)),
        *("--max-running-requests", "8"),
        *("--max-loras-per-batch", str(num_adapters + 1)),
        *("--log-level", "warning"),
    ]


def warm_up(server: ServerProcess, roles: list[str]) -> None:
    """Load every adapter into SGLang's buffers and touch every path once."""
    for role in roles:
        server.post(
            "/generate",
            {
                "input_ids": list(range(100, 164)),
                "lora_path": role,
                "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
            },
        )
