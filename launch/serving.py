"""``precache-sglang bench serving``: many trajectories at once against a server.

Open loop: trajectories start at Poisson times, so that on average `--rates` requests arrive
each second. Closed loop: `--concurrency` clients, each of which starts its next trajectory as
its last one ends. Within a trajectory a turn is sent when the turn before it has ended. TTFT
counts from the sending of a request, waits for neutral passes included.

All servers are up at once and idle but for one. With every seed they take turns in another
order, so that a machine that drifts does not favour one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from precache_sglang.launch import variants
from precache_sglang.launch.keys import ADMIN_API_KEY, API_KEY, key_headers
from precache_sglang.launch.model import ensure_demo_model, trace_adapters
from precache_sglang.launch.process import LONG_CONTEXT, ServerProcess
from precache_sglang.launch.report import plot_serving, serving_table, write_json
from precache_sglang.launch.traces import VOCABULARY, TraceTurn, load_trace, tokens_for, total_len
from precache_sglang.launch.variants import Variant

DEFAULT_VARIANTS = ("prelrshared", "rebaseshared:lp", "rebaseshared:db", "rebaseshared:auto:50")
_STATE_EVERY = 0.5  # seconds between two looks at the backlog
_DRAIN_LIMIT = 900.0  # seconds for what is owed when the load has ended


@dataclass
class Request:
    """One turn as its client saw it; times in seconds on one clock."""

    turn: str  # trajectory and place in it
    sent: float
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between tokens after the first
    prompt_tokens: int = 0
    output_tokens: int = 0
    shared: int = 0
    error: str | None = None


@dataclass
class Load:
    """What is offered: requests a second (open loop), or clients (closed loop)."""

    num_trajectories: int
    rate: float | None = None
    clients: int | None = None

    @property
    def name(self) -> str:
        load = f"{self.rate:g} req/s" if self.rate is not None else f"{self.clients} clients"
        return f"{load} x{self.num_trajectories}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", default="5.0k", help="name or CSV file")
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="requests a second")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[], help="clients")
    variants.add_argument(parser, DEFAULT_VARIANTS)
    parser.add_argument(
        "--num-trajectories", nargs="+", type=int, default=[8], help="of each run, or of each load"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs whose medians are shown")
    parser.add_argument("--ttft-limit", type=float, default=2.0, help="seconds, for goodput")
    parser.add_argument("--max-total-tokens", type=int, help="KV pool; default: room for all")
    parser.add_argument(
        "--url",
        help="a running server, instead of starting one per variant; its keys: "
        f"${API_KEY}, ${ADMIN_API_KEY}",
    )
    parser.add_argument("--model", help="model folder; default: the demo model, built once")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("server_args", nargs="*", help="after --: more flags for the servers")


def serving(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the sweep; print and save it. Returns one row for each variant and load."""
    trace = load_trace(args.trace)
    loads = _loads(args)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        urls = {"running": args.url.rstrip("/")} if args.url else {}
        for variant in [] if args.url else dict.fromkeys(args.variants):
            urls[str(variant)] = stack.enter_context(_server(args, variant, trace)).url
        for url in urls.values():
            _warm_up(url, trace)
        for load in loads:
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
            for seed in range(args.seeds):
                for name in variants.rotated(list(urls), seed):
                    run = asyncio.run(_run(urls[name], trace, load, seed, args))
                    runs[name].append(run)
                    print(_progress(name, load, seed, args.seeds, run), flush=True)
            rows += [
                {"variant": name, "load": load.name, **_medians(runs[name]), "runs": runs[name]}
                for name in urls
            ]
            _save(args, rows)
    print(f"\ntrace {args.trace}, medians of {args.seeds} seeds\n{serving_table(rows)}")
    plot_serving(rows, f"Trace {args.trace}", args.out / "serving.png")
    print(f"\nNumbers and plot: {args.out}")
    failed = sum(row["errors"] for row in rows)
    if failed:
        raise SystemExit(f"{failed} requests failed; the figures do not count")
    return rows


def _loads(args: argparse.Namespace) -> list[Load]:
    count = len(args.rates) + len(args.concurrency)
    if not count:
        raise SystemExit("bench serving: give --rates or --concurrency")
    numbers = args.num_trajectories
    if len(numbers) not in (1, count):
        raise SystemExit(
            f"--num-trajectories has {len(numbers)} numbers; give one, or {count}, by load"
        )
    left = iter(numbers * count if len(numbers) == 1 else numbers)
    loads = [Load(next(left), rate=rate) for rate in args.rates]
    return loads + [Load(next(left), clients=clients) for clients in args.concurrency]


