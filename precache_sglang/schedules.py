"""When neutral passes run: the schedules, side by side.

A schedule is data, as a method is. Whatever it says, what gets published is the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """One way to fit neutral tokens in between users' requests.

    Under every schedule, what is owed when a turn ends is computed before a request that
    extends the trajectory, and otherwise when nothing else runs.

    Attributes:
        beside: Neutral tokens also ride along in the steps of users' requests.
        lockstep: A turn's neutral pass takes every token in the step in which the turn
            feeds it, whatever that costs. Otherwise spans fill what the step leaves of
            the token budget, and take only slots that nobody else wants.
        summary: One line for ``--help`` and the README.
    """

    name: str
    beside: bool
    lockstep: bool
    summary: str


SCHEDULES: dict[str, Schedule] = {
    s.name: s
    for s in (
        Schedule("lp", beside=False, lockstep=False, summary="after the turn"),
        Schedule(
            "db",
            beside=True,
            lockstep=True,
            summary="beside the turn, token by token",
        ),
        Schedule(
            "auto",
            beside=True,
            lockstep=False,
            summary="beside any step, in the budget it leaves; the rest after the turn",
        ),
    )
}
DEFAULT_SCHEDULE = "auto"
