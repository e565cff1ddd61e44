"""Whose step it is: the decisions of `NeutralScheduler`, one at a time, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engine import Engine
from standins import quiet_imports

with quiet_imports():
    from precache_sglang.patches import scheduler as scheduler_patches
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

    from precache_sglang import backlog as backlog_module
    from precache_sglang import neutral as neutral_module
    from precache_sglang.request import state_of
    from precache_sglang.step_cost import Load

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = list(range(100, 130))


class Clock:
    """The monotonic clock of neutral scheduling and of the backlog."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (neutral_module, backlog_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


class Poller:
    """Sockets on which something arrives, or nothing does."""

    def __init__(self, arrives: bool) -> None:
        self.arrives = arrives
        self.asked_ms: list[float] = []

    def poll(self, timeout_ms: float) -> list[object]:
        self.asked_ms.append(timeout_ms)
        return [object()] if self.arrives else []


class Scheduling:
    """Steps of an engine whose users' batches are stand-ins."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.clock = Clock(monkeypatch)
        self.scheduler = engine.runtime.scheduler
        self.scheduler.waiting_queue = []
        self.scheduler.idle_sleeper = None
        self.scheduler.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
        self.busy = False
        self.last: Any = None
        self.seen: list[list[Any]] = []  # SGLang's queue, each time that it was asked
        self.users = SimpleNamespace(
            is_empty=lambda: not self.busy,
            reqs=[],
            batch_is_full=False,
            forward_mode=SimpleNamespace(is_extend=lambda: False),
        )

    def sleeper(self, arrives: bool) -> Poller:
        sleeper = IdleSleeper([])
        sleeper.poller = Poller(arrives)
        self.scheduler.idle_sleeper = sleeper
        return sleeper.poller

    def believe(self, seconds: Callable[[Load], float]) -> None:
        """Let `seconds` stand for what has been learnt of the cost of steps."""
        self.engine.runtime.neutral.cost.seconds = seconds

    def step(self, seconds: float = 0.1) -> str:
        """One step that takes `seconds`; whose it was."""
        neutral = self.engine.runtime.neutral

        def original(scheduler: Any, **_: Any) -> Any:
            self.seen.append(list(scheduler.waiting_queue))
            batch = self.users if self.busy else None
            return SimpleNamespace(batch_to_run=batch, running_batch=self.users)

        plan = neutral.next_batch(original, self.users, self.last)
        self.last = plan.batch_to_run
        if self.last is None:
            return "nobody"
        self.clock.now += seconds
        return "neutral" if neutral.finish(self.last) else "users"


@pytest.fixture
def owing(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Scheduling]:
    """A server that owes plan's turn over ``TEXT[:20]``."""

    def build(**kwargs: Any) -> Scheduling:
        engine = make("rebaseshared", **{"schedule": "lp", **kwargs})
        scheduling = Scheduling(engine, monkeypatch)
        engine.turn("plan", TEXT[:20])
        return scheduling

    return build


def test_an_idle_engine_computes_what_is_owed(owing: Callable[..., Scheduling]) -> None:
    scheduling = owing()
    assert [scheduling.step(), scheduling.step()] == ["neutral", "nobody"]
    assert not scheduling.engine.runtime.backlog.jobs


def test_users_go_first_while_what_is_owed_is_young(owing: Callable[..., Scheduling]) -> None:
    scheduling = owing()
    scheduling.busy = True
    assert {scheduling.step() for _ in range(100)} == {"users"}


@pytest.mark.parametrize("wait", [-1, 0])
def test_what_is_aged_takes_its_share_of_a_busy_engine(
    owing: Callable[..., Scheduling], wait: int
) -> None:
    scheduling = owing(piece=1, max_neutral_wait_ms=wait)
    scheduling.busy = True
    scheduling.clock.now += neutral_module._MAX_AGE + 1
    steps = [scheduling.step() for _ in range(1000)]
    share = steps.count("neutral") / len(steps)
    assert 0 < share <= 1.5 * neutral_module._AGED_SHARE
    assert "neutral" not in steps[1:2], "one at a time"


