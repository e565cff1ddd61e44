"""``precache-sglang demo``: what the methods do to one and the same agent workload.

For each method a server is started and replays

1. an agent trajectory with text: a question and the tools' observations are recorded,
   what the roles say is generated (every method reads the same observations);
2. the controlled 5.0k trace, whose token counts are the paper's and whose tokens are random.

Ends with a table, a plot of the TTFT of every turn by method, and the numbers as JSON.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from precache_sglang.launch.bench import server_flags, warm_up
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import LONG_CONTEXT, ServerProcess
from precache_sglang.launch.replay import Replay, replay_text, replay_trace
from precache_sglang.launch.report import median_of, plot_ttft, table, write_json
from precache_sglang.launch.traces import load_trace, tokens_for, total_len
from precache_sglang.launch.trajectories import Trajectory, load_trajectories
from precache_sglang.launch.variants import Variant
from tqdm import tqdm

from precache_sglang.methods import METHODS

METHODS_SHOWN = ("nonshared", "fullshared", "baseshared", "prelrshared", "rebaseshared")
TRACE = "5.0k"


def demo(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="precache-sglang demo", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS_SHOWN), choices=list(METHODS))
    parser.add_argument("--trajectories", type=Path, help="JSONL file; default: the shipped one")
    parser.add_argument(
        "--num-trajectories", type=int, default=1, help="the shortest ones are replayed"
    )
    parser.add_argument("--trace", default=TRACE)
    parser.add_argument("--out", type=Path, default=Path("demo-results"))
    args = parser.parse_args(argv)

    start = time.perf_counter()
    model = ensure_demo_model()
    adapters = demo_adapters()
    trajectories = sorted(load_trajectories(args.trajectories), key=lambda t: t.n_tokens)
    trajectories = trajectories[: args.num_trajectories]
    trace = load_trace(args.trace)
    encode, decode = _tokenizer(model)
    num_turns = sum(len(t.turns) for t in trajectories) + len(trace)

    texts: dict[str, list[Replay]] = {}
    traces: dict[str, Replay] = {}
    for method in args.methods:
        flags = server_flags(Variant(method), total_len(trace), len(adapters), "bfloat16")
        print(f"\n=== {method}: {METHODS[method].summary}")
        with (
            tqdm(total=num_turns, desc="starting the server", unit="turn", leave=False) as bar,
            ServerProcess(model, adapters, flags, env=LONG_CONTEXT) as server,
        ):
            warm_up(server, list(adapters))
            bar.set_description("agent trajectory")
            texts[method] = [
                replay_text(server, trajectory, encode, progress=lambda: _advance(bar))
                for trajectory in trajectories
            ]
            bar.set_description(f"trace {args.trace}")
            traces[method] = replay_trace(
                server,
                trace,
                tokens_for(trace, len_vocabulary(model), seed=0),
                lambda: _advance(bar),
            )
        for trajectory, replay in zip(trajectories, texts[method], strict=True):
            _print_conversation(trajectory, replay, decode)

    results = {method: median_of([replay]) for method, replay in traces.items()}
    print(f"\n=== Trace {args.trace}: {len(trace)} turns of plan, action and reflect\n")
    print(table(results))
    print(
        "\nTTFT is summed over turns and counts from an agent's call; total time includes "
        "the neutral passes.\nRatios: how many times better than nonshared. shared: prompt "
        "tokens read from what another role fed."
    )
    args.out.mkdir(parents=True, exist_ok=True)
    plot_ttft(results, f"TTFT by turn, trace {args.trace}", args.out / "ttft_by_turn.png")
    write_json(
        args.out / "demo.json",
        {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, bfloat16",
            "trace": args.trace,
            "methods": results,
            "text": {
                method: [_text_record(t, r, decode) for t, r in zip(trajectories, rs, strict=True)]
                for method, rs in texts.items()
            },
        },
    )
    print(f"Plot and numbers: {args.out} ({time.perf_counter() - start:.0f} s in all)")


def _advance(bar: Any) -> None:
    bar.update()


def _tokenizer(model: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return encode, tokenizer.decode


def len_vocabulary(model: Path) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(model).vocab_size
    return size


def _print_conversation(trajectory: Trajectory, replay: Replay, decode: Any) -> None:
    print(f"\n[{trajectory.id}] {trajectory.question}")
    print(f"  {trajectory.options}")
    for turn, timing, output in zip(trajectory.turns, replay.turns, replay.outputs, strict=True):
        said = " ".join(decode(output).split()) or "(nothing)"
        print(
            f"  {turn.role:>8} {turn.kind:<12} {timing.ttft_ms:>7.0f} ms  "
            f"shared {timing.shared:>4}  own {timing.own:>4}  replayed {timing.replayed:>4}  "
            f"computed {timing.computed:>4}  | {said[:90]}"
        )


def _text_record(trajectory: Trajectory, replay: Replay, decode: Any) -> dict[str, Any]:
    return {
        "id": trajectory.id,
        "ttft_ms": replay.ttft_ms,
        "total_ms": replay.total_ms,
        "said": [decode(output) for output in replay.outputs],
    }
