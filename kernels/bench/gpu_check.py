"""Check the kernels on a GPU, then time them. One script; needs PyTorch and Triton, not SGLang.

    python kernels/bench/gpu_check.py [--json FILE] [--quick]

First every kernel against float64 on fresh random inputs (``cases.py``). Then extend and decode at
the shapes of LLaMA-3.1-8B (32 query heads, 8 KV heads, 128 wide, bfloat16), beside the same kernel
without rows, values expanded before attention, PyTorch's SDPA on gathered KV, and the floor:
the bytes that must be read over the bandwidth that a copy reaches here (for extend: or the
FLOPs over the rate of a matrix product, if that is longer). Under six minutes.

Without a GPU it runs in Triton's interpreter on a few tiny shapes: the script is tested, the
times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import triton

sys.path.insert(0, str(Path(__file__).parent))
from cases import error_of, make_case, make_write_case, oracle
from ops import reference
from ops.lr_decode import lr_decode, scratch, splits_for
from ops.lr_extend import lr_extend
from ops.lr_rows import AttentionInputs
from ops.lr_write import lr_write

DEVICE = "cuda" if ON_GPU else "cpu"
NUM_HEADS, KV_HEADS, HEAD_DIM, HIDDEN = (32, 8, 128, 4096) if ON_GPU else (2, 1, 64, 64)
PREFIXES = (1_900, 5_000, 9_100, 17_300, 33_600, 66_400) if ON_GPU else (70,)
ROWS = (1, 8, 32) if ON_GPU else (2,)
RANKS = (8, 16, 32, 64) if ON_GPU else (8,)
NUM_NEW = 512 if ON_GPU else 20  # tokens of a chunk
MAX_KV_TOKENS = 2_200_000  # 9 GB of KV of one layer
DTYPE = torch.bfloat16
NUM_KINDS = 14  # sets of what the kernels are compiled for, among the random cases


# -- correctness -------------------------------------------------------------------------


def check(num_cases: int, first_seed: int, minutes: float) -> dict[str, Any]:
    """Every kernel on random cases, for at most `minutes`.

    Returns:
        ``worst``: the largest error of each kernel in units of its tolerance, infinite where a
        value was not written or the launch failed; ``cases``: how many of each; ``failures``.
    """
    worst = dict.fromkeys(KERNELS, 0.0)
    failures: list[str] = []
    deadline = time.monotonic() + 60 * minutes
    done = 0
    while done < num_cases and time.monotonic() < deadline:
        seed, kind = first_seed + done, done % NUM_KINDS
        for kernel, errors in KERNELS.items():
            try:
                error = max(errors(seed, kind))
                problem = f"{error:.2f} times the tolerance"
            except Exception as exception:  # the rest is worth knowing all the same
                error = math.inf
                problem = f"{type(exception).__name__}: {str(exception)[:200]}"
            worst[kernel] = max(worst[kernel], error)
            if error > 1:
                failures.append(f"{kernel}, seed {seed}, kind {kind}: {problem}")
                print(f"\n{failures[-1]}", file=sys.stderr)
        done += 1
        print(f"\rchecked {done}/{num_cases}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {"cases": done, "first_seed": first_seed, "worst": worst, "failures": failures}


def extend_errors(seed: int, kind: int) -> list[float]:
    q, inputs, q_indptr = make_case(seed, decode=False, device=DEVICE, kind=kind)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=DEVICE)
    lr_extend(q, out, inputs, q_indptr, int(q_indptr.diff().max()))
    return [error_of(out, oracle(q, inputs, q_indptr))]


def decode_errors(seed: int, kind: int) -> list[float]:
    q, inputs, _ = make_case(seed, decode=True, device=DEVICE, kind=kind)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=DEVICE)
    parts, part_lse = scratch(*q.shape, 1 + seed % 8, DEVICE)
    parts.fill_(math.nan)
    part_lse.fill_(math.nan)
    lr_decode(q, out, inputs, parts, part_lse)
    each = torch.arange(len(q) + 1, device=DEVICE)
    return [error_of(out, oracle(q, inputs, each))]


def write_errors(seed: int, kind: int) -> list[float]:
    case = make_write_case(seed, DEVICE, kind)
    lr_write(case.x, case.stack, case.slots, case.rows[0], *case.rows[1:] or [None])
    pairs = zip(case.rows, case.expected, strict=True)
    return [error_of(rows[1:], expected[1:]) for rows, expected in pairs]


KERNELS = {"extend": extend_errors, "decode": decode_errors, "write": write_errors}


# -- timing ------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of `run`."""
    if not ON_GPU:
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    return float(triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median"))


def copy_bandwidth() -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty((2 << 30) if ON_GPU else (1 << 20), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * milliseconds(lambda: target.copy_(source)))


def matmul_rate() -> float:
    """FLOPs per second of a large matrix product."""
    n = 8192 if ON_GPU else 128
    a = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    return 2 * n**3 / (1e-3 * milliseconds(lambda: a @ a))


class Shape:
    """Requests of one length over permuted slots, all of one adapter."""

    def __init__(self, num_requests: int, num_tokens: int, num_new: int, rank: int) -> None:
        self.num_requests, self.num_tokens, self.num_new = num_requests, num_tokens, num_new
        total = num_requests * num_tokens
        self.q = randn(num_requests * num_new, NUM_HEADS, HEAD_DIM)
        self.out = torch.empty_like(self.q)
        self.k, self.v = randn(total, KV_HEADS, HEAD_DIM), randn(total, KV_HEADS, HEAD_DIM)
        self.rows, self.b = randn(total, rank), randn(1, rank, KV_HEADS * HEAD_DIM) * 0.1
        self.rank = torch.tensor([rank], dtype=torch.int32, device=DEVICE)
        self.table = torch.randperm(total, device=DEVICE).view(num_requests, -1).to(torch.int32)
        self.lr_table = torch.randperm(total, device=DEVICE).view(num_requests, -1).to(torch.int32)
        self.q_indptr = torch.arange(0, len(self.q) + 1, num_new, device=DEVICE).to(torch.int32)
        processors = 4
        if ON_GPU:
            processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        splits = splits_for(num_requests, KV_HEADS, processors, num_tokens)
        self.scratch = scratch(num_requests, NUM_HEADS, HEAD_DIM, splits, DEVICE)

    def inputs(self, with_rows: bool, v: torch.Tensor | None = None) -> AttentionInputs:
        one = torch.ones(self.num_requests, dtype=torch.int32, device=DEVICE)
        return AttentionInputs(
            k=self.k,
            v=self.v if v is None else v,
            rows_k=None,
            rows_v=self.rows if with_rows else None,
            b_k=None,
            b_v=self.b if with_rows else None,
            ranks=self.rank,
            cos_sin=None,
            req_to_token=self.table,
            req_to_lr=self.lr_table,
            rows=torch.arange(self.num_requests, device=DEVICE),
            seq_lens=one * self.num_tokens,
            adapters=one * (0 if with_rows else -1),
            scale=HEAD_DIM**-0.5,
        )

    def attend(self, inputs: AttentionInputs) -> None:
        if self.num_new == 1:
            lr_decode(self.q, self.out, inputs, *self.scratch)
        else:
            lr_extend(self.q, self.out, inputs, self.q_indptr, self.num_new)

    def expand_then_attend(self, inputs: AttentionInputs, room: torch.Tensor) -> None:
        """Values with the adapter's part, for every token, before attention without rows."""
        slots = self.table.view(-1).long()
        rows = self.rows[self.lr_table.view(-1).long()]
        room[slots] = reference.expand_values(self.v[slots], rows, self.b[0])
        self.attend(inputs)

    def sdpa(self) -> Callable[[], torch.Tensor]:
        """PyTorch's attention on KV that somebody has gathered already."""
        slots = self.table.long()
        k, v = self.k[slots].transpose(1, 2), self.v[slots].transpose(1, 2)
        q = self.q.view(self.num_requests, self.num_new, NUM_HEADS, HEAD_DIM).transpose(1, 2)
        mask = None
        if self.num_new > 1:
            at = torch.arange(self.num_tokens, device=DEVICE)
            mask = at[None] <= at[-self.num_new :, None]
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True)

    def floor_ms(self, rank: int, bandwidth: float, rate: float) -> float:
        """Time below which nobody gets; see the module's docstring."""
        tokens = self.num_requests * self.num_tokens
        num_bytes = 2 * tokens * (2 * KV_HEADS * HEAD_DIM + rank) + 4 * self.q.numel()
        pairs = self.num_requests * self.num_new * (self.num_tokens - self.num_new / 2)
        flops = pairs * NUM_HEADS * (4 * HEAD_DIM + 2 * rank)
        # A copy's bandwidth counts bytes both ways.
        return 1e3 * max(num_bytes / bandwidth, flops / rate)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def time_attention(bandwidth: float, rate: float, deadline: float) -> list[dict[str, Any]]:
    results = []
    for name, num_new in (("decode", 1), ("extend", NUM_NEW)):
        for prefix in PREFIXES:
            for num_requests in ROWS:
                if num_requests * prefix > MAX_KV_TOKENS or (num_new > 1 and num_requests > 8):
                    continue
                for rank in RANKS:
                    if time.monotonic() > deadline:
                        print("out of time: the rest is left out", file=sys.stderr)
                        return results
                    row = {"kernel": name, "tokens": prefix, "requests": num_requests}
                    results.append({**row, "rank": rank, **time_one(row, rank, bandwidth, rate)})
                    print(f"\r{len(results)} shapes timed", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def time_one(
    row: dict[str, Any], rank: int, bandwidth: float, rate: float
) -> dict[str, float | None]:
    num_new = 1 if row["kernel"] == "decode" else NUM_NEW
    shape = Shape(row["requests"], row["tokens"] + num_new, num_new, rank)
    with_rows, without = shape.inputs(True), shape.inputs(False)
    room = torch.empty_like(shape.v)
    expanded = shape.inputs(False, room)
    times: dict[str, float | None] = {
        "rows_ms": milliseconds(lambda: shape.attend(with_rows)),
        "no_rows_ms": milliseconds(lambda: shape.attend(without)),
        "expand_first_ms": milliseconds(lambda: shape.expand_then_attend(expanded, room)),
        "sdpa_ms": None,
        "floor_ms": shape.floor_ms(rank, bandwidth, rate),
    }
    try:
        times["sdpa_ms"] = milliseconds(shape.sdpa())
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # its table of scores does not fit
    return times


def time_write() -> list[dict[str, Any]]:
    """LR rows of a team of three, beside a GEMM and a scatter in PyTorch."""
    results = []
    for tokens in (1, 8, 32, NUM_NEW):
        for rank in RANKS:
            stack, x = randn(3 * rank, HIDDEN), randn(tokens, HIDDEN)
            rows = randn(3 * tokens + 1, rank)
            slots = (1 + torch.randperm(3 * tokens, device=DEVICE)).view(3, tokens)
            arguments = (x, stack, slots, rows, None)
            fused = milliseconds(partial(lr_write, *arguments))
            torch_ms = milliseconds(partial(reference.write_rows, *arguments))
            results.append(
                {
                    "kernel": "write",
                    "tokens": tokens,
                    "rank": rank,
                    "fused_ms": fused,
                    "torch_ms": torch_ms,
                }
            )
    return results


# -- report ------------------------------------------------------------------------------


def table(results: list[dict[str, Any]], writes: list[dict[str, Any]]) -> str:
    header = (
        f"{'kernel':<8}{'tokens':>8}{'reqs':>6}{'rank':>6}{'rows ms':>10}{'/ none':>9}"
        f"{'/ expand':>10}{'/ sdpa':>9}{'/ floor':>9}"
    )
    lines = [header, "-" * len(header)]
    for r in results:
        ratios = [
            f"{r['rows_ms'] / r[name]:.2f}" if r[name] else "-"
            for name in ("no_rows_ms", "expand_first_ms", "sdpa_ms", "floor_ms")
        ]
        lines.append(
            f"{r['kernel']:<8}{r['tokens']:>8}{r['requests']:>6}{r['rank']:>6}"
            f"{r['rows_ms']:>10.3f}{ratios[0]:>9}{ratios[1]:>10}{ratios[2]:>9}{ratios[3]:>9}"
        )
    lines += ["", f"{'write':<8}{'tokens':>8}{'rank':>12}{'fused ms':>10}{'/ torch':>9}"]
    for w in writes:
        ratio = w["fused_ms"] / w["torch_ms"]
        lines.append(
            f"{'write':<8}{w['tokens']:>8}{w['rank']:>12}{w['fused_ms']:>10.3f}{ratio:>9.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="save everything here, part by part")
    parser.add_argument("--seed", type=int, help="of the first case; default: the time")
    parser.add_argument("--cases", type=int, default=200 if ON_GPU else 3)
    parser.add_argument("--minutes", type=float, default=5.5, help="checks take at most half")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if ON_GPU else f"interpreter, {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }

    def save(**more: Any) -> None:
        report.update(more)
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")

    print("{card}, PyTorch {torch}, Triton {triton}".format(**report))
    seed = int(time.time()) if args.seed is None else args.seed  # fresh inputs every time
    checked = check(args.cases, seed, args.minutes / 2)
    save(**checked)
    print(
        f"{checked['cases']} random cases of each kernel from seed {seed}; largest error in units "
        "of the tolerance: "
        + ", ".join(f"{kernel} {error:.2f}" for kernel, error in checked["worst"].items())
    )
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    save(copy_bytes_per_s=bandwidth, matmul_flops_per_s=rate)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s\n")
    writes = time_write()
    save(write=writes)
    results = time_attention(bandwidth, rate, deadline)
    save(attention=results)
    print(table(results, writes))
    if checked["failures"] or not checked["cases"]:
        raise SystemExit("a kernel is wrong: see above")


if __name__ == "__main__":
    main()