def test_provisional_turns_age_too(owing: Callable[..., Scheduling]) -> None:
    scheduling = owing(max_neutral_wait_ms=0)
    backlog = scheduling.engine.runtime.backlog
    backlog.publish_provisionally(backlog.jobs[0])
    scheduling.busy = True
    assert scheduling.step() == "users"
    scheduling.clock.now += neutral_module._MAX_AGE + 1
    assert backlog.oldest_age() > neutral_module._MAX_AGE
    assert scheduling.step() == "neutral"
    assert not backlog.rebases and backlog.oldest_age() == 0


def test_what_is_oldest_ages_first(owing: Callable[..., Scheduling]) -> None:
    """A steady flow of finished turns does not keep a provisional one from its rebase."""
    scheduling = owing(max_neutral_wait_ms=0)
    backlog = scheduling.engine.runtime.backlog
    backlog.publish_provisionally(backlog.jobs[0])
    scheduling.busy = True
    scheduling.clock.now += neutral_module._MAX_AGE + 1
    scheduling.engine.turn("action", [1, 2, 3], extra_key="else")
    assert scheduling.step() == "neutral"
    assert not backlog.rebases and len(backlog.jobs) == 1


def test_a_full_queue_is_no_reason_to_rebase(owing: Callable[..., Scheduling]) -> None:
    """Provisional nodes can be evicted as they are: a rebase makes no room."""
    scheduling = owing(max_neutral_wait_ms=0)
    backlog = scheduling.engine.runtime.backlog
    backlog.publish_provisionally(backlog.jobs[0])
    scheduling.busy = True
    scheduling.scheduler.waiting_queue = [scheduling.engine.start("action", [1, 2, 3])]
    assert {scheduling.step() for _ in range(20)} == {"users"}


@pytest.mark.parametrize("arrives", [True, False])
def test_with_a_bound_an_idle_engine_waits_a_moment_for_the_next_turn(
    owing: Callable[..., Scheduling], arrives: bool
) -> None:
    scheduling = owing(max_neutral_wait_ms=0)
    poller = scheduling.sleeper(arrives)
    scheduling.busy = True
    scheduling.step()
    scheduling.busy = False
    assert scheduling.step() == ("nobody" if arrives else "neutral")
    assert len(poller.asked_ms) == 1 and 0 < poller.asked_ms[0] <= 1e3 * neutral_module._LINGER
    # Much later there is no turn that one could follow on.
    scheduling.clock.now += 1.0
    if arrives:
        assert scheduling.step() == "neutral"
    assert len(poller.asked_ms) == 1


def test_without_a_bound_an_idle_engine_starts_at_once(owing: Callable[..., Scheduling]) -> None:
    scheduling = owing()
    poller = scheduling.sleeper(True)
    scheduling.busy = True
    scheduling.step()
    scheduling.busy = False
    assert scheduling.step() == "neutral"
    assert poller.asked_ms == []


def test_room_that_a_neutral_pass_makes_is_seen_at_once(owing: Callable[..., Scheduling]) -> None:
    """SGLang marks a batch full, and looks again only once one of its requests has left."""
    scheduling = owing()
    assert scheduling.step() == "neutral"
    scheduling.busy = scheduling.users.batch_is_full = True
    scheduling.step()
    assert not scheduling.users.batch_is_full
    scheduling.users.batch_is_full = True
    scheduling.step()
    assert scheduling.users.batch_is_full, "nothing new"


def test_a_request_waits_for_the_neutral_pass_of_what_it_extends(
    owing: Callable[..., Scheduling],
) -> None:
    scheduling = owing(piece=8)
    scheduling.busy = True
    engine = scheduling.engine
    req = engine.start("action", TEXT[:25])
    engine.tree.unlock(req.lock)
    scheduling.scheduler.waiting_queue = [req]
    steps = [scheduling.step() for _ in range(6)]
    # In turns with the users that run, and not seen by SGLang until it is done.
    assert steps == ["neutral", "users", "neutral", "users", "neutral", "users"]
    assert scheduling.seen == [[], [], [req]]


