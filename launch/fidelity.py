"""``precache-sglang bench fidelity``: how far sharing moves the roles' distributions.

Recorded trajectories are replayed with their recorded outputs, on a server per variant. For every
output token: its negative log-likelihood, whether the likeliest token is that of nonshared, and
the KL divergence from nonshared's distribution. The distributions are compared over the likeliest
`--top` tokens of nonshared and one remainder for all others, which gives a little less than
the KL over the whole vocabulary, never more.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from precache_sglang.launch import variants
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerProcess
from precache_sglang.launch.report import fidelity_table, plot_fidelity, write_json
from precache_sglang.launch.trajectories import Trajectory, load_trajectories
from precache_sglang.launch.variants import Variant
from tqdm import tqdm

BASELINE = Variant("nonshared")
DEFAULT_VARIANTS = ("fullshared", "prelrshared", "rebaseshared", "rebaseown")


@dataclass(frozen=True)
class Prediction:
    """What a server predicted for one recorded output token.

    Attributes:
        logprob: Of the recorded token.
        likeliest: The token with the largest probability.
        logprobs: Of nonshared's likeliest tokens, likeliest first for nonshared itself.
    """

    role: str
    logprob: float
    likeliest: int
    logprobs: dict[int, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="JSONL file; default: the shipped trajectories")
    parser.add_argument(
        "--limit", type=int, default=20, help="trajectories, evenly spread over the file"
    )
    variants.add_argument(parser, DEFAULT_VARIANTS)
    parser.add_argument("--top", type=int, default=128, help="tokens compared one by one")
    parser.add_argument("--adapters", nargs="+", metavar="ROLE=PATH", help="default: shipped")
    parser.add_argument("--model", help="model folder; default: the demo model, built once")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("server_args", nargs="*", help="after --: more flags for the servers")


def fidelity(args: argparse.Namespace) -> dict[str, Any]:
    """Run the comparison; print and save it. Returns variant -> role -> figures."""
    model = Path(args.model) if args.model else ensure_demo_model()
    trajectories = spread(load_trajectories(args.data), args.limit)
    adapters = (
        dict(item.split("=", 1) for item in args.adapters) if args.adapters else demo_adapters()
    )
    encode = encoder(model)
    compared = [BASELINE, *(variant for variant in args.variants if variant != BASELINE)]
    longest = max(len(encode(trajectory.text)) for trajectory in trajectories)
    num_tokens = variants.room_for_all(longest, len(adapters))
    found: dict[str, list[Prediction]] = {}
    for variant in compared:
        print(f"[{variant}] starting the server", flush=True)
        flags = [*variant.flags(), "--dtype", args.dtype, "--log-level", "warning"]
        flags += ["--max-loras-per-batch", str(len(adapters) + 1)]
        flags += ["--max-total-tokens", str(num_tokens)]
        with ServerProcess(model, adapters, flags + args.server_args) as server:
            baseline = found.get(str(BASELINE))
            found[str(variant)] = predictions(server, trajectories, encode, args.top, baseline)
    results = summary(found)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(
        args.out / "fidelity.json",
        {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} x {platform.machine()}, {args.dtype}",
            "trajectories": len(trajectories),
            "top": args.top,
            "variants": results,
        },
    )
    plot_fidelity(results, args.out / "fidelity.png")
    print(f"\n{len(trajectories)} trajectories, {args.dtype}\n{fidelity_table(results)}")
    print(f"\nNumbers and plot: {args.out}")
    return results


def spread(trajectories: Sequence[Trajectory], limit: int) -> list[Trajectory]:
    """At most `limit` of them at equal distances: files come sorted by where they are from."""
    num = min(limit, len(trajectories))
    return [trajectories[index * len(trajectories) // num] for index in range(num)]


def encoder(model: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def predictions(
    server: ServerProcess,
    trajectories: Sequence[Trajectory],
    encode: Callable[[str], list[int]],
    top: int,
    baseline: Sequence[Prediction] | None,
) -> list[Prediction]:
    """One prediction for each recorded output token, in order.

    Args:
        server: Its cache should be empty.
        baseline: Of the same tokens by nonshared; None for nonshared itself.
    """
    found: list[Prediction] = []
    turns = sum(len(trajectory.turns) for trajectory in trajectories)
    with tqdm(total=turns, unit="turn", mininterval=2) as progress:
        for trajectory in trajectories:
            context: list[int] = []
            for turn in trajectory.turns:
                context += encode(turn.input_text_appended)
                output = encode(turn.gold_output)
                known = None
                if baseline is not None:
                    known = baseline[len(found) : len(found) + len(output)]
                found += _turn(server, turn.role, context, output, top, known, trajectory.id)
                context += output
                progress.update()
            if server.has_precache():
                server.wait_for_backlog()
    return found


def _turn(
    server: ServerProcess,
    role: str,
    context: list[int],
    output: list[int],
    top: int,
    baseline: Sequence[Prediction] | None,
    trajectory: str,
) -> list[Prediction]:
    """The role reads the context and its recorded output, as if it had sampled that."""
    wanted = sorted({token for known in baseline or () for token in known.logprobs})
    answer = server.post(
        "/generate",
        {
            "input_ids": context + output,
            "lora_path": role,
            "cache_salt": trajectory,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            # From the token before the output on: SGLang gives the first one no logprob.
            "logprob_start_len": len(context) - 1,
            "top_logprobs_num": top if baseline is None else 1,
            "token_ids_logprob": wanted or None,
        },
    )
    meta = answer["meta_info"]
    chosen = meta["input_token_logprobs"][-len(output) :]
    tops = meta["input_top_logprobs"][-len(output) :]
    asked = meta["input_token_ids_logprobs"][-len(output) :] if wanted else None
    if [token for _, token, *_ in chosen] != output:
        raise RuntimeError("the server returned logprobs of other tokens than asked for")
    found = []
    for index in range(len(output)):
        if baseline is None:
            logprobs = {token: logprob for logprob, token, *_ in tops[index]}
        else:
            assert asked is not None
            all_asked = {token: logprob for logprob, token, *_ in asked[index]}
            logprobs = {token: all_asked[token] for token in baseline[index].logprobs}
        found.append(Prediction(role, chosen[index][0], tops[index][0][1], logprobs))
    return found


def divergence(p: Iterable[float], q: Iterable[float]) -> float:
    """KL(p || q) in nats over listed log-probabilities and one remainder; at least 0."""
    p, q = list(p), list(q)
    rest_p = max(0.0, 1.0 - sum(map(math.exp, p)))
    rest_q = max(0.0, 1.0 - sum(map(math.exp, q)))
    total = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    if rest_p > 0:
        total += rest_p * math.log(rest_p / max(rest_q, 1e-12))
    return max(0.0, total)


def summary(found: dict[str, list[Prediction]]) -> dict[str, Any]:
    """variant -> role (or ``all``) -> tokens, NLL, top-1 agreement and KL, means over tokens."""
    baseline = found[str(BASELINE)]
    results: dict[str, Any] = {}
    for variant, predicted in found.items():
        pairs = list(zip(baseline, predicted, strict=True))
        by_role = {"all": pairs}
        for role in dict.fromkeys(p.role for p in predicted):
            by_role[role] = [pair for pair in pairs if pair[1].role == role]
        results[variant] = {
            role: {
                "tokens": len(chosen),
                "nll": mean(-mine.logprob for _, mine in chosen),
                "top1_agreement": mean(base.likeliest == mine.likeliest for base, mine in chosen),
                "kl": mean(
                    divergence(base.logprobs.values(), mine.logprobs.values())
                    for base, mine in chosen
                ),
            }
            for role, chosen in by_role.items()
        }
    return results
