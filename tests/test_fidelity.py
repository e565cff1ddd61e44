"""``bench fidelity`` reports what the reference engine computes over the whole vocabulary."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

import pytest
from precache_sglang.launch.fidelity import Prediction, divergence, predictions, spread, summary
from precache_sglang.launch.process import ServerProcess
from precache_sglang.launch.report import fidelity_table, plot_fidelity
from precache_sglang.launch.trajectories import Trajectory, Turn
from reference import ReferenceEngine, Weights
from tiny import make_adapter

METHODS = ("nonshared", "rebaseown")
TURNS = (("plan", 70, 9), ("plan", 6, 3), ("action", 12, 8), ("plan", 30, 12), ("action", 5, 4))
EOS = 1


def encode(text: str) -> list[int]:
    return [20 + ord(char) % 200 for char in text]


def trajectory(name: str) -> Trajectory:
    turns = []
    for number, (role, new, output) in enumerate(TURNS):
        text = "".join(chr(33 + (7 * number + 3 * i * i + len(name)) % 90) for i in range(99))
        turns.append(Turn(role, "thought", text[:new], text[-output:], new, output))
    return Trajectory(name, "", "", "", "", "", 0, tuple(turns))


@pytest.mark.usefixtures("one_thread")
def test_a_server_predicts_what_the_reference_engine_does(model: Path, tmp_path: Path) -> None:
    adapters = {
        role: make_adapter(
            tmp_path / role, model, seed=seed, targets=("q_proj", "k_proj", "v_proj")
        )
        for seed, role in enumerate(("plan", "action"))
    }
    trajectories = [trajectory("one"), trajectory("another")]
    found: dict[str, list[Prediction]] = {}
    for method in METHODS:
        args = ["--precache-method", method, "--dtype", "float32", "--skip-tokenizer-init"]
        args += ["--max-total-tokens", "3000", "--chunked-prefill-size", "64"]
        with ServerProcess(model, adapters, [*args, "--log-level", "warning"]) as server:
            baseline = found.get("nonshared")
            found[method] = predictions(server, trajectories, encode, 100, baseline)
    weights = Weights.load(model)
    full: list[float] = []
    at = 0
    for recorded in trajectories:
        engines = {method: ReferenceEngine(weights, method, adapters) for method in METHODS}
        context: list[int] = []
        for turn in recorded.turns:
            context += encode(turn.input_text_appended)
            output = encode(turn.gold_output)
            # The recorded output was all fed; what ended the turn was not.
            expected = {
                method: engine.turn(turn.role, context, [*output, EOS]).log_softmax[:-1].double()
                for method, engine in engines.items()
            }
            a, b = expected["nonshared"], expected["rebaseown"]
            full += (a.exp() * (a - b)).sum(-1).tolist()
            for index, token in enumerate(output):
                for method in METHODS:
                    mine = found[method][at + index]
                    assert mine.role == turn.role
                    assert mine.logprob == pytest.approx(
                        expected[method][index, token].item(), abs=1e-3
                    )
                    assert mine.likeliest == int(expected[method][index].argmax())
            at += len(output)
            context += output
    assert at == len(found["rebaseown"]) == 2 * sum(output for _, _, output in TURNS)
    results = summary(found)
    kl = results["rebaseown"]["all"]["kl"]
    assert 0.9 * mean(full) < kl < mean(full) + 1e-4
    assert results["nonshared"]["all"] | {"nll": 0} == {
        "tokens": at, "nll": 0, "top1_agreement": 1, "kl": 0,
    }  # fmt: skip
    assert "rebaseown" in fidelity_table(results)
    plot_fidelity(results, tmp_path / "fidelity.png")
    assert (tmp_path / "fidelity.png").stat().st_size > 5000


def test_divergence_counts_what_is_not_listed_as_one() -> None:
    p, q = [0.5, 0.3], [0.2, 0.3]
    expected = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    assert divergence(map(math.log, p), map(math.log, q)) == pytest.approx(expected)
    assert divergence(map(math.log, p), map(math.log, p)) == 0.0
    assert divergence([0.0], [0.0]) == 0.0


def test_a_limit_takes_trajectories_from_the_whole_file() -> None:
    names = [trajectory(str(number)) for number in range(12)]
    assert [each.id for each in spread(names, 4)] == ["0", "3", "6", "9"]
    assert [each.id for each in spread(names, 5)] == ["0", "2", "4", "7", "9"]
    assert spread(names, 20) == names
