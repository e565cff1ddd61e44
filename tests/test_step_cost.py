"""The measured cost of a step."""

from __future__ import annotations

import random

import pytest

from precache_sglang.step_cost import Load, StepCost


def price(load: Load, fixed: float, per_token: float, per_context: float) -> float:
    return fixed + per_token * load.tokens + per_context * load.context


@pytest.mark.parametrize(
    "prices", [(0.08, 5e-4, 8e-6), (0.004, 1e-5, 2e-8), (0.0, 1e-3, 0.0)], ids=["cpu", "gpu", "odd"]
)
def test_prices_are_found_from_decode_and_prefill_steps(prices: tuple[float, ...]) -> None:
    rng = random.Random(1)
    cost = StepCost()
    for _ in range(400):
        start = rng.randrange(5000)
        decodes = rng.random() < 0.7
        if decodes:
            starts = [rng.randrange(5000) for _ in range(rng.randint(1, 8))]
            load = Load.of((first, first + 1) for first in starts)
        else:
            load = Load.of([(start, start + rng.randint(64, 1024))])
        cost.observe(load, price(load, *prices) * rng.uniform(0.95, 1.05), decodes)
    for load in (Load.of([(4000, 4001)]), Load.of([(100, 900)]), Load.of([(3000, 3064)])):
        assert cost.seconds(load) == pytest.approx(price(load, *prices), rel=0.1)


def test_a_span_beside_a_step_does_not_pay_the_constant() -> None:
    cost = StepCost()
    load = Load.of([(0, 100)])
    assert 0 < cost.added(load) < cost.seconds(load)


def test_time_becomes_tokens() -> None:
    cost = StepCost()
    count = cost.longest(1000, 2000, 0.05)
    assert 0 < count < 1000
    assert cost.added(Load.of([(1000, 1000 + count)])) <= 0.05
    assert cost.longest(1000, 1010, 10.0) == 10
    assert cost.longest(1000, 2000, 0.0) == 0


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e6])
def test_odd_steps_give_no_odd_answers(seconds: float) -> None:
    cost = StepCost()
    for index in range(300):
        cost.observe(Load.of([(index, index + 1)]), seconds if index % 3 else 0.1, True)
        cost.observe(Load(), seconds, False)
    load = Load.of([(100, 200)])
    assert cost.added(load) >= 0 and cost.fixed >= 0
    assert 0 <= cost.longest(0, 100, 0.1) <= 100


def test_the_load_of_spans() -> None:
    # Token i attends to itself and to all before it.
    assert Load.of([(0, 3)]) == (3, 3, 1 + 2 + 3)
    assert Load.of([(5, 6), (2, 4)]) == (3, 10, 6 + 3 + 4)
