"""The float32 server gives the reference engine's logprobs, over HTTP.

One server carries both shipped adapter sets, each as a team of its own, so every run
also checks that teams do not meet.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from agreement import TOLERANCE, Trajectory, random_turns, run_trajectories
from openai_clients import BothClients
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerProcess
from precache_sglang.launch.trajectories import load_trajectories
from reference import ReferenceEngine, Weights
from safetensors.torch import load_file, save_file
from tiny import make_adapter, make_model

from precache_sglang.request_role import HEADER

ROLES = ("plan", "action", "reflect")
SETS = {"qv": "scienceqa-qv-r8", "qkvo": "scienceqa-qkvo-r4"}
SMOLLM2_VOCABULARY = 49152
# baselrshared needs adapters with one A; its case is built from the shipped ones below.
METHODS = (
    *("nonshared", "fullshared", "baseshared", "baselrshared"),
    *("prelrshared", "rebaseshared", "rebaseown"),
)


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_demo_model()


@pytest.fixture(scope="module")
def weights(model: Path) -> Weights:
    return Weights.load(model)


def adapter_sets(method: str, folder: Path) -> dict[str, dict[str, Path]]:
    """Set name to role name to folder. Role names carry their set: ``qv-plan``."""
    sets = {
        name: {f"{name}-{role}": path for role, path in demo_adapters(shipped).items()}
        for name, shipped in SETS.items()
    }
    if method == "baselrshared":
        sets = {"qv": _with_common_a(sets["qv"], folder)}
    return sets


def _with_common_a(adapters: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Copies of the adapters in which every v_proj A is the first adapter's."""
    first = load_file(next(iter(adapters.values())) / "adapter_model.safetensors")
    common = {k: v for k, v in first.items() if "v_proj.lora_A" in k}
    copies: dict[str, Path] = {}
    for role, path in adapters.items():
        copies[role] = folder / role
        copies[role].mkdir()
        tensors = load_file(path / "adapter_model.safetensors") | common
        save_file(tensors, copies[role] / "adapter_model.safetensors")
        config = (path / "adapter_config.json").read_text()
        (copies[role] / "adapter_config.json").write_text(config)
    return copies


class Case:
    """A server with its adapter sets, and reference engines to mirror it."""

    def __init__(
        self, method: str, sets: dict[str, dict[str, Path]], weights: Weights, server: ServerProcess
    ) -> None:
        self.method = method
        self.sets = sets
        self.weights = weights
        self.server = server
        self._serial = 0

    def trajectory(self, set_name: str) -> Trajectory:
        self._serial += 1
        reference = ReferenceEngine(self.weights, self.method, self.sets[set_name])
        return Trajectory(self.server, reference, f"{set_name}-{self._serial}")

    def roles(self, set_name: str) -> list[str]:
        return list(self.sets[set_name])


