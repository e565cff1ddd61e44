"""Replay of agent turns against a running server, one trajectory at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from precache_sglang.launch.process import ServerProcess
from precache_sglang.launch.traces import TraceTurn
from precache_sglang.launch.trajectories import Trajectory


@dataclass(frozen=True)
class TurnTiming:
    """One agent call.

    Attributes:
        ttft_ms: From the call to its first token. The call is made once the neutral pass
            of the turn before it is done, as in the paper.
        turn_ms: From the call to its last token.
        prompt_tokens, output_tokens: Lengths.
        shared, own, replayed, computed: Where the prompt's tokens came from; all
            ``computed`` or ``own`` on stock SGLang, which cannot tell roles apart.
    """

    role: str
    ttft_ms: float
    turn_ms: float
    prompt_tokens: int
    output_tokens: int
    shared: int
    own: int
    replayed: int
    computed: int


@dataclass(frozen=True)
class Replay:
    """A whole trajectory. `total_ms` includes the neutral passes; bytes are peaks."""

    turns: list[TurnTiming]
    outputs: list[list[int]]
    total_ms: float
    peak_base_bytes: int | None
    peak_lr_bytes: int | None

    @property
    def ttft_ms(self) -> float:
        """Summed over the turns."""
        return sum(turn.ttft_ms for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        last = self.turns[-1]
        return last.prompt_tokens + last.output_tokens

    @property
    def shared_share(self) -> float:
        """Share of the earlier context that role switches found fed by other roles."""
        prompt = sum(turn.prompt_tokens for turn in self.turns)
        return sum(turn.shared for turn in self.turns) / prompt


def replay_trace(
    server: ServerProcess,
    trace: Sequence[TraceTurn],
    tokens: Sequence[Sequence[int]],
    progress: Callable[[], None] = lambda: None,
) -> Replay:
    """Replay a controlled trace: `tokens[i]` are turn i's new tokens, output runs to length."""
    context: list[int] = []

    def turn(index: int) -> tuple[str, list[int], dict[str, Any]]:
        call = trace[index]
        context.extend(tokens[index])
        sampling = {"max_new_tokens": call.decode_len, "temperature": 0, "ignore_eos": True}
        return call.agent, context, sampling

    return _replay(server, len(trace), turn, context.extend, progress)


def replay_text(
    server: ServerProcess,
    trajectory: Trajectory,
    encode: Callable[[str], list[int]],
    max_new_tokens: int = 48,
    progress: Callable[[], None] = lambda: None,
) -> Replay:
    """Let the roles speak: recorded questions and observations, outputs of their own."""
    context: list[int] = []

    def turn(index: int) -> tuple[str, list[int], dict[str, Any]]:
        call = trajectory.turns[index]
        context.extend(encode(call.input_text_appended))
        return call.role, context, {"max_new_tokens": max_new_tokens, "temperature": 0}

    return _replay(server, len(trajectory.turns), turn, context.extend, progress)


def _replay(
    server: ServerProcess,
    num_turns: int,
    prepare: Callable[[int], tuple[str, list[int], dict[str, Any]]],
    keep: Callable[[list[int]], None],
    progress: Callable[[], None],
) -> Replay:
    _flush(server)
    has_state = server.has_precache()
    timings: list[TurnTiming] = []
    outputs: list[list[int]] = []
    start = time.perf_counter()
    for index in range(num_turns):
        role, prompt, sampling = prepare(index)
        body = {"input_ids": prompt, "lora_path": role, "sampling_params": sampling}
        called = time.perf_counter()
        first: float | None = None
        last: dict[str, Any] = {}
        for event in server.stream("/generate", body):
            first = first or time.perf_counter()
            last = event
        done = time.perf_counter()
        assert first is not None, "a turn has at least one token"
        meta, output = last["meta_info"], last["output_ids"]
        counts = meta.get("precache") or {
            "shared": 0,
            "own": meta["cached_tokens"],
            "replayed": 0,
            "computed": meta["prompt_tokens"] - meta["cached_tokens"],
        }
        timings.append(
            TurnTiming(
                role=role,
                ttft_ms=(first - called) * 1e3,
                turn_ms=(done - called) * 1e3,
                prompt_tokens=meta["prompt_tokens"],
                output_tokens=len(output),
                **counts,
            )
        )
        # A generated EOS ends the turn; it is not part of the context.
        finish = meta["finish_reason"]
        said = output[:-1] if finish.get("type") == "stop" else output
        outputs.append(list(said))
        keep(list(said))
        if has_state:
            server.wait_for_backlog()
        progress()
    total_ms = (time.perf_counter() - start) * 1e3
    state = server.state() if has_state else {}
    return Replay(
        timings, outputs, total_ms, state.get("peak_base_bytes"), state.get("peak_lr_bytes")
    )


def _flush(server: ServerProcess) -> None:
    server.post("/flush_cache?timeout=60")
