"""Users of a server that roles share, for Locust.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:30000 --headless -u 12 -t 5m \\
        --stop-timeout 120 --visitor FOLDER AgentUser AdminUser WatchUser

`loadtest/run.py` does this and brings the server. Beside Locust's own tables and pages, the
folder `--out` gets all that was seen (`load.json`) and a report (`report.html`). The run starts
and ends with a flush: between them every slot of the pools must come back. Status 1: a
threshold was broken, or a slot lost.
"""

from __future__ import annotations

import random
import time
import traceback
from itertools import count
from typing import Any

import gevent
import report
import requests
import shapes
from client import Answer, Client, NotAtRestError, settle, start_clean, turn_body
from locust import User, constant, events, task
from locust.runners import MasterRunner, WorkerRunner
from traces import Scripts, Step

VISITOR = "visitor"  # the name under which the admin loads an adapter
SOAK_CONTEXT = 2000  # tokens after which an impatient user starts a new context
TENANTS = 2


class Load:
    """What all users of this process share."""

    def __init__(self) -> None:
        self.run = report.Run()
        self.started = time.perf_counter()
        self.serial = count()
        # Contexts that several impatient users extend at once.
        self.common: list[list[int]] = [[], []]
        self.args: Any = None
        self.scripts: Scripts
        self.model = ""
        self.before: dict[str, Any] | None = None

    def client(self, environment: Any) -> Client:
        def metric(kind: str, name: str, value: float, size: int, error: str | None) -> None:
            environment.events.request.fire(
                request_type=kind,
                name=name,
                response_time=value,
                response_length=size,
                exception=None if error is None else RuntimeError(error),
            )

        return Client(environment.host, self.run, metric, self.started)


LOAD = Load()


# -- users -------------------------------------------------------------------


class AgentUser(User):
    """A trajectory: roles take turns over one growing context, tools are called in between."""

    def on_start(self) -> None:
        index = next(LOAD.serial)
        self.rng = random.Random(f"{LOAD.args.seed} {index}")
        self.salt = f"tenant-{index % TENANTS}"
        self.client = LOAD.client(self.environment)
        self.pause = 0.0
        self.begin()

    def on_stop(self) -> None:
        self.client.close()

    def begin(self) -> None:
        self.steps = LOAD.scripts.draw(self.rng)
        self.place = 0
        self.context: Any = type(self.steps[0].new)()

    def wait_time(self) -> float:
        return self.pause

    @task
    def turn(self) -> None:
        args, rng, step = LOAD.args, self.rng, self.steps[self.place]
        self.pause = 0.0
        prompt = self.context + step.new
        if rng.random() < args.bad_name_share:
            nobody = Step(f"nobody-{rng.randrange(100)}", step.new, step.max_tokens, False)
            self.client.refused(nobody, prompt, LOAD.model, self.salt)
        leaves = step.max_tokens > 1 and rng.random() < args.cancel_share
        stop_after = rng.randrange(1, step.max_tokens) if leaves else None
        answer = self.client.turn(step, prompt, LOAD.model, self.salt, stop_after)
        if answer.whole:
            self.go_on(step, prompt, answer)
        elif answer.error:
            self.pause = 1.0
            self.begin()
        elif rng.random() < 0.5:
            self.begin()  # gives this trajectory up
        # else: asks for the same turn again

    def go_on(self, step: Step, prompt: Any, answer: Answer) -> None:
        self.context = prompt + answer.output
        self.place += 1
        if step.pauses:
            self.pause = min(self.rng.expovariate(1 / LOAD.args.think), 4 * LOAD.args.think)
        if self.place == len(self.steps):
            LOAD.run.counts["trajectories"] += 1
            self.begin()


