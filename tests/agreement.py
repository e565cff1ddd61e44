"""Drive a server with teacher-free turns and compare it with the reference engine."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from precache_sglang.launch.process import ServerProcess
from reference import ReferenceEngine

TOLERANCE = 1e-3


@dataclass
class TurnResult:
    role: str | None
    output: list[int]
    logprobs: list[float]
    counts: dict[str, int]
    difference: float


class Trajectory:
    """One growing context on a server, mirrored by a reference engine.

    Every trajectory has its own `cache_salt`, so that the order in which the server
    interleaves trajectories cannot matter.
    """

    def __init__(self, server: ServerProcess, reference: ReferenceEngine, salt: str) -> None:
        self.server = server
        self.reference = reference
        self.salt = salt
        self.tokens: list[int] = []
        self.results: list[TurnResult] = []

    def turn(
        self, role: str | None, new_tokens: list[int], num_output: int, **sampling: Any
    ) -> TurnResult:
        """Append `new_tokens`, let `role` answer, and check every logprob."""
        prompt = self.tokens + list(new_tokens)
        answer = self.server.post(
            "/generate",
            {
                "input_ids": prompt,
                "lora_path": role,
                "cache_salt": self.salt,
                "return_logprob": True,
                "sampling_params": {
                    "max_new_tokens": num_output,
                    "temperature": 0,
                    "ignore_eos": True,
                    **sampling,
                },
            },
        )
        meta = answer["meta_info"]
        output = answer["output_ids"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        expected = self.reference.turn(role, prompt, output).logprobs.tolist()
        difference = max(abs(a - b) for a, b in zip(logprobs, expected, strict=True))
        result = TurnResult(role, output, logprobs, meta["precache"], difference)
        self.results.append(result)
        self.tokens = prompt + output
        return result

    @property
    def difference(self) -> float:
        return max(result.difference for result in self.results)


def random_turns(
    rng: random.Random, vocab_size: int, roles: list[str | None], num_turns: int, longest: int = 40
) -> list[tuple[str | None, list[int], int]]:
    """(role, new tokens, output tokens) of a trajectory over random tokens."""
    return [
        (
            rng.choice(roles),
            [rng.randrange(20, vocab_size) for _ in range(rng.randint(1, longest))],
            rng.randint(1, 8),
        )
        for _ in range(num_turns)
    ]


def run_trajectories(
    trajectories: list[Trajectory],
    turns: list[list[tuple[str | None, list[int], int]]],
    at_once: int,
) -> float:
    """Run every trajectory's turns, `at_once` trajectories at a time; largest difference."""

    def run(index: int) -> None:
        for role, new_tokens, num_output in turns[index]:
            trajectories[index].turn(role, new_tokens, num_output)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, range(len(trajectories))))
    return max(t.difference for t in trajectories)
