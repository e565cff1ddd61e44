"""Schedules publish the same: base KV and rows compared token by token, and by what is read.

One workload of seeded turns on a server for each schedule and chunk size. Every turn must
agree with the reference engine, and what is cached at the end with what schedule lp cached
on whole prompts.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agreement import TOLERANCE, Trajectory, random_turns, run_trajectories
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerProcess
from published import Published, differences, publish_plugin, published
from reference import ReferenceEngine, Weights
from tiny import make_adapter, make_model

TARGETS: dict[str, dict[str, Any]] = {
    "plan": {"r": 8},
    "action": {"r": 4, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    "reflect": {"r": 6, "targets": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")},
}
ROLES: list[str | None] = [*TARGETS, None]
CASES = [(schedule, chunk) for schedule in ("db", "auto") for chunk in ("32", "64", "4096")]
CASES.append(("lp", "32"))


@dataclass
class Assets:
    model: Path
    adapters: dict[str, Path]
    weights: Weights


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    folder = tmp_path_factory.mktemp("schedules")
    # Without an end-of-sequence token answers have the length that was asked for, though
    # admission bets on shorter ones: decoding may have to retract.
    model = make_model(folder / "model", eos_token_id=None)
    adapters = {
        role: make_adapter(folder / role, model, seed=seed, **settings)
        for seed, (role, settings) in enumerate(TARGETS.items())
    }
    return Assets(model, adapters, Weights.load(model))


def new_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(20, 256) for _ in range(count)]


def serve(assets: Assets, schedule: str, chunk: str, folder: Path, *args: str) -> ServerProcess:
    flags = ["--precache-method", "rebaseshared", "--precache-schedule", schedule]
    flags += ["--dtype", "float32", "--skip-tokenizer-init", "--log-level", "warning"]
    flags += ["--max-running-requests", "12", "--max-loras-per-batch", "4"]
    flags += ["--chunked-prefill-size", chunk, *args]
    return ServerProcess(assets.model, assets.adapters, flags, env=publish_plugin(folder))


def drive(server: ServerProcess, assets: Assets) -> None:
    """One, four and eight trajectories at once; turns that end in every way."""
    rng = random.Random(1)
    for at_once in (1, 4, 8):
        trajectories = [
            Trajectory(
                server,
                ReferenceEngine(assets.weights, "rebaseshared", assets.adapters),
                f"{at_once}-{index}",
            )
            for index in range(at_once)
        ]
        turns = [random_turns(rng, 256, ROLES, 5, longest=90) for _ in trajectories]
        assert run_trajectories(trajectories, turns, at_once) < TOLERANCE
    ended(server, assets)


def ended(server: ServerProcess, assets: Assets) -> None:
    """Turns that end by a stop token and by an abort, and one with two answers."""
    rng = random.Random(2)
    trajectory = Trajectory(
        server, ReferenceEngine(assets.weights, "rebaseshared", assets.adapters), "ended"
    )

    first = trajectory.turn("plan", new_tokens(rng, 50), 6)
    # The same turn again on a context of its own shows which token will come third.
    prompt = trajectory.tokens + new_tokens(rng, 20)
    body = {
        "input_ids": prompt,
        "lora_path": "action",
        "cache_salt": "stopped",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    whole = server.post("/generate", body)["output_ids"]
    stop = whole[2]
    body["cache_salt"] = "stopped-2"
    body["sampling_params"] = {"max_new_tokens": 8, "temperature": 0, "stop_token_ids": [stop]}
    answer = server.post("/generate", body)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["output_ids"] == whole[: whole.index(stop) + 1]
    twice = server.post(
        "/generate",
        {
            **body,
            "cache_salt": "twice",
            "sampling_params": {"max_new_tokens": 5, "temperature": 0, "n": 2, "ignore_eos": True},
        },
    )
    # SGLang feeds the prompt in a request of its own first: both answers read its neutral base.
    one, other = (answer["output_ids"] for answer in twice)
    assert one == other and len(one) == 5
    stopper = threading.Thread(
        target=lambda: (time.sleep(0.5), server.post("/abort_request", {"rid": "to-abort"}))
    )
    stopper.start()
    aborted = server.post(
        "/generate",
        {
            **body,
            "rid": "to-abort",
            "cache_salt": "aborted",
            "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True},
        },
    )
    stopper.join()
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    # What each of them left behind serves every role.
    for role in ROLES:
        trajectory.turn(role, new_tokens(rng, 15), 4)
    assert trajectory.difference < TOLERANCE
    assert len(first.output) == 6


def at_rest(server: ServerProcess) -> dict[str, Any]:
    state = server.wait_for_backlog()
    assert server.alive()
    assert state["problems"] == []
    assert state["shadow_tokens"] == 0
    assert state["lr_slots_pinned"] == 0
    assert state["base_tokens_in_use"] == state["base_tokens"] + state["own_base_tokens"]
    assert state["lr_slots_in_use"] == state["lr_slots_evictable"]
    return state


def record(
    assets: Assets, schedule: str, chunk: str, folder: Path
) -> tuple[Published, dict[str, Any]]:
    """What the workload left in the cache, and the server's state then."""
    with serve(assets, schedule, chunk, folder, "--max-total-tokens", "12000") as server:
        drive(server, assets)
        state = at_rest(server)
        found = published(server, folder)
    # When the abort arrives is not ours to say.
    return {key: tensors for key, tensors in found.items() if key[1] != "aborted"}, state


