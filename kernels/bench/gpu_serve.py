"""Serve a model of LLaMA-3.1-8B's shape on a GPU, and measure the methods on the traces.

    python kernels/bench/gpu_serve.py --out DIR

Weights are random (SGLang's dummy loading) and so are the adapters: time and memory do not depend
on what they hold. One server after the other, each over all traces of its part:

    lengths   every method, three roles, contexts of 1.9k to 66.4k tokens
    agents    every method, four and eight agents
    ranks     prelrshared and rebaseshared with adapters of rank 8 to 64, 17.3k tokens

Prints TTFT, total time, throughput and peak memory by method, with ratios to nonshared. What is
finished is kept in ``DIR``: started again, the script goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precache_sglang.launch.bench import bench
from precache_sglang.launch.model import random_adapter
from precache_sglang.launch.report import table, table_by_trace
from precache_sglang.launch.traces import load_trace

VARIANTS = ("nonshared", "fullshared", "baseshared", "prelrshared", "rebaseshared:lp")
SCHEDULES = ("rebaseshared:db", "rebaseshared:auto")
LENGTHS = ("1.9k", "3.0k", "5.0k", "9.1k", "17.3k", "33.7k", "66.4k")
AGENTS = ("agents4_8x8k", "agents8_8x8k")
RANKS = (8, 16, 32, 64)

# Of the model cards' config.json; what SGLang needs to build the model.
_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_COMMON,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # To test this script without a GPU.
    "tiny": {
        **_COMMON,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 49152,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
    },
}


@dataclass(frozen=True)
class Unit:
    """One server's share of the measurement; finished or not, never half."""

    part: str
    variant: str
    traces: tuple[str, ...]
    rank: int = 8
    label: str = field(default="")

    @property
    def name(self) -> str:
        return self.label or self.variant

    def folder(self, out: Path) -> Path:
        return out / self.part / self.name.replace(":", "-").replace(" ", "-")


def units(args: argparse.Namespace) -> Iterator[Unit]:
    if "lengths" in args.parts:
        for variant in (*args.variants, *(SCHEDULES if args.schedules else ())):
            yield Unit("lengths", variant, tuple(args.lengths))
    if "agents" in args.parts:
        for variant in args.variants:
            yield Unit("agents", variant, AGENTS)
    if "ranks" in args.parts:
        for variant in ("prelrshared", "rebaseshared:lp"):
            for rank in RANKS:
                yield Unit("ranks", variant, ("17.3k",), rank, f"{variant} r={rank}")


def run(unit: Unit, model: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Trace -> medians; measured now, or by an earlier run of the script."""
    folder = unit.folder(args.out)
    finished = folder / "finished.json"
    if not finished.exists():
        agents = sorted({turn.agent for name in unit.traces for turn in load_trace(name)})
        adapters = [
            f"{agent}={random_adapter(model, agent, model / f'{agent}-r{unit.rank}', unit.rank)}"
            for agent in agents
        ]
        bench(
            [
                *("single-stream", "--model", str(model), "--adapters", *adapters),
                *("--variants", unit.variant, "--traces", *unit.traces),
                *("--repeats", str(args.repeats), "--out", str(folder)),
                *("--", "--load-format", "dummy", "--skip-tokenizer-init"),
                *args.server_args,
            ]
        )
        (folder / "single_stream.json").rename(finished)
    traces = json.loads(finished.read_text())["traces"]
    return {trace: by_variant[unit.variant] for trace, by_variant in traces.items()}


def report(part: str, results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """`results`: trace -> name of the unit -> medians."""
    lines = [f"\n{part}"]
    for trace, by_name in results.items():
        lines += [f"\ntrace {trace}", table(by_name, next(iter(by_name)))]
    if len(results) > 1:
        baseline = next(iter(next(iter(results.values()))))
        lines += ["\nTTFT in seconds by trace", table_by_trace(results, baseline)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-serve"))
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--parts", nargs="+", choices=("lengths", "agents", "ranks"),
        default=["lengths", "agents", "ranks"],
    )  # fmt: skip
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS))
    parser.add_argument("--no-schedules", dest="schedules", action="store_false")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "server_args", nargs="*", help="after --: more flags, as --precache-cuda-graph"
    )
    args = parser.parse_args(argv)
    model = args.out / args.shape
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[args.shape], indent=2))
    todo = list(units(args))
    results: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for number, unit in enumerate(todo, start=1):
        print(f"({number}/{len(todo)}) {unit.part}: {unit.name}", flush=True)
        for trace, medians in run(unit, model, args).items():
            results.setdefault(unit.part, {}).setdefault(trace, {})[unit.name] = medians
    for part, by_trace in results.items():
        print(report(part, by_trace))


if __name__ == "__main__":
    main()