def _server(args: argparse.Namespace, variant: Variant, trace: list[TraceTurn]) -> ServerProcess:
    model = Path(args.model) if args.model else ensure_demo_model()
    adapters = trace_adapters(model, {turn.agent for turn in trace})
    at_once = max([*args.num_trajectories, *args.concurrency])
    tokens = args.max_total_tokens or (total_len(trace) + 256) * (at_once + 1) * 2
    flags = variant.flags()
    flags += ["--dtype", args.dtype, "--context-length", str(total_len(trace) + 256)]
    flags += ["--max-total-tokens", str(tokens), "--max-running-requests", "32"]
    flags += ["--max-loras-per-batch", str(len(adapters) + 1), "--log-level", "warning"]
    print(f"[{variant}] starting the server", flush=True)
    return ServerProcess(model, adapters, flags + args.server_args, env=LONG_CONTEXT)


def _warm_up(url: str, trace: Sequence[TraceTurn]) -> None:
    async def run() -> None:
        async with _session(url) as session:
            for role in sorted({turn.agent for turn in trace}):
                request = await _send(session, role, list(range(100, 164)), 4, "warm-up")
                if request.error:
                    raise SystemExit(f"The server does not serve {role!r}: {request.error}")

    asyncio.run(run())


def _session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        base_url=url,
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    )


def _request(
    session: aiohttp.ClientSession, method: str, path: str, **kwargs: Any
) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
    return session.request(method, path, headers=key_headers(path), **kwargs)


