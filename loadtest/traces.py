"""What users send: trajectories with text, or traces with random tokens, as one kind of script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from precache_sglang.launch.traces import FIRST_PLAIN_ID, TraceTurn, load_trace, tokens_for
from precache_sglang.launch.trajectories import Trajectory, load_trajectories


@dataclass(frozen=True)
class Step:
    """One turn: what is appended to the context, and who answers.

    Attributes:
        new: Text, or token ids; all steps of a script are of one kind.
        max_tokens: Of the answer. An answer to token ids always has as many.
        pauses: Whether somebody or something outside takes its time after this turn: a tool,
            or the user who reads the end of the trajectory.
    """

    role: str
    new: str | list[int]
    max_tokens: int
    pauses: bool


class Scripts:
    """Draws scripts: of the trajectories, and of the traces with new tokens each time.

    Args:
        trajectories: Read from a file as in `precache_sglang.launch.trajectories`.
        traces: Agent calls as in `precache_sglang.launch.traces`.
        vocab_size: Ids of traces lie below it.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        traces: Sequence[Sequence[TraceTurn]],
        vocab_size: int,
    ) -> None:
        if vocab_size <= FIRST_PLAIN_ID:
            raise ValueError(
                f"--vocab-size {vocab_size}: give more than {FIRST_PLAIN_ID}, the first plain token"
            )
        self._makers = [*map(of_trajectory, trajectories)]
        self._traces = list(traces)
        self._vocab_size = vocab_size

    @classmethod
    def load(cls, trajectories: Path | None, traces: Sequence[str], vocab_size: int) -> Scripts:
        """Of a JSONL file and of traces by name or CSV file; the shipped trajectories without."""
        texts = load_trajectories(trajectories) if trajectories or not traces else []
        return cls(texts, [load_trace(name) for name in traces], vocab_size)

    @property
    def roles(self) -> list[str]:
        """All that occur."""
        found = {step.role for script in self._makers for step in script}
        return sorted(found | {turn.agent for trace in self._traces for turn in trace})

    def draw(self, rng: random.Random) -> list[Step]:
        """One script, each with the same probability."""
        index = rng.randrange(len(self._makers) + len(self._traces))
        if index < len(self._makers):
            return self._makers[index]
        trace = self._traces[index - len(self._makers)]
        return of_trace(trace, tokens_for(trace, self._vocab_size, seed=rng.randrange(1 << 30)))


def of_trajectory(trajectory: Trajectory) -> list[Step]:
    """Recorded questions and observations; the roles write as much as was recorded, or less."""
    last = len(trajectory.turns) - 1
    return [
        # An argument is what a tool is called with.
        Step(t.role, t.input_text_appended, t.n_output_tokens, t.kind == "argument" or i == last)
        for i, t in enumerate(trajectory.turns)
    ]


def of_trace(trace: Sequence[TraceTurn], tokens: Sequence[list[int]]) -> list[Step]:
    """`tokens[i]` are what call i appends. `action` calls tools; without it everybody pauses."""
    agents = {turn.agent for turn in trace}
    pausing = agents & {"action"} or agents
    last = len(trace) - 1
    return [
        Step(turn.agent, new, turn.decode_len, turn.agent in pausing or i == last)
        for i, (turn, new) in enumerate(zip(trace, tokens, strict=True))
    ]