class AdminUser(User):
    """Loads an unrelated adapter, uses it, unloads it."""

    fixed_count = 1
    wait_time = constant(5)

    def on_start(self) -> None:
        self.client = LOAD.client(self.environment)

    def on_stop(self) -> None:
        self.client.close()

    @task
    def visit(self) -> None:
        folder = LOAD.args.visitor
        if folder is None:
            return
        load = {"lora_name": VISITOR, "lora_path": str(folder.resolve())}
        if not self.client.call("admin", "/load_lora_adapter", load):
            return
        step = Step(VISITOR, list(range(20, 84)), 4, False)
        path, body = turn_body(step, step.new, LOAD.model, VISITOR)
        self.client.call("admin", path, body)
        if self.client.call("admin", "/unload_lora_adapter", {"lora_name": VISITOR}):
            LOAD.run.counts["loads"] += 1


class WatchUser(User):
    """Looks at `/health` and at the state, as monitoring does."""

    fixed_count = 1
    wait_time = constant(2)

    def on_start(self) -> None:
        self.client = LOAD.client(self.environment)

    def on_stop(self) -> None:
        self.client.close()

    @task
    def look(self) -> None:
        answer = self.client.get("/health")
        took = answer.elapsed.total_seconds()
        if answer.status_code != 200:
            self.client.fail("watch", "/health", None, answer.status_code, answer.text)
            return
        self.client.report("watch", "/health", 1e3 * took, 0, None)
        sample = report.Sample(time.perf_counter() - LOAD.started, took)
        if (state := self.client.state()) is not None:
            sample.backlog_tokens = state["backlog_tokens"]
            sample.backlog_age_s = state["backlog_age_s"]
            sample.provisional_tokens = state["provisional_tokens"]
            sample.base_tokens_in_use = state["base_tokens_in_use"]
            for problem in state["problems"]:
                self.client.fail("watch", "/precache/state", None, 200, problem)
        LOAD.run.samples.append(sample)


class ImpatientUser(User):
    """Random requests of all roles and of none; some are aborted, some hung up, at any stage."""

    def on_start(self) -> None:
        self.index = next(LOAD.serial)
        self.rng = random.Random(f"{LOAD.args.seed} {self.index}")
        self.client = LOAD.client(self.environment)
        self.own: list[int] = []
        self.roles: list[str | None] = [*LOAD.scripts.roles, None]
        self.serial = count()
        self.aborted: set[str] = set()

    def on_stop(self) -> None:
        self.client.close()

    def wait_time(self) -> float:
        return self.rng.expovariate(0.5) if self.rng.random() < 0.1 else 0.0

    @task
    def request(self) -> None:
        rng = self.rng
        common = rng.random() < 0.3
        context = rng.choice(LOAD.common) if common else self.own
        if len(context) > SOAK_CONTEXT:
            context.clear()
        new = rng.choices(range(20, LOAD.args.vocab_size), k=rng.choice((4, 16, 64, 256)))
        prompt = context + new
        role = rng.choice(self.roles)
        body: dict[str, Any] = {
            # SGLang aborts by the beginning of an id: none may begin another.
            "rid": f"soak-{self.index:03}-{next(self.serial):08}",
            "input_ids": prompt,
            "lora_path": role,
            "cache_salt": None if common else f"client-{self.index}",
            "sampling_params": {
                "max_new_tokens": rng.choice((1, 8, 24, 48)),
                "temperature": rng.choice((0.0, 1.0)),
                "ignore_eos": rng.random() < 0.5,
            },
        }
        impatient = rng.random() < LOAD.args.abort_share
        patience = rng.expovariate(1.0) if impatient else None
        if rng.random() < 0.05:
            self.two_answers(body, patience)
        elif (answer := self.one_answer(role or "none", body, patience, rng.random() < 0.5)).whole:
            context[:] = prompt + answer.output

    def two_answers(self, body: dict[str, Any], patience: float | None) -> None:
        body["sampling_params"]["n"] = 2
        with gevent.Timeout(patience, False):
            self.client.call("two answers", "/generate", body)
            return
        LOAD.run.counts["cancelled"] += 1

    def one_answer(
        self, role: str, body: dict[str, Any], patience: float | None, hangs_up: bool
    ) -> Answer:
        aborter = None
        if patience is not None and not hangs_up:
            aborter = gevent.spawn_later(patience, self.abort, body["rid"])
        answer = Answer(sent=time.perf_counter(), hung_up=True)
        # None is no time limit.
        with gevent.Timeout(patience if hangs_up else None, False):
            answer = self.client.stream("/generate", body)
        if aborter is not None:
            if body["rid"] not in self.aborted:
                aborter.kill()
            elif answer.error and "abort" in answer.error[1].lower():
                LOAD.run.counts["aborted"] += 1
                return answer
        self.client.record(role, f"{role}, impatient", body, answer)
        return answer

    def abort(self, rid: str) -> None:
        self.aborted.add(rid)
        client = LOAD.client(self.environment)
        client.call("abort", "/abort_request", {"rid": rid})
        client.close()


