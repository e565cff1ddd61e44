"""Compile every kernel in every configuration for GPUs that need not be here.

For each: registers per thread, shared memory, bytes of stack, which is where registers spill to,
as ``cuobjdump`` reads them from the cubin. Prints a table; ``--json FILE`` saves it. Ends with
status 1 if a configuration for head sizes 64 and 128 spills, or does not compile. ``--quick``
leaves out what is compiled like something else: rank 32, and fp16 but for one head size.

    python kernels/bench/resources.py
    python kernels/bench/resources.py --arch 90 --json resources.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from ops import lr_decode, lr_extend, lr_write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90, 100)
HEAD_DIMS = (64, 96, 128, 256)
WIDTHS = (16, 32, 64)  # tiles of rows; smaller ranks are padded to 16
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SPARED = (64, 128)  # head sizes of the models that most people serve: they must not spill
GROUP = 4

_POINTERS = {
    "Parts": "*fp32",
    "PartLse": "*fp32",
    "CosSin": "*fp32",
    "ReqToToken": "*i32",
    "ReqToLr": "*i32",
    "Rows": "*i64",
    "SeqLens": "*i64",
    "Adapters": "*i32",
    "Ranks": "*i32",
    "QIndptr": "*i32",
    "Slots": "*i64",
}


@dataclass
class Build:
    """One kernel, one configuration, one architecture."""

    kernel: str
    arch: int
    dtype: str
    head_dim: int | None
    width: int
    rows: str
    registers: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0
    error: str | None = None


def builds(archs: list[int], quick: bool) -> Iterator[tuple[Build, Any, dict[str, Any]]]:
    """``(build, kernel, configuration)`` of everything that the wrappers can launch."""
    for build, kernel, config in _all_builds(archs):
        is_like_another = build.width == 32 or (build.dtype == "fp16" and build.head_dim != 128)
        if not (quick and is_like_another):
            yield build, kernel, config


def _all_builds(archs: list[int]) -> Iterator[tuple[Build, Any, dict[str, Any]]]:
    for arch, (name, dtype), width in itertools.product(archs, DTYPES.items(), WIDTHS):
        block_r = max(16, triton.next_power_of_2(width))
        for head_dim, rows in itertools.product(HEAD_DIMS, ("none", "v", "kv")):
            if rows == "none" and width != WIDTHS[0]:
                continue
            shape = {
                "GROUP": GROUP,
                "HEAD_DIM": head_dim,
                "HALF": head_dim // 2,
                "BLOCK_D": triton.next_power_of_2(head_dim),
                "BLOCK_HALF": triton.next_power_of_2(head_dim // 2),
                "BLOCK_R": block_r,
                "HAS_KEYS": "k" in rows,
                "HAS_VALUES": "v" in rows,
                "CAP": False,
                "WINDOW": False,
                "NEOX": True,
            }
            config = lr_extend.extend_config(head_dim, block_r, rows != "none", "k" in rows, dtype)
            yield (
                Build("extend", arch, name, head_dim, width, rows),
                lr_extend._extend,
                shape | config,
            )
            config = lr_decode.decode_config(head_dim, block_r, "k" in rows, GROUP, dtype)
            yield (
                Build("decode", arch, name, head_dim, width, rows),
                lr_decode._decode_part,
                shape | config,
            )
            if rows == "none":
                join = {"HEAD_DIM": head_dim, "BLOCK_D": shape["BLOCK_D"]}
                join |= {"BLOCK_SPLITS": lr_decode.MAX_SPLITS, "num_warps": 4}
                build = Build("join", arch, name, head_dim, width, rows)
                yield build, lr_decode._join_parts, join
        for parts in (1, 2):
            config = {"WIDTH": width, "PARTS": parts, "BLOCK_C": block_r}
            build = Build("write", arch, name, None, width, "kv" if parts == 2 else "v")
            yield build, lr_write._write, config | lr_write.write_config(dtype)


def compile_one(build: Build, kernel: Any, config: dict[str, Any]) -> None:
    """Fill in what the cubin needs of the GPU."""
    options = {name: config.pop(name) for name in ("num_warps", "num_stages") if name in config}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in config else _type_of(name, build.dtype) for name in names
    }
    # What the launcher finds of real tensors: aligned to 16 bytes, strides multiples of 16.
    aligned = [
        index
        for index, name in enumerate(names)
        if signature[name].startswith("*")
        or (name.startswith("stride") and name not in ("stride_req", "stride_lr"))
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in config.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", build.arch, 32), options=options)
    build.shared_bytes = int(compiled.metadata.shared)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage gave no registers:\n{text}")
    build.registers, build.spill_bytes = int(found[1]), int(found[2])


def _type_of(name: str, dtype: str) -> str:
    if name in _POINTERS:
        return _POINTERS[name]
    if name in ("scale", "logit_cap"):
        return "fp32"
    return f"*{dtype}" if name[0].isupper() else "i32"


def table(done: list[Build]) -> str:
    header = (
        f"{'kernel':<8}{'sm':>4}{'dtype':>6}{'head':>6}{'rank':>6}{'rows':>6}"
        f"{'registers':>11}{'shared':>9}{'spilled':>9}"
    )
    lines = [header, "-" * len(header)]
    for b in done:
        line = f"{b.kernel:<8}{b.arch:>4}{b.dtype:>6}{b.head_dim or '-':>6}{b.width:>6}{b.rows:>6}"
        figures = f"{b.registers:>11}{b.shared_bytes:>9}{b.spill_bytes:>9}"
        lines.append(line + (f"  {b.error}" if b.error else figures))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    done: list[Build] = []
    everything = list(builds(args.arch, args.quick))
    for number, (build, kernel, config) in enumerate(everything, start=1):
        try:
            compile_one(build, kernel, config)
        except Exception as error:  # reported with its configuration, and the rest goes on
            build.error = f"{type(error).__name__}: {str(error)[:200]}"
        done.append(build)
        print(f"\r{number}/{len(everything)}", end="", file=sys.stderr, flush=True)
    print(f"\n{table(done)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(build) for build in done], indent=2) + "\n")
    bad = [b for b in done if b.error or (b.spill_bytes and b.head_dim in SPARED)]
    if bad:
        raise SystemExit(f"{len(bad)} configurations do not compile or spill")


if __name__ == "__main__":
    main()
