"""Controlled traces: only how many tokens each agent call adds, no text.

A trace is a CSV file with the header `agent,prefill_len,decode_len`, one agent call per row. A
call appends `prefill_len` new tokens to the one shared trajectory, under its agent's adapter, and
then decodes `decode_len` tokens, which stay in the trajectory too.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

HEADER = ["agent", "prefill_len", "decode_len"]
# Tokenizers keep their control tokens at the low ids (SmolLM2: 0 to 16) or at the very end.
FIRST_PLAIN_ID = 20
# Ids below it are plain tokens of SmolLM2 and of most larger vocabularies.
VOCABULARY = 49000


class TraceError(ValueError):
    """A trace cannot be found or used; the message says why."""


@dataclass(frozen=True)
class TraceTurn:
    """One agent call, in tokens."""

    agent: str
    prefill_len: int
    decode_len: int

    @property
    def total_len(self) -> int:
        return self.prefill_len + self.decode_len


def trace_names() -> list[str]:
    """Names of the shipped traces, shortest trace first within each family."""
    traces = {path.stem: load_trace(path) for path in _shipped().glob("*.csv")}
    return sorted(traces, key=lambda name: (name.split("_")[0], total_len(traces[name])))


def load_trace(name_or_path: str | Path) -> list[TraceTurn]:
    """Read a trace: a shipped one by name ("roles_5.0k", or "5.0k" for short), or any CSV file."""
    path = _find(name_or_path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if not rows or rows[0] != HEADER:
        found = ",".join(rows[0]) if rows else "an empty file"
        raise TraceError(f"{path}, line 1: expected the header {','.join(HEADER)}, got {found}")
    trace = [
        _turn(row, f"{path}, line {number}") for number, row in enumerate(rows[1:], start=2) if row
    ]
    if not trace:
        raise TraceError(f"{path}: holds no agent call, only a header")
    return trace


def prefill_len(trace: Sequence[TraceTurn]) -> int:
    """Tokens that the calls append."""
    return sum(turn.prefill_len for turn in trace)


def decode_len(trace: Sequence[TraceTurn]) -> int:
    """Tokens that the calls decode."""
    return sum(turn.decode_len for turn in trace)


def total_len(trace: Sequence[TraceTurn]) -> int:
    """Length of the trajectory after the last call."""
    return sum(turn.total_len for turn in trace)


def tokens_for(
    trace: Sequence[TraceTurn], vocab_size: int, seed: int, avoid: Collection[int] = ()
) -> list[list[int]]:
    """Random token ids for each call's prefill, the same ones for the same arguments.

    Ids below `FIRST_PLAIN_ID` are never drawn. Pass the EOS id, and further control tokens if the
    vocabulary has them at its end, in `avoid`.
    """
    excluded = frozenset(avoid)
    plain = [token for token in range(FIRST_PLAIN_ID, vocab_size) if token not in excluded]
    if not plain:
        raise TraceError(
            f"vocab_size {vocab_size} leaves no token to draw: ids below {FIRST_PLAIN_ID} and "
            f"{len(excluded)} further ones are left out"
        )
    rng = random.Random(seed)
    return [rng.choices(plain, k=turn.prefill_len) for turn in trace]


def _shipped() -> Path:
    return Path(str(resources.files("precache_sglang.launch") / "assets/traces"))


def _find(name_or_path: str | Path) -> Path:
    if isinstance(name_or_path, Path) or name_or_path.endswith(".csv"):
        path = Path(name_or_path)
        if path.is_file():
            return path
    else:
        for stem in (name_or_path, f"roles_{name_or_path}"):
            # Comparing names keeps "../x" from reaching files outside the folder.
            for path in _shipped().glob("*.csv"):
                if path.stem == stem:
                    return path
    names = ", ".join(trace_names())
    raise TraceError(f"no trace {str(name_or_path)!r}: give a .csv file or one of {names}")


def _turn(row: list[str], where: str) -> TraceTurn:
    if len(row) != len(HEADER):
        raise TraceError(f"{where}: expected {len(HEADER)} columns, got {len(row)}")
    agent = row[0].strip()
    if not agent:
        raise TraceError(f"{where}: agent: is empty")
    lengths = []
    for name, value in zip(HEADER[1:], row[1:], strict=True):
        # isdecimal also accepts digits of other scripts, which int() reads just as well.
        if not value.strip().isdecimal() or int(value) < 1:
            raise TraceError(f"{where}: {name}: is {value!r}; expected a positive whole number")
        lengths.append(int(value))
    return TraceTurn(agent, *lengths)