@pytest.mark.parametrize(("wait_ms", "waits"), [(-1, True), (0, False), (10_000, True)])
def test_a_wait_that_would_be_too_long_is_not_begun(
    owing: Callable[..., Scheduling], wait_ms: int, waits: bool
) -> None:
    scheduling = owing(max_neutral_wait_ms=wait_ms)
    backlog = scheduling.engine.runtime.backlog
    req = scheduling.engine.start("action", TEXT[:25])
    scheduling.engine.tree.unlock(req.lock)
    scheduling.scheduler.waiting_queue = [req]
    held, wanted = scheduling.engine.runtime.neutral._held_requests()
    assert (held, wanted) == (([req], backlog.jobs[0]) if waits else ([], None))
    assert bool(backlog.rebases) is not waits


def test_nobody_waits_for_what_another_request_could_not_wait_for(
    owing: Callable[..., Scheduling],
) -> None:
    scheduling = owing(max_neutral_wait_ms=1000)
    neutral, engine = scheduling.engine.runtime.neutral, scheduling.engine
    # By the fit a wait for 20 tokens is too long, for 4 it is not.
    scheduling.believe(lambda load: 0.06 * load.tokens)
    reqs = [engine.start(*request) for request in (("action", TEXT[:4]), ("reflect", TEXT[:25]))]
    for req in reqs:
        engine.tree.unlock(req.lock)
    scheduling.scheduler.waiting_queue = reqs
    assert neutral._held_requests() == ([], None)
    scheduling.busy = True
    assert [scheduling.step() for _ in range(3)] == ["users"] * 3
    assert scheduling.seen[-1] == reqs


@pytest.mark.parametrize("seed", range(30))
def test_whoever_waits_waits_for_a_job_that_there_is(
    owing: Callable[..., Scheduling], seed: int
) -> None:
    """Any queue over any turns, with or without a bound; steps in between."""
    rng = random.Random(seed)
    wait_ms = rng.choice([-1, 0, 500, 1000])
    scheduling = owing(max_neutral_wait_ms=wait_ms, piece=rng.choice([4, 8, 64]))
    engine, neutral = scheduling.engine, scheduling.engine.runtime.neutral
    scheduling.believe(lambda load: 0.06 * load.tokens)
    jobs = engine.runtime.backlog.jobs
    for _ in range(40):
        if rng.random() < 0.3:
            # A turn that extends others, or forks off from them.
            prompt = [*TEXT[: rng.randrange(1, 20)], *(rng.randrange(3) for _ in range(4))]
            engine.turn(rng.choice(["plan", "action", "reflect"]), prompt)
        queue = []
        for _ in range(rng.randrange(4)):
            prompt = [*TEXT[: rng.randrange(1, 25)], *(rng.randrange(3) for _ in range(3))]
            req = engine.start(rng.choice(["plan", "action", "reflect"]), prompt)
            engine.tree.unlock(req.lock)
            queue.append(req)
        scheduling.scheduler.waiting_queue = queue
        held, wanted = neutral._held_requests()
        assert (wanted in jobs) if held else (wanted is None)
        for req in queue:
            key = neutral_module._key_of(req, req.origin_input_ids)
            assert any(job.blocks(key) for job in jobs) == (req in held)
        scheduling.busy = rng.random() < 0.5
        scheduling.step(rng.choice([0.1, 1.0]))
        engine.check()
    scheduling.busy, scheduling.scheduler.waiting_queue = False, []
    scheduling.step()
    scheduling.clock.now += 1.0  # nobody comes
    while scheduling.step(1.0) != "nobody":
        pass
    assert not jobs and not engine.runtime.backlog.rebases
    engine.check_idle()


def test_turns_over_the_same_tokens_are_waited_for_once(owing: Callable[..., Scheduling]) -> None:
    scheduling = owing(max_neutral_wait_ms=1000)
    neutral = scheduling.engine.runtime.neutral
    for role in ("action", "reflect"):
        scheduling.engine.turn(role, TEXT[:20], answer=[7] * 10)
    req = scheduling.engine.start("action", TEXT[:25])
    scheduling.engine.tree.unlock(req.lock)
    scheduling.scheduler.waiting_queue = [req]
    scheduling.clock.now += 5.0
    neutral._held_requests()
    scheduling.clock.now += 1.0 - neutral.cost.seconds(Load.of([(0, 20)])) - 0.001
    assert neutral._held_requests()[0] == [req]
    scheduling.clock.now += 0.002
    assert neutral._held_requests()[0] == []