@pytest.fixture(
    scope="module",
    # Chunked prompts for every method; whole ones where a pass writes the team's rows.
    params=[(method, "64", "lp") for method in METHODS]
    + [(method, "whole", "lp") for method in ("prelrshared", "rebaseshared")]
    + [("rebaseshared", "64", schedule) for schedule in ("db", "auto")]
    + [("rebaseown", "64", "db"), ("rebaseown", "whole", "auto")],
    ids="-".join,
)
def case(
    request: pytest.FixtureRequest,
    model: Path,
    weights: Weights,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    method, chunk, schedule = request.param
    sets = adapter_sets(method, tmp_path_factory.mktemp("common"))
    adapters = {role: path for roles in sets.values() for role, path in roles.items()}
    teams = [f"{name}={','.join(roles)}" for name, roles in sets.items()]
    args = ["--precache-method", method, "--precache-schedule", schedule]
    args += ["--dtype", "float32", "--log-level", "warning"]
    for team in teams:
        args += ["--precache-team", team]
    args += ["--max-total-tokens", "24000", "--max-running-requests", "8"]
    args += ["--max-loras-per-batch", str(len(adapters) + 1)]
    args += ["--chunked-prefill-size", "64" if chunk == "64" else "4096"]
    with ServerProcess(model, adapters, args) as server:
        yield Case(method, sets, weights, server)
        assert server.alive()
        state = server.wait_for_backlog()
        assert state["problems"] == []
        assert state["lr_slots_pinned"] == 0
        assert state["base_tokens_in_use"] == state["base_tokens"] + state["own_base_tokens"]


def test_text_trajectories_one_at_a_time(case: Case, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for index, (set_name, recorded) in enumerate(zip(case.sets, load_trajectories(), strict=False)):
        trajectory = case.trajectory(set_name)
        for turn in recorded.turns[: 5 + index]:
            # The end of a text will do; the first one begins with an instruction of 400 tokens.
            text = turn.input_text_appended[-600:]
            new = tokenizer.encode(text, add_special_tokens=False)
            trajectory.turn(f"{set_name}-{turn.role}", new, 3)
        assert trajectory.difference < TOLERANCE


def test_random_tokens_in_random_role_order(case: Case) -> None:
    """With adapter-free turns between, one trajectory at a time and four at once."""
    rng = random.Random(7)
    for at_once in (1, 4):
        trajectories = []
        turns = []
        for index in range(at_once):
            set_name = list(case.sets)[index % len(case.sets)]
            roles: list[str | None] = [*case.roles(set_name)]
            if set_name == next(iter(case.sets)):
                roles.append(None)  # requests without an adapter read the first team
            trajectories.append(case.trajectory(set_name))
            turns.append(random_turns(rng, SMOLLM2_VOCABULARY, roles, 4, longest=80))
        assert run_trajectories(trajectories, turns, at_once) < TOLERANCE


def test_a_role_switch_reads_the_earlier_context_as_shared(case: Case) -> None:
    set_name = next(iter(case.sets))
    first, second, _ = case.roles(set_name)
    trajectory = case.trajectory(set_name)
    rng = random.Random(3)
    new = [rng.randrange(20, SMOLLM2_VOCABULARY) for _ in range(200)]
    trajectory.turn(first, new, 4)
    context = len(trajectory.tokens) - 1  # the last sampled token was never fed
    counts = trajectory.turn(second, new[:10], 4).counts
    assert sum(counts.values()) == len(trajectory.tokens) - 4
    if case.method in METHODS[1:2] + METHODS[3:]:
        assert counts["shared"] >= 0.95 * context
    elif case.method == "baseshared":
        assert counts["shared"] == 0
        assert counts["replayed"] >= 0.95 * context
    else:
        assert counts["shared"] == counts["replayed"] == 0
    assert trajectory.difference < TOLERANCE


def test_openai_clients_choose_roles(case: Case) -> None:
    """Every endpoint under every method; `test_agent_clients` goes into them."""
    for is_async in (False, True):
        choose_roles(case, BothClients(f"{case.server.url}/v1", is_async))


def choose_roles(case: Case, ask: BothClients) -> None:
    served, *roles = (model.id for model in ask(lambda client: client.models.list()).data)
    first, second = case.roles(next(iter(case.sets)))[:2]
    assert {first, second} <= set(roles)
    question = "Why is the sky blue? " * 4
    messages = [{"role": "user", "content": question}]
    for model, headers in ((f"{served}:{first}", {}), (served, {HEADER: second})):
        chunks = ask(
            lambda client, model=model, headers=headers: client.completions.create(
                model=model,
                prompt=question,
                max_tokens=3,
                extra_headers=headers,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        usage = chunks[-1].usage
        assert sum(usage.precache.values()) == usage.prompt_tokens
        answer = ask(
            lambda client, model=model, headers=headers: client.chat.completions.create(
                model=model, messages=messages, max_tokens=3, n=2, extra_headers=headers
            )
        )
        assert len(answer.choices) == 2
        response = ask(
            lambda client, model=model, headers=headers: client.responses.create(
                model=model, input=question, max_output_tokens=5, extra_headers=headers
            )
        )
        assert response.output_text
    with pytest.raises(openai.NotFoundError, match=first):
        ask(lambda client: client.completions.create(model="nobody", prompt=question))


def test_an_adapter_loaded_in_mid_trajectory(case: Case) -> None:
    """Unload and load again: the same content may keep its rows, other content may not."""
    set_name = next(iter(case.sets))
    roles = case.roles(set_name)
    late = roles[-1]
    trajectory = case.trajectory(set_name)
    rng = random.Random(11)

    def new(count: int) -> list[int]:
        return [rng.randrange(20, SMOLLM2_VOCABULARY) for _ in range(count)]

    trajectory.turn(roles[0], new(60), 3)
    case.server.post("/unload_lora_adapter", {"lora_name": late})
    trajectory.reference.unload(late)
    trajectory.turn(roles[1], new(50), 3)
    path = str(case.sets[set_name][late])
    case.server.post("/load_lora_adapter", {"lora_name": late, "lora_path": path})
    trajectory.reference.load(late, path)
    result = trajectory.turn(late, new(20), 3)
    trajectory.turn(roles[0], new(20), 4)
    trajectory.turn(late, new(10), 4)
    # A role that has fed tokens itself goes and comes back.
    case.server.wait_for_backlog()
    first = str(case.sets[set_name][roles[0]])
    case.server.post("/unload_lora_adapter", {"lora_name": roles[0]})
    trajectory.reference.unload(roles[0])
    case.server.post("/load_lora_adapter", {"lora_name": roles[0], "lora_path": first})
    trajectory.reference.load(roles[0], first)
    trajectory.turn(roles[0], new(10), 4)
    assert trajectory.difference < TOLERANCE
    assert sum(result.counts.values()) == 60 + 3 + 50 + 3 + 20


TINY_TARGETS = {
    "plan": {"r": 8},
    "action": {"r": 4, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    "reflect": {"r": 6, "targets": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")},
    "scaled": {"r": 5, "use_rslora": True},
    "mlp": {"r": 3, "targets": ("gate_proj", "up_proj", "down_proj")},
}


@pytest.mark.parametrize("method", ["baseshared", "prelrshared", "rebaseshared", "rebaseown"])
@pytest.mark.parametrize("architecture", ["mistral", "qwen2"])
def test_other_architectures_mixed_ranks_and_targets(
    architecture: str, method: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", architecture)
    adapters = {
        role: make_adapter(tmp_path / role, model, seed=seed, **settings)
        for seed, (role, settings) in enumerate(TINY_TARGETS.items())
    }
    weights = Weights.load(model)
    args = ["--precache-method", method, "--dtype", "float32", "--skip-tokenizer-init"]
    args += ["--max-total-tokens", "8000", "--max-running-requests", "8"]
    args += ["--max-loras-per-batch", "6", "--chunked-prefill-size", "64"]
    with ServerProcess(model, adapters, [*args, "--log-level", "warning"]) as server:
        rng = random.Random(5)
        roles: list[str | None] = [*adapters, None]
        turns = [random_turns(rng, 256, roles, 8, longest=120) for _ in range(4)]
        trajectories = [
            Trajectory(server, ReferenceEngine(weights, method, adapters), str(i)) for i in range(4)
        ]
        assert run_trajectories(trajectories, turns, at_once=4) < TOLERANCE
        assert server.wait_for_backlog()["problems"] == []


def test_after_own_base_was_evicted_its_role_reads_the_neutral_base(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    adapters = {
        role: make_adapter(tmp_path / role, model, seed=seed, **settings)
        for seed, (role, settings) in enumerate(TINY_TARGETS.items())
    }
    args = ["--precache-method", "rebaseown", "--dtype", "float32", "--skip-tokenizer-init"]
    args += ["--max-total-tokens", "1600", "--max-running-requests", "4"]
    args += ["--max-loras-per-batch", "6", "--chunked-prefill-size", "64"]
    with ServerProcess(model, adapters, [*args, "--log-level", "warning"]) as server:
        rng = random.Random(9)
        reference = ReferenceEngine(Weights.load(model), "rebaseown", adapters)
        trajectory = Trajectory(server, reference, "own")

        def turns(count: int) -> None:
            for role, new_tokens, num_output in random_turns(rng, 256, [*adapters], count, 60):
                trajectory.turn(role, new_tokens, num_output)
            assert trajectory.difference < TOLERANCE

        turns(8)
        state = server.wait_for_backlog()
        assert 0 < state["own_base_tokens"] <= state["base_tokens"]
        for index in range(30):
            new = [rng.randrange(20, 256) for _ in range(60)]
            body = {"input_ids": new, "sampling_params": {"max_new_tokens": 1}}
            server.post("/generate", {**body, "cache_salt": f"filler-{index}"})
            if not server.state()["own_base_tokens"]:
                break
        state = server.wait_for_backlog()
        assert state["own_base_tokens"] == 0 and state["total_evicted_own"] > 0
        # Own base goes first; the prompt that took the last of it may have needed more.
        assert state["total_evicted_base"] < 61
        assert state["problems"] == []
        reference.drop_own()
        turns(6)


@pytest.mark.parametrize("method", ["prelrshared", "rebaseshared"])
def test_two_roles_feeding_the_same_tokens_at_once(method: str, tmp_path: Path) -> None:
    """Either order is right, and everybody reads one of the two passes whole."""
    model = make_model(tmp_path / "model")
    adapters = {
        role: make_adapter(tmp_path / role, model, seed=seed)
        for seed, role in enumerate(("plan", "action", "reflect"))
    }
    weights = Weights.load(model)
    rng = random.Random(1)
    args = ["--precache-method", method, "--dtype", "float32", "--skip-tokenizer-init"]
    args += ["--max-total-tokens", "8000", "--max-running-requests", "8"]
    args += ["--max-loras-per-batch", "4", "--chunked-prefill-size", "64"]
    with ServerProcess(model, adapters, [*args, "--log-level", "warning"]) as server:
        for attempt in range(6):
            prompt = [rng.randrange(20, 256) for _ in range(150)]
            found = both_at_once(server, prompt, f"both-{attempt}")
            orders = [("plan", "action"), ("action", "plan")]
            engines = {order: ReferenceEngine(weights, method, adapters) for order in orders}
            fits = {}
            for order, engine in engines.items():
                # A neutral base is published when a turn ends: whoever starts before that
                # feeds the tokens itself, as if it were alone.
                alone = {role: ReferenceEngine(weights, method, adapters) for role in order}
                fits[order] = True
                for role in order:
                    output, logprobs = found[role]
                    expected = [engine.turn(role, prompt, output).logprobs]
                    if method == "rebaseshared":
                        expected.append(alone[role].turn(role, prompt, output).logprobs)
                    fits[order] &= any(_close(e.tolist(), logprobs) for e in expected)
            assert any(fits.values())
            state = server.wait_for_backlog()
            assert state["problems"] == []
            assert state["total_conflicts"] == 0


def both_at_once(
    server: ServerProcess, prompt: list[int], salt: str
) -> dict[str, tuple[list[int], list[float]]]:
    """The same prompt from two roles at the same time: output and logprobs of each."""

    def ask(role: str) -> tuple[list[int], list[float]]:
        answer = server.post(
            "/generate",
            {
                "input_ids": prompt,
                "lora_path": role,
                "cache_salt": salt,
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
            },
        )
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return answer["output_ids"], logprobs

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(("plan", "action"), pool.map(ask, ("plan", "action")), strict=True))


def _close(a: list[float], b: list[float]) -> bool:
    return max(abs(x - y) for x, y in zip(a, b, strict=True)) < TOLERANCE