async def _run(
    url: str, trace: Sequence[TraceTurn], load: Load, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One run on an empty cache: its figures."""
    async with _session(url) as session:
        await _flush(session)
        before = await _state(session)
        watch = _Watch(session)
        watching = asyncio.create_task(watch.run())
        requests: list[Request] = []

        async def trajectory(index: int) -> None:
            new = tokens_for(trace, VOCABULARY, seed=1000 * seed + index)
            context: list[int] = []
            for place, (turn, tokens) in enumerate(zip(trace, new, strict=True)):
                context += tokens
                request = await _send(
                    session,
                    turn.agent,
                    context,
                    turn.decode_len,
                    salt=f"{seed}-{index}",
                    turn=f"{index}.{place} {turn.agent}",
                )
                requests.append(request)
                if request.error:
                    return

        start = time.perf_counter()
        await _offer(trajectory, len(trace), load, seed)
        end = time.perf_counter()
        while _owes(await _state(session)):
            if time.perf_counter() - end > _DRAIN_LIMIT:
                raise SystemExit(
                    f"The backlog did not empty in {_DRAIN_LIMIT:.0f} s after the load"
                )
            await asyncio.sleep(0.05)
        drained = time.perf_counter() - end
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        after = await _state(session)
    figures = _figures(requests, end - start, drained, before, after, watch, args.ttft_limit)
    raw = [
        {
            "turn": request.turn,
            "sent_s": request.sent - start,
            "ttft_s": request.first - request.sent,
            "total_s": request.last - request.sent,
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "shared": request.shared,
        }
        for request in requests
        if request.error is None
    ]
    return figures | {"raw": raw}


async def _offer(
    trajectory: Callable[[int], Coroutine[Any, Any, None]],
    num_turns: int,
    load: Load,
    seed: int,
) -> None:
    """Start the trajectories as `load` has it, and wait for all of them."""
    if load.clients is not None:
        left = iter(range(load.num_trajectories))

        async def client() -> None:
            for index in left:
                await trajectory(index)

        await asyncio.gather(*(client() for _ in range(load.clients)))
        return
    assert load.rate is not None
    rng = random.Random(str(seed))
    tasks = []
    for index in range(load.num_trajectories):
        if index:
            await asyncio.sleep(rng.expovariate(load.rate / num_turns))
        tasks.append(asyncio.create_task(trajectory(index)))
    await asyncio.gather(*tasks)


async def _send(
    session: aiohttp.ClientSession,
    role: str,
    prompt: list[int],
    num_output: int,
    salt: str,
    turn: str = "",
) -> Request:
    """One streamed request; an answer that is not whole is an error. Extends `prompt`."""
    body = {
        "input_ids": prompt,
        "lora_path": role,
        "cache_salt": salt,
        "stream": True,
        "sampling_params": {"max_new_tokens": num_output, "temperature": 0, "ignore_eos": True},
    }
    request = Request(turn, sent=time.perf_counter())
    last: dict[str, Any] = {}
    try:
        async with _request(session, "POST", "/generate", json=body) as response:
            if response.status != 200:
                request.error = f"{response.status} {(await response.text())[:300]}"
                return request
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = time.perf_counter()
                last = json.loads(line[len(b"data: ") :])
                if not request.first:
                    request.first = now
                else:
                    request.gaps.append(now - request.last)
                request.last = now
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
        request.error = f"{type(error).__name__}: {error}"
        return request
    if len(last.get("output_ids", ())) != num_output:
        request.error = f"the answer ended early: {str(last)[:300]}"
        return request
    meta = last["meta_info"]
    request.prompt_tokens = meta["prompt_tokens"]
    request.output_tokens = num_output
    request.shared = meta.get("precache", {}).get("shared", 0)
    prompt += last["output_ids"]
    return request


class _Watch:
    """Looks at the server's state while a run goes on."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.backlog = 0
        self.provisional = 0

    async def run(self) -> None:
        while True:
            state = await _state(self.session)
            self.backlog = max(self.backlog, state.get("backlog_tokens", 0))
            self.provisional = max(self.provisional, state.get("provisional_tokens", 0))
            await asyncio.sleep(_STATE_EVERY)


async def _state(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with _request(session, "GET", "/precache/state") as response:
        if response.status == 404:
            return {}  # stock SGLang
        response.raise_for_status()
        state: dict[str, Any] = await response.json()
        return state


def _owes(state: dict[str, Any]) -> bool:
    return bool(state.get("backlog_tokens") or state.get("provisional_tokens"))


async def _flush(session: aiohttp.ClientSession) -> None:
    async with _request(session, "POST", "/flush_cache?timeout=60") as response:
        if response.status != 200:
            raise SystemExit(f"The cache was not flushed: {await response.text()}")


def _figures(
    requests: list[Request],
    duration: float,
    drained: float,
    before: dict[str, Any],
    after: dict[str, Any],
    watch: _Watch,
    ttft_limit: float,
) -> dict[str, Any]:
    good = [request for request in requests if request.error is None]
    ttft = [request.first - request.sent for request in good]
    gaps = [gap for request in good for gap in request.gaps]
    prompt = sum(request.prompt_tokens for request in good)

    def total(name: str) -> int:
        return int(after.get(f"total_{name}", 0) - before.get(f"total_{name}", 0))

    return {
        "requests": len(requests),
        "errors": len(requests) - len(good),
        "first_error": next((r.error for r in requests if r.error), None),
        "duration_s": duration,
        **{f"ttft_p{p}_s": percentile(ttft, p) for p in (50, 90, 99)},
        **{f"itl_p{p}_s": percentile(gaps, p) for p in (50, 90, 99)},
        # Tokens a second that one request got, from its sending to its last token.
        "throughput_per_request": median(
            [request.output_tokens / (request.last - request.sent) for request in good] or [0.0]
        ),
        "throughput": sum(request.output_tokens for request in good) / duration,
        "goodput": sum(value <= ttft_limit for value in ttft) / duration,
        "shared_share": sum(request.shared for request in good) / prompt if prompt else 0.0,
        "neutral_tokens": total("neutral"),
        "neutral_beside": total("neutral_beside"),
        "max_backlog": watch.backlog,
        "max_provisional": watch.provisional,
        "drained_s": drained,
        "peak_base_bytes": after.get("peak_base_bytes", 0),
        "peak_lr_bytes": after.get("peak_lr_bytes", 0),
    }


def percentile(values: Sequence[float], p: int) -> float:
    """The nearest-rank percentile; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-p * len(ordered) // 100) - 1)]


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds; errors add up; TTFT also with its spread."""
    row: dict[str, Any] = {
        name: median(run[name] for run in runs)
        for name, value in runs[0].items()
        if isinstance(value, int | float)
    }
    row["errors"] = sum(run["errors"] for run in runs)
    row["first_error"] = next((run["first_error"] for run in runs if run["first_error"]), None)
    row["ttft_p50_s_min"] = min(run["ttft_p50_s"] for run in runs)
    row["ttft_p50_s_max"] = max(run["ttft_p50_s"] for run in runs)
    return row


def _progress(variant: str, load: Load, seed: int, seeds: int, run: dict[str, Any]) -> str:
    text = (
        f"[{variant}] {load.name}, seed {seed + 1}/{seeds}: {run['requests']} requests in "
        f"{run['duration_s']:.0f} s, TTFT p50 {run['ttft_p50_s']:.2f} s, "
        f"p99 {run['ttft_p99_s']:.2f} s, ITL p50 {run['itl_p50_s'] * 1e3:.0f} ms"
    )
    return f"{text}, {run['errors']} ERRORS: {run['first_error']}" if run["errors"] else text


def _save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    write_json(
        args.out / "serving.json",
        {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, {args.dtype}",
            "trace": args.trace,
            "trajectories": args.num_trajectories,
            "seeds": args.seeds,
            "ttft_limit_s": args.ttft_limit,
            "rows": rows,
        },
    )