def test_a_wait_ends_when_it_has_been_too_long(owing: Callable[..., Scheduling]) -> None:
    scheduling = owing(max_neutral_wait_ms=1000)
    neutral = scheduling.engine.runtime.neutral
    req = scheduling.engine.start("action", TEXT[:25])
    scheduling.engine.tree.unlock(req.lock)
    scheduling.scheduler.waiting_queue = [req]
    assert neutral._held_requests()[0] == [req]
    expected = neutral.cost.seconds(Load.of([(0, 20)]))
    scheduling.clock.now += 1.0 - expected - 0.01
    assert neutral._held_requests()[0] == [req]
    scheduling.clock.now += 0.02
    assert neutral._held_requests()[0] == []
    assert state_of(req).held_since == 1000.0


def test_a_request_that_waits_again_may_wait_as_long_again(
    owing: Callable[..., Scheduling],
) -> None:
    scheduling = owing(max_neutral_wait_ms=1000)
    engine, neutral = scheduling.engine, scheduling.engine.runtime.neutral
    req = engine.start("action", TEXT[:25])
    engine.tree.unlock(req.lock)
    scheduling.scheduler.waiting_queue = [req]
    assert neutral._held_requests()[0] == [req]
    scheduling.scheduler.waiting_queue = []
    engine.drain()
    engine.admit(req)
    engine.extend(req)
    engine.retract(req)
    engine.turn("plan", TEXT[:25])
    scheduling.clock.now += 5.0
    scheduling.scheduler.waiting_queue = [req]
    assert neutral._held_requests()[0] == [req]


def test_health_is_answered_between_neutral_steps(
    owing: Callable[..., Scheduling], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduling = owing(piece=8)
    runtime = scheduling.engine.runtime
    monkeypatch.setattr(scheduler_patches, "current", lambda: runtime)
    monkeypatch.setattr(runtime, "require_rows_stored", lambda batch: None)
    answered: list[str] = []
    scheduling.scheduler.maybe_send_health_check_signal = lambda: answered.append("health")

    def original(*_: Any) -> None:
        answered.append("users")

    for _ in range(3):
        batch = runtime.neutral._build_any()
        scheduler_patches.around_process_batch_result(original, scheduling.scheduler, batch, None)
    assert answered == ["health"] * 3


def test_trajectories_with_a_name_go_first_the_one_heard_of_last_before_others(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", schedule="lp")
    backlog = engine.runtime.backlog

    def owe(first: int, trajectory: str | None, salt: str | None = None) -> None:
        req = engine.start("plan", range(first, first + 8), salt=salt)
        state_of(req).trajectory = trajectory
        engine.extend(req)
        engine.finish(req)

    for first, trajectory in ((100, None), (200, "a"), (300, None), (400, "b"), (500, "a")):
        owe(first, trajectory)

    def order() -> list[int]:
        return [job.key.token_ids[0] for job in backlog.in_order()]

    assert order() == [200, 500, 400, 100, 300]
    # Another tenant's "b" is not this one, a turn of "b" that arrives is.
    owe(600, "b", salt="other")
    assert order() == [600, 200, 500, 400, 100, 300]
    backlog.trajectories.note(backlog.jobs[3].key, "b")
    assert order() == [400, 600, 200, 500, 100, 300]
    assert engine.neutral_step()
    assert order() == [600, 200, 500, 100, 300]
    engine.drain()


def test_trajectories_that_are_remembered_are_bounded(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", schedule="lp")
    engine.turn("plan", TEXT[:20])
    (job,) = engine.runtime.backlog.jobs
    job.trajectory = "first"
    trajectories = engine.runtime.backlog.trajectories
    trajectories.note(job.key, "first")
    for number in range(backlog_module._MAX_TRAJECTORIES - 1):
        trajectories.note(job.key, str(number))
    assert trajectories.rank(job) > 0
    trajectories.note(job.key, "one more")
    assert trajectories.rank(job) == 0
    engine.drain()
