"""Recorded agent trajectories: what each role read and wrote, in one shared context.

A file has one JSON object per line. The context of turn i is everything before it, the appended
input and the output of turns 0 .. i-1, followed by turn i's appended input. All roles read the
same context; a role shows only in the adapter that serves its turn.

The shipped file (`assets/trajectories.jsonl`) was written for this project. Files in the same
format made from other data load as well; every field is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

# What each role writes. `plan` writes a thought and names a tool, `action` writes the argument of
# the tool, and `reflect` judges the answer after a Finish.
KINDS = {
    "plan": ("thought", "action_type"),
    "action": ("argument",),
    "reflect": ("thought", "verdict"),
}
VERDICTS = ("Reflect[right]", "Reflect[wrong]")

V = TypeVar("V", str, int, list[Any])


class TrajectoryError(ValueError):
    """A trajectory file cannot be used; the message names file, line and field."""


@dataclass(frozen=True)
class Turn:
    """One role's contribution. Lengths are in tokens of SmolLM2's tokenizer."""

    role: str
    kind: str
    input_text_appended: str
    gold_output: str  # as recorded, without the EOS token that ends it
    n_input_tokens: int
    n_output_tokens: int


@dataclass(frozen=True)
class Trajectory:
    """A question and all turns that led to its answer."""

    id: str
    source: str
    question: str
    options: str
    answer: str
    answer_text: str
    n_tokens: int
    turns: tuple[Turn, ...]

    @property
    def text(self) -> str:
        """The whole context after the last turn."""
        return "".join(turn.input_text_appended + turn.gold_output for turn in self.turns)

    def context(self, index: int) -> str:
        """What the role of turn `index` reads: all that came before, and the turn's own input."""
        before = (turn.input_text_appended + turn.gold_output for turn in self.turns[:index])
        return "".join(before) + self.turns[index].input_text_appended


def load_trajectories(path: Path | None = None) -> list[Trajectory]:
    """Read and check a trajectory file; the shipped one without an argument."""
    if path is None:
        path = Path(str(resources.files("precache_sglang.launch") / "assets/trajectories.jsonl"))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrajectoryError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    trajectories: list[Trajectory] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TrajectoryError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno})"
            ) from error
        trajectory = _trajectory(record, where)
        if trajectory.id in line_of_id:
            raise TrajectoryError(
                f"{where}: id: {trajectory.id!r} is already used in line "
                f"{line_of_id[trajectory.id]}; ids must be unique"
            )
        line_of_id[trajectory.id] = number
        trajectories.append(trajectory)
    if not trajectories:
        raise TrajectoryError(f"{path}: holds no trajectory; expected one JSON object per line")
    return trajectories


def _trajectory(record: object, where: str) -> Trajectory:
    if not isinstance(record, dict):
        raise TrajectoryError(f"{where}: expected a JSON object, got {type(record).__name__}")
    turns = tuple(
        _turn(turn, f"{where}: turns[{index}]")
        for index, turn in enumerate(_field(record, "turns", list, where))
    )
    if not turns:
        raise TrajectoryError(f"{where}: turns: is empty; a trajectory needs at least one turn")
    n_turns = _field(record, "n_turns", int, where)
    if n_turns != len(turns):
        raise TrajectoryError(f"{where}: n_turns: is {n_turns}, but there are {len(turns)} turns")
    n_tokens = _field(record, "n_tokens", int, where)
    summed = sum(turn.n_input_tokens + turn.n_output_tokens for turn in turns)
    if n_tokens != summed:
        raise TrajectoryError(f"{where}: n_tokens: is {n_tokens}, but the turns add up to {summed}")
    return Trajectory(
        id=_field(record, "id", str, where),
        source=_field(record, "source", str, where),
        question=_field(record, "question", str, where),
        options=_field(record, "options", str, where),
        answer=_field(record, "answer", str, where),
        answer_text=_field(record, "answer_text", str, where),
        n_tokens=n_tokens,
        turns=turns,
    )


def _turn(record: object, where: str) -> Turn:
    if not isinstance(record, dict):
        raise TrajectoryError(f"{where}: expected a JSON object, got {type(record).__name__}")
    turn = Turn(
        role=_field(record, "role", str, where),
        kind=_field(record, "kind", str, where),
        input_text_appended=_field(record, "input_text_appended", str, where),
        gold_output=_field(record, "gold_output", str, where),
        n_input_tokens=_field(record, "n_input_tokens", int, where),
        n_output_tokens=_field(record, "n_output_tokens", int, where),
    )
    if turn.role not in KINDS:
        raise TrajectoryError(f"{where}.role: is {turn.role!r}; expected one of {', '.join(KINDS)}")
    if turn.kind not in KINDS[turn.role]:
        raise TrajectoryError(
            f"{where}.kind: is {turn.kind!r}; {turn.role} writes {' or '.join(KINDS[turn.role])}"
        )
    for name in ("n_input_tokens", "n_output_tokens"):
        if getattr(turn, name) < 1:
            raise TrajectoryError(f"{where}.{name}: is {getattr(turn, name)}; must be at least 1")
    if turn.kind == "argument" and not turn.gold_output.endswith("]"):
        raise TrajectoryError(f"{where}.gold_output: an argument must end with its bracket ']'")
    if turn.kind == "verdict" and turn.gold_output not in VERDICTS:
        raise TrajectoryError(
            f"{where}.gold_output: is {turn.gold_output!r}; a verdict is {' or '.join(VERDICTS)}"
        )
    return turn


def _field(record: Mapping[str, Any], name: str, kind: type[V], where: str) -> V:
    """`record[name]`, which must be there, be a `kind` and not be an empty string."""
    label = f"{where}.{name}" if where.endswith("]") else f"{where}: {name}"
    if name not in record:
        raise TrajectoryError(f"{label}: is missing")
    value = record[name]
    # bool is a subclass of int, and `true` is not a token count.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TrajectoryError(f"{label}: expected {kind.__name__}, got {type(value).__name__}")
    if value == "":
        raise TrajectoryError(f"{label}: is empty")
    return value