@pytest.fixture(scope="module")
def expected(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Schedule lp on whole prompts."""
    found, state = record(assets, "lp", "4096", tmp_path_factory.mktemp("lp"))
    assert state["total_neutral_beside"] == 0
    assert len(found) > 1000
    return found


@pytest.mark.parametrize(("schedule", "chunk"), CASES)
def test_schedules_publish_the_same(
    schedule: str, chunk: str, assets: Assets, expected: Published, tmp_path: Path
) -> None:
    found, state = record(assets, schedule, chunk, tmp_path)
    problems = differences(expected, found)
    assert not problems, problems[:10]
    if schedule != "lp":
        # How much auto lets ride is up to what steps cost, which depends on the machine's load.
        least = 0.2 * state["total_neutral"] if schedule == "db" else 0
        assert state["total_neutral_beside"] > least


@pytest.mark.parametrize("schedule", ["db", "auto"])
def test_a_pool_too_small_for_pairs_gives_shadows_up_and_retracts(
    schedule: str, assets: Assets, tmp_path: Path
) -> None:
    def run(server: ServerProcess) -> None:
        trajectories = [
            Trajectory(
                server,
                ReferenceEngine(assets.weights, "rebaseshared", assets.adapters),
                f"small-{index}",
            )
            for index in range(8)
        ]
        rng = random.Random(4)
        # No second turn: what a first one left may have been evicted, which the reference
        # does not do.
        prompts = [new_tokens(rng, 60) for _ in trajectories]
        roles = [rng.choice(list(TARGETS)) for _ in trajectories]

        def turn(index: int) -> None:
            trajectories[index].turn(roles[index], prompts[index], 120, ignore_eos=False)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(turn, range(8)))
        assert max(trajectory.difference for trajectory in trajectories) < TOLERANCE

    args = ["--max-total-tokens", "1000", "--schedule-conservativeness", "0.1"]
    args += ["--log-level", "info"]
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    with serve(assets, schedule, "64", small, *args) as server:
        run(server)
        state = at_rest(server)
        assert state["total_neutral_beside"] > 0
        assert "Retract requests" in server.log()
        left = published(server, small)
    # What was not evicted is what schedule lp caches where there is room for all.
    with serve(assets, "lp", "64", large, "--max-total-tokens", "12000") as server:
        run(server)
        at_rest(server)
        whole = published(server, large)
    assert len(left) > 300
    assert left.keys() <= whole.keys()
    problems = differences({key: whole[key] for key in left}, left)
    assert not problems, problems[:10]


@pytest.mark.parametrize("schedule", ["lp", "auto"])
def test_provisional_turns_equal_prelrshared_and_rebased_ones_rebaseshared(
    schedule: str, assets: Assets, tmp_path: Path
) -> None:
    args = ["--max-total-tokens", "8000", "--precache-max-neutral-wait", "0"]
    rng = random.Random(6)
    prelr = ReferenceEngine(assets.weights, "prelrshared", assets.adapters)
    rebase = ReferenceEngine(assets.weights, "rebaseshared", assets.adapters)
    with serve(assets, schedule, "64", tmp_path, *args) as server:
        trajectory = Trajectory(server, prelr, "one")
        # Somebody else keeps the engine busy, so that little of the backlog is done.
        busy = threading.Thread(
            target=server.post,
            args=(
                "/generate",
                {
                    "rid": "busy",
                    "input_ids": new_tokens(rng, 20),
                    "lora_path": "reflect",
                    "cache_salt": "busy",
                    "sampling_params": {
                        "max_new_tokens": 3000,
                        "temperature": 0,
                        "ignore_eos": True,
                    },
                },
            ),
        )
        busy.start()
        first = trajectory.turn("plan", new_tokens(rng, 90), 1)
        prompt = trajectory.tokens[:-1]
        trajectory.turn("action", new_tokens(rng, 40), 3)
        trajectory.turn("reflect", new_tokens(rng, 10), 3)
        state = server.state()
        if schedule == "lp":  # under auto the backlog may ride along fast enough
            assert state["total_provisional"] > 0
            assert trajectory.difference < TOLERANCE
        # Once the engine has time, a turn in flight still reads what it began with.
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(trajectory.turn, "plan", new_tokens(rng, 5), 200)
            time.sleep(1)
            server.post("/abort_request", {"rid": "busy"})
            busy.join()
            difference = late.result().difference
        if schedule == "lp":
            assert difference < TOLERANCE
        state = at_rest(server)
        assert state["provisional_tokens"] == 0
        assert state["total_rebased"] == state["total_provisional"]
        # The first turn's tokens are now as rebaseshared has them for everybody.
        after = Trajectory(server, rebase, "one")
        rebase.turn("plan", prompt, first.output)
        for role in ("action", "reflect", None, "plan"):
            after.tokens = prompt
            assert after.turn(role, new_tokens(rng, 7), 4).difference < TOLERANCE
        at_rest(server)


@pytest.mark.parametrize("schedule", ["db", "auto"])
def test_stop_strings_grammars_and_choices_are_the_users_alone(
    schedule: str, tmp_path: Path
) -> None:
    """The real model, whose tokenizer these need; answers and cache as on schedule lp."""
    prompt = "Question: Why is the sky blue?\n\nThought: \n### Response:\n" * 4
    schema = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}'
    requests: list[dict[str, Any]] = [
        {"max_new_tokens": 24, "temperature": 0, "stop": ["is", "the"]},
        {"max_new_tokens": 24, "temperature": 0, "json_schema": schema},
        {"max_new_tokens": 12, "temperature": 0, "n": 2},
        {"max_new_tokens": 12, "temperature": 0, "frequency_penalty": 1.0},
    ]

    def run(name: str) -> tuple[list[Any], Published]:
        flags = ["--precache-method", "rebaseshared", "--precache-schedule", name]
        flags += ["--dtype", "float32", "--max-total-tokens", "8000", "--log-level", "warning"]
        flags += ["--max-loras-per-batch", "4", "--chunked-prefill-size", "64"]
        folder = tmp_path / name
        folder.mkdir()
        env = publish_plugin(folder)
        found: list[Any] = []
        with ServerProcess(ensure_demo_model(), demo_adapters(), flags, env) as server:
            for role in ("plan", "action", "plan"):
                for sampling in requests:
                    body = {"text": prompt, "lora_path": role, "sampling_params": sampling}
                    answer = server.post("/generate", body)
                    server.wait_for_backlog()
                    for one in answer if isinstance(answer, list) else [answer]:
                        usage = one["meta_info"]
                        found.append((one["text"], usage["completion_tokens"]))
            at_rest(server)
            return found, published(server, folder)

    (answers, cached), (expected_answers, expected_cached) = run(schedule), run("lp")
    assert answers == expected_answers
    problems = differences(expected_cached, cached)
    assert not problems, problems[:10]
    assert len(cached) > 100
