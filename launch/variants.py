"""What a benchmark compares: a method, and how its neutral passes run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from precache_sglang.config import Settings
from precache_sglang.errors import SettingsError
from precache_sglang.schedules import DEFAULT_SCHEDULE

T = TypeVar("T")
SYNTAX = "METHOD[:SCHEDULE[:WAIT_MS]]"
SPARE_TOKENS = 512  # of a context, beyond what is replayed


@dataclass(frozen=True)
class Variant:
    """One line of a comparison. Raises `SettingsError` where the server would.

    Attributes:
        method: Name in `METHODS`, or ``"off"``: stock SGLang.
        schedule: Of the neutral passes; None: the server's default.
        wait_ms: ``--precache-max-neutral-wait``; None: the server's default.
    """

    method: str
    schedule: str | None = None
    wait_ms: int | None = None

    def __post_init__(self) -> None:
        Settings(
            method=self.method,
            schedule=DEFAULT_SCHEDULE if self.schedule is None else self.schedule,
            max_neutral_wait_ms=-1 if self.wait_ms is None else self.wait_ms,
        )

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read `SYNTAX`; fit to be the type of an argument."""
        method, *more = text.split(":")
        try:
            if len(more) > 2:
                raise SettingsError(f"expected {SYNTAX}")
            return cls(method, more[0] if more else None, int(more[1]) if more[1:] else None)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error

    def __str__(self) -> str:
        parts = (self.method, self.schedule, self.wait_ms)
        return ":".join(str(part) for part in parts if part is not None)

    def flags(self) -> list[str]:
        """For the server."""
        flags = ["--precache-method", self.method]
        if self.schedule is not None:
            flags += ["--precache-schedule", self.schedule]
        if self.wait_ms is not None:
            flags += ["--precache-max-neutral-wait", str(self.wait_ms)]
        return flags


def room_for_all(longest: int, num_adapters: int) -> int:
    """KV slots in which every adapter, and none, can hold `longest` tokens and a turn more."""
    return (longest + SPARE_TOKENS) * (num_adapters + 1)


def add_argument(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """`--variants`: a list of `Variant`, without repetitions of its own."""
    parser.add_argument(
        "--variants",
        nargs="+",
        type=Variant.parse,
        default=[Variant.parse(text) for text in default],
        metavar=SYNTAX,
        help="one server each; METHOD `off` is stock SGLang, WAIT_MS is "
        f"--precache-max-neutral-wait; default: {' '.join(default)}",
    )


def rotated(items: Sequence[T], by: int) -> list[T]:
    """`items`, begun at another one with each `by`: a machine that drifts favours none."""
    by %= len(items)
    return [*items[by:], *items[:by]]
