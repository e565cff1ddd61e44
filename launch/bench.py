"""``precache-sglang bench``: methods side by side over controlled traces.

``single-stream``, one trajectory at a time, is here; ``serving``, many at once, in
`precache_sglang.launch.serving`; ``fidelity``, what sharing does to the answers, in
`precache_sglang.launch.fidelity`.

Every variant has a server, and every trace is replayed on it `--repeats` times, the cache
flushed in between. `--servers-at-once` of them are up together and take turns with every
repeat, in another order each time. TTFT counts from an agent's call, which follows the
neutral pass of the turn before it; total time includes the neutral passes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from precache_sglang.launch import fidelity, serving, variants
from precache_sglang.launch.model import ensure_demo_model, trace_adapters
from precache_sglang.launch.process import LONG_CONTEXT, ServerProcess
from precache_sglang.launch.replay import Replay, replay_trace
from precache_sglang.launch.report import (
    median_of,
    plot_by_trace,
    plot_ttft,
    table,
    table_by_trace,
    write_json,
)
from precache_sglang.launch.traces import VOCABULARY, load_trace, tokens_for, total_len
from precache_sglang.launch.variants import Variant

DEFAULT_VARIANTS = ("off", "nonshared", "fullshared", "baseshared", "prelrshared", "rebaseshared")


def bench(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="precache-sglang bench", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    single = commands.add_parser("single-stream", help="one trajectory at a time")
    single.add_argument("--traces", nargs="+", default=["5.0k"], help="names or CSV files")
    variants.add_argument(single, DEFAULT_VARIANTS)
    single.add_argument("--repeats", type=int, default=3)
    single.add_argument("--servers-at-once", type=int, default=3, help="about 4 GB of memory each")
    single.add_argument("--model", help="model folder; default: the demo model, built once")
    single.add_argument("--adapters", nargs="+", metavar="ROLE=PATH", help="default: shipped")
    single.add_argument("--dtype", default="bfloat16")
    single.add_argument("--out", type=Path, default=Path("bench-results"))
    single.add_argument("server_args", nargs="*", help="after --: more flags for the servers")
    many = commands.add_parser("serving", help="many trajectories at once")
    serving.add_arguments(many)
    faithful = commands.add_parser(
        "fidelity", help="how far sharing moves the answers", description=fidelity.__doc__
    )
    fidelity.add_arguments(faithful)
    args = parser.parse_args(argv)
    if args.what == "serving":
        serving.serving(args)
    elif args.what == "fidelity":
        fidelity.fidelity(args)
    else:
        single_stream(args)


def single_stream(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run the comparison; print and save it. Returns trace -> method -> medians."""
    model = Path(args.model) if args.model else ensure_demo_model()
    traces = {Path(name).name.removesuffix(".csv"): load_trace(name) for name in args.traces}
    if len(traces) < len(args.traces):
        raise SystemExit(f"--traces {' '.join(args.traces)}: two of them have one name")
    agents = {turn.agent for trace in traces.values() for turn in trace}
    adapters = (
        dict(item.split("=", 1) for item in args.adapters)
        if args.adapters
        else trace_adapters(model, agents)
    )
    longest = max(total_len(trace) for trace in traces.values())
    compared = list(dict.fromkeys(args.variants))
    runs: dict[str, dict[str, list[Replay]]] = {name: {} for name in traces}
    args.out.mkdir(parents=True, exist_ok=True)
    for group in _groups(compared, args.servers_at_once):
        with contextlib.ExitStack() as stack:
            servers = {}
            for variant in group:
                flags = server_flags(variant, longest, len(adapters), args.dtype)
                print(f"[{variant}] starting the server", flush=True)
                server = ServerProcess(model, adapters, flags + args.server_args, LONG_CONTEXT)
                servers[str(variant)] = stack.enter_context(server)
                warm_up(server, list(adapters))
            for name, trace in traces.items():
                for repeat in range(args.repeats):
                    tokens = tokens_for(trace, VOCABULARY, seed=repeat)
                    for running in variants.rotated(list(servers), repeat):
                        replay = replay_trace(servers[running], trace, tokens)
                        runs[name].setdefault(running, []).append(replay)
                        print(
                            f"[{running}] {name} run {repeat + 1}/{args.repeats}: TTFT "
                            f"{replay.ttft_ms / 1e3:.2f} s, total {replay.total_ms / 1e3:.2f} s",
                            flush=True,
                        )
                # A long comparison that is cut short keeps what it has.
                _save(args, runs)
    results = _save(args, runs)
    for name, by_variant in results.items():
        print(f"\ntrace {name}, medians of {args.repeats}, {args.dtype}\n{table(by_variant)}")
        plot_ttft(by_variant, f"TTFT by turn, trace {name}", args.out / f"ttft_{name}.png")
    if len(results) > 1:
        print(f"\nTTFT in seconds (nonshared / this), by trace\n{table_by_trace(results)}")
        plot_by_trace(results, args.out / "ttft_by_trace.png")
    print(f"\nNumbers and plots: {args.out}")
    return results


def _groups(compared: list[Variant], size: int) -> Iterator[list[Variant]]:
    if size < 1:
        raise SystemExit(f"--servers-at-once {size}: give at least 1")
    for start in range(0, len(compared), size):
        yield compared[start : start + size]


def _save(
    args: argparse.Namespace, runs: dict[str, dict[str, list[Replay]]]
) -> dict[str, dict[str, Any]]:
    results = {
        name: {variant: median_of(replays) for variant, replays in by_variant.items()}
        for name, by_variant in runs.items()
    }
    write_json(
        args.out / "single_stream.json",
        {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, {args.dtype}",
            "repeats": args.repeats,
            "servers_at_once": args.servers_at_once,
            "traces": results,
        },
    )
    return results


def server_flags(variant: Variant, longest: int, num_adapters: int, dtype: str) -> list[str]:
    """Flags for a comparison: room for the whole trajectory of every role, one dtype."""
    return [
        *variant.flags(),
        *("--dtype", dtype),
        *("--context-length", str(longest + variants.SPARE_TOKENS)),
        *("--max-total-tokens", str(variants.room_for_all(longest, num_adapters))),
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