# -- the run -----------------------------------------------------------------


@events.init_command_line_parser.add_listener
def add_arguments(parser: Any) -> None:
    shapes.add_arguments(parser)


@events.init.add_listener
def prepare(environment: Any, **_: Any) -> None:
    """Read what users send, and flush. Ends the process where the server is not at rest."""
    if isinstance(environment.runner, MasterRunner | WorkerRunner):
        raise SystemExit("precache-sglang's load test is one process; leave --master/--worker out")
    LOAD.args = environment.parsed_options
    client = LOAD.client(environment)
    try:  # Locust would go on with the load.
        LOAD.scripts = Scripts.load(LOAD.args.trajectories, LOAD.args.traces, LOAD.args.vocab_size)
        LOAD.before = start_clean(client)
        LOAD.model = client.get("/model_info").json()["served_model_name"]
    except (requests.RequestException, NotAtRestError, ValueError) as error:
        raise SystemExit(f"No load: {error}") from error
    client.close()


@events.test_start.add_listener
def started(**_: Any) -> None:
    # With Locust's web page a process may see several; the last one counts.
    LOAD.run = report.Run()
    LOAD.started = time.perf_counter()


@events.test_stop.add_listener
def stopped(**_: Any) -> None:
    LOAD.run.duration_s = time.perf_counter() - LOAD.started


@events.user_error.add_listener
def user_error(user_instance: Any, exception: BaseException, tb: Any, **_: Any) -> None:
    text = "".join(traceback.format_exception(exception))
    LOAD.run.failures.append(report.Failure(type(user_instance).__name__, None, None, text))


@events.quitting.add_listener
def finish(environment: Any, **_: Any) -> None:
    """Check the pools, write the report, set the status."""
    environment.process_exit_code = 1  # also where something below raises
    client = LOAD.client(environment)
    try:
        LOAD.run.pools = settle(client, LOAD.before)
    except requests.RequestException as error:
        LOAD.run.pools = {"problems": [f"not checked: {error}"]}
    client.close()
    thresholds = shapes.thresholds(LOAD.args)
    problems = report.wrong(LOAD.run, thresholds)
    environment.process_exit_code = 1 if problems else 0

    out = LOAD.args.out
    out.mkdir(parents=True, exist_ok=True)
    LOAD.run.write(out / "load.json")
    server = LOAD.before or {"method": "off", "schedule": None}
    name = ":".join(filter(None, (server["method"], server["schedule"])))
    users = ", ".join(LOAD.args.user_classes) or "of all kinds"
    about = f"{name}, {LOAD.args.num_users} users ({users}), {LOAD.run.duration_s:.0f} s"
    page = report.page({name: LOAD.run}, thresholds, about)
    (out / "report.html").write_text(page, encoding="utf-8")

    print(f"\n{report.table({name: LOAD.run})}\n\n{report.table_by_role(LOAD.run)}\n")
    print(f"Pools: {report.pools_text(LOAD.run)}")
    for failure in LOAD.run.failures[:20]:
        print(f"ERROR: {failure}")
    for problem in problems:
        print(f"WRONG: {problem}")
    print(f"Report: {out / 'report.html'}\n", flush=True)
