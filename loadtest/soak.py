"""Mixed load with impatient users, and a check that the server comes out of it whole.

    python loadtest/soak.py --minutes 10 --abort-share 0.2

Clients of all roles extend their own and shared contexts over HTTP; `--abort-share` of the
requests are aborted by `/abort_request` or by hanging up, at a random moment. `/health` must
answer throughout. When the load ends, the backlog must empty, and every KV slot, LR slot and
row of the request table must be free or in the cache. Ends with status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerProcess
from precache_sglang.launch.traces import VOCABULARY
from tqdm import tqdm

CONTEXT = 2000  # tokens after which a client starts a new context
DRAIN_LIMIT = 180.0  # seconds in which the backlog must be empty after the load
AGE_LIMIT = 300.0  # seconds for which neutral work may be owed under the load


class Soak:
    """The clients and what they saw."""

    def __init__(self, args: argparse.Namespace, session: aiohttp.ClientSession) -> None:
        self.args = args
        self.session = session
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.health: list[float] = []
        self.max_age = 0.0
        self.peaks: Counter[str] = Counter()
        self.serial = 0
        self.end = time.monotonic() + 60 * args.minutes
        # Contexts that several clients extend at once, beside those that they have alone.
        self.common: list[list[int]] = [[], []]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(self.args.clients):
                group.create_task(self.client(index))
            group.create_task(self.watch())

    async def client(self, index: int) -> None:
        rng = random.Random(f"{self.args.seed} {index}")
        own: list[int] = []
        while time.monotonic() < self.end:
            shared = rng.random() < 0.3
            context = rng.choice(self.common) if shared else own
            if len(context) > CONTEXT:
                context.clear()
            new = rng.choices(range(20, VOCABULARY), k=rng.choice((4, 16, 64, 256)))
            prompt = context + new
            body: dict[str, Any] = {
                "input_ids": prompt,
                "lora_path": rng.choice((*self.args.roles, None)),
                "cache_salt": None if shared else f"client-{index}",
                "sampling_params": {
                    "max_new_tokens": rng.choice((1, 8, 24, 48)),
                    "temperature": rng.choice((0.0, 1.0)),
                    "n": 2 if rng.random() < 0.05 else 1,
                    "ignore_eos": rng.random() < 0.5,
                },
            }
            impatient = rng.random() < self.args.abort_share
            # Every kind of end, at every stage: queued, prefilling, decoding.
            patience = rng.expovariate(1.0) if impatient else None
            output = await self.request(body, patience, rng.random() < 0.5)
            if output is not None:
                context[:] = prompt + output
            if rng.random() < 0.1:
                await asyncio.sleep(rng.expovariate(0.5))  # a tool is called

    async def request(
        self, body: dict[str, Any], patience: float | None, hangs_up: bool
    ) -> list[int] | None:
        """Send; after `patience` seconds hang up or ask for an abort. The whole output, if any."""
        self.serial += 1
        # SGLang aborts by the beginning of an id: none may begin another.
        body |= {"rid": f"soak-{self.serial:08}", "stream": body["sampling_params"]["n"] == 1}
        task = asyncio.create_task(self.answer(body))
        if patience is not None:
            await asyncio.wait([task], timeout=patience)
            if task.done():
                self.outcomes["was faster than its user's patience"] += 1
            elif hangs_up:
                task.cancel()
                await asyncio.wait([task])
                self.outcomes["hung up"] += 1
                return None
            else:
                async with self.session.post("/abort_request", json={"rid": body["rid"]}):
                    self.outcomes["aborted"] += 1
        try:
            answer = await task
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return None
        end = answer.get("meta_info", {}).get("finish_reason", {}).get("type")
        if end in ("length", "stop"):
            self.outcomes["whole answers"] += 1
            return list(answer["output_ids"])
        if patience is None or "abort" not in str(answer).lower():
            self.failures.append(f"an answer without an end: {str(answer)[:300]}")
        return None

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The last event of the answer, or what came instead."""
        async with self.session.post("/generate", json=body) as response:
            if response.status != 200:
                return {"status": response.status, "text": (await response.text())[:300]}
            last: dict[str, Any] = {}
            if body["stream"]:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        last = json.loads(line[len(b"data: ") :])
            else:
                last = (await response.json())[0]
        return last

    async def watch(self) -> None:
        with tqdm(total=round(60 * self.args.minutes), unit="s", mininterval=10) as progress:
            while time.monotonic() < self.end:
                start = time.monotonic()
                async with self.session.get("/health") as response:
                    if response.status != 200:
                        self.failures.append(f"/health: {response.status}")
                self.health.append(time.monotonic() - start)
                state = await self.state()
                self.max_age = max(self.max_age, state["backlog_age_s"])
                for name in ("backlog_tokens", "provisional_tokens", "base_tokens_in_use"):
                    self.peaks[name] = max(self.peaks[name], state[name])
                await asyncio.sleep(1.0)
                progress.update(round(time.monotonic() - start))

    async def state(self) -> dict[str, Any]:
        async with self.session.get("/precache/state") as response:
            state: dict[str, Any] = await response.json()
            return state

    async def at_rest(self) -> tuple[dict[str, Any], float]:
        """The state once nothing is owed, and how long that took."""
        start = time.monotonic()
        while True:
            state = await self.state()
            took = time.monotonic() - start
            owed = state["backlog_tokens"] or state["provisional_tokens"]
            if not (owed or state["request_rows_in_use"] or state["shadow_tokens"]):
                return state, took
            if took > DRAIN_LIMIT:
                self.failures.append(f"not at rest after {took:.0f} s")
                return state, took
            await asyncio.sleep(0.1)

    def check(self, state: dict[str, Any]) -> None:
        for wrong, found in (
            ("problems", state["problems"]),
            (
                "KV slots lost",
                state["base_tokens_in_use"] - state["base_tokens"] - state["own_base_tokens"],
            ),
            ("LR slots lost", state["lr_slots_in_use"] - state["lr_slots_evictable"]),
            ("LR slots pinned", state["lr_slots_pinned"]),
            ("rows of the request table lost", state["request_rows_in_use"]),
        ):
            if found:
                self.failures.append(f"{wrong}: {found}")


async def soak(args: argparse.Namespace, url: str) -> int:
    async with aiohttp.ClientSession(
        base_url=url,
        timeout=aiohttp.ClientTimeout(total=None, sock_read=120),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    ) as session:
        load = Soak(args, session)
        await load.run()
        state, took = await load.at_rest()
        load.check(state)
        for wrong, found in (
            ("no request was answered", not load.outcomes["whole answers"]),
            ("no request was aborted", not load.outcomes["aborted"]),
            ("nobody hung up", not load.outcomes["hung up"]),
            (f"neutral work was {load.max_age:.0f} s old", load.max_age > AGE_LIMIT),
        ):
            if found:
                load.failures.append(wrong)
        async with session.post("/flush_cache?timeout=60") as response:
            if response.status != 200:
                load.failures.append(f"not flushed: {response.status}")
        flushed = await load.state()
        load.check(flushed)
        if flushed["base_tokens_in_use"] or flushed["lr_slots_in_use"]:
            load.failures.append("slots in use after a flush")
    totals = {name: value for name, value in state.items() if name.startswith("total_")}
    print(json.dumps(dict(load.outcomes) | totals | {f"max_{k}": v for k, v in load.peaks.items()}))
    print(
        f"{load.serial} requests, /health answered {len(load.health)} times, "
        f"{median(load.health):.2f} s (longest {max(load.health):.2f} s); "
        f"oldest neutral work {load.max_age:.0f} s; at rest {took:.1f} s after the load"
    )
    for failure, count in Counter(load.failures).items():
        print(f"WRONG ({count} times): {failure}")
    return 1 if load.failures else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--abort-share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a running server, instead of starting one")
    parser.add_argument("--roles", nargs="+", default=["plan", "action", "reflect"])
    parser.add_argument("--max-total-tokens", default="9000", help="KV pool of the server started")
    parser.add_argument("--model", type=Path, help="model folder; default: the demo model")
    parser.add_argument("server_args", nargs="*", help="after --: more flags for the server")
    args = parser.parse_args()
    if args.url:
        raise SystemExit(asyncio.run(soak(args, args.url.rstrip("/"))))
    flags = ["--precache-max-neutral-wait", "50", "--chunked-prefill-size", "512"]
    flags += ["--max-total-tokens", args.max_total_tokens, "--max-running-requests", "8"]
    flags += ["--max-loras-per-batch", "4", "--log-level", "warning"]
    model = args.model or ensure_demo_model()
    with ServerProcess(model, demo_adapters(), flags + args.server_args) as server:
        status = asyncio.run(soak(args, server.url))
        log = server.log()
        if not server.alive() or "Traceback" in log or "leak" in log.lower():
            print(f"WRONG: the server's log\n{server.log_tail()}")
            status = 1
    raise SystemExit(status)


if __name__ == "__main__":
    main()
