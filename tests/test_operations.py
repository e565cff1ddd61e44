"""What operators rely on: keys, limits, errors, logs, live adapters, disconnects, an orderly end.

Real servers over HTTP. The tests run in this order: the last ones of each server end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import fastapi
import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerProcess
from standins import quiet_imports

from precache_sglang.config import Settings
from precache_sglang.errors import SettingsError
from precache_sglang.guard import error_body, error_of_event
from precache_sglang.http import PAGE_PATHS, router
from precache_sglang.resolution import refuse_server_flags

with quiet_imports():
    import schemathesis
    from precache_sglang.patches.auth import around_decide_request_auth
    from precache_sglang.patches.ollama_serving import stream_from
    from sglang.srt.utils import auth

KEY, ADMIN = "caller's", "operator's"
ORIGIN = "https://console.example.com"
MAX_BODY = 200_000
DRAIN = 60.0
SECRET_TEXT = "Xylophone quartz"  # nothing else says this
# What a caller may do, and what takes the administrator: SGLang's routes and ours.
CALLER_ROUTES = [
    ("POST", "/generate"),
    ("PUT", "/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/model_info"),
]
ADMIN_ROUTES = [
    ("POST", "/load_lora_adapter"),
    ("POST", "/load_lora_adapter_from_tensors"),
    ("POST", "/unload_lora_adapter"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/set_internal_state"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    *(
        (method, route.path)
        for route in router.routes
        if route.path not in PAGE_PATHS
        for method in route.methods
    ),
]
PUBLIC_ROUTES = [("GET", "/health"), ("GET", "/ready"), *(("GET", path) for path in PAGE_PATHS)]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def generate(text: str, role: str = "plan", tokens: int = 4, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": text, "lora_path": role, "sampling_params": sampling, **more}


UNKNOWN = (400, 404)  # names are looked up in several places


def require_error(
    answer: httpx.Response, status: int | tuple[int, ...], *named: str
) -> dict[str, Any]:
    """Check that `answer` is an error in our one shape; the ``error`` object."""
    wanted = (status,) if isinstance(status, int) else status
    assert answer.status_code in wanted, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["type"], str)
    assert error["code"] == answer.status_code or isinstance(error["code"], str)
    for text in named:
        assert text in error["message"]
    return error


def is_closed(server: ServerProcess, method: str, path: str, key: str | None) -> bool:
    """Whether this key does not open this route. The body is none that a route would take."""
    answer = httpx.request(
        method, server.url + path, headers=bearer(key), json={}, timeout=60, trust_env=False
    )
    if answer.status_code == 401:
        require_error(answer, 401, "Unauthorized")
    return answer.status_code == 401


class Stream:
    """A streamed answer that is read in a thread; `times` says when each token came."""

    def __init__(self, url: str, body: dict[str, Any], key: str | None = None) -> None:
        self.times: list[float] = []
        self.events: list[dict[str, Any]] = []
        self.status = 0
        self._hang_up = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url, body, key))
        self._thread.start()

    def _read(self, url: str, body: dict[str, Any], key: str | None) -> None:
        with (
            httpx.Client(timeout=120, trust_env=False) as client,
            client.stream(
                "POST", f"{url}/generate", json={**body, "stream": True}, headers=bearer(key)
            ) as answer,
        ):
            self.status = answer.status_code
            for line in answer.iter_lines():
                if self._hang_up.is_set():
                    return
                if line.startswith("data: {"):
                    self.times.append(time.monotonic())
                    self.events.append(json.loads(line[6:]))

    def wait_for(self, num_tokens: int, timeout: float = 90) -> None:
        until(lambda: len(self.times) >= num_tokens, timeout)

    def hang_up(self) -> None:
        self._hang_up.set()
        self.join()

    def join(self, timeout: float = 120) -> None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def end(self) -> str:
        reason: str = self.events[-1]["meta_info"]["finish_reason"]["type"]
        return reason


def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    adapters = {role: demo_adapters()[role] for role in ("plan", "action")}
    args = ["--served-model-name", "smollm2", "--max-total-tokens", "9000"]
    args += ["--max-loras-per-batch", "4", "--context-length", "4096"]
    # A neutral pass in many steps, to be met in the middle.
    args += ["--chunked-prefill-size", "256"]
    args += ["--max-running-requests", "2", "--max-queued-requests", "2"]
    args += ["--api-key", KEY, "--admin-api-key", ADMIN]
    args += ["--precache-cors-origins", ORIGIN, "--precache-max-body-bytes", str(MAX_BODY)]
    args += ["--precache-drain-timeout", str(DRAIN)]
    # As the administrator: what a test asks in its own name, it asks by `client`.
    with ServerProcess(ensure_demo_model(), adapters, args, api_key=ADMIN) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=server.url, headers=bearer(KEY), timeout=120, trust_env=False
    ) as client:
        yield client


def at_rest(server: ServerProcess) -> dict[str, Any]:
    state = server.wait_for_backlog(timeout=120)
    until(lambda: server.state()["request_rows_in_use"] == 0)
    state = server.state()
    assert state["problems"] == []
    assert state["base_tokens_in_use"] == state["base_tokens"] + state["own_base_tokens"]
    return state


# -- keys ----------------------------------------------------------------------


def test_callers_and_administrators_each_have_their_key(server: ServerProcess) -> None:
    for method, path in CALLER_ROUTES:
        assert not is_closed(server, method, path, KEY), path
        for key in (None, "wrong", ADMIN):
            assert is_closed(server, method, path, key), (path, key)
    for method, path in ADMIN_ROUTES:
        assert not is_closed(server, method, path, ADMIN), path
        for key in (None, "wrong", KEY):
            assert is_closed(server, method, path, key), (path, key)
    for method, path in PUBLIC_ROUTES:
        assert not is_closed(server, method, path, None), path


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/precache/state", "x/health?"),
        ("/precache/state", "x/precache#"),
        ("//precache/state", "x"),
        ("/precache/state/", "x"),
        ("/precache/../precache/state", "x"),
        ("/%70recache/state", "x"),
        ("/flush_cache", "x/metrics?"),
        ("/health/../flush_cache", "x"),
    ],
)
def test_no_spelling_of_an_address_gets_around_the_key(
    path: str, host: str, client: httpx.Client
) -> None:
    request = client.build_request("GET", client.base_url, headers={"Host": host, **bearer("no")})
    request.url = request.url.copy_with(raw_path=path.encode())
    answer = client.send(request)
    assert answer.status_code in (307, 400, 401, 404)
    assert "problems" not in answer.text and "flushed" not in answer.text


# -- errors --------------------------------------------------------------------


def test_every_error_has_one_shape(client: httpx.Client, server: ServerProcess) -> None:
    require_error(client.get("/nowhere"), 404, "Not Found")
    require_error(client.get("/precache/nowhere"), 404, "Not Found")
    require_error(client.get("/generate"), 405, "Method Not Allowed")
    require_error(client.post("/precache/state"), 405)
    require_error(client.get("/v1/models", headers=bearer("wrong")), 401)
    for key in (b"Bearer k\xc3\xa9", b"Bearer \xff\xfe", b"\xff"):
        require_error(client.get("/v1/models", headers={"Authorization": key}), 401)
    require_error(client.get("/v1/models/nobody"), 404, "nobody")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"):
        for text in ("{", "", "[]", "7", '{"messages": 3'):
            answer = client.post(path, content=text, headers={"Content-Type": "application/json"})
            require_error(answer, 400)
    body = {"model": "plan", "messages": [], "response_format": "json"}
    require_error(client.post("/v1/chat/completions", json=body), 400, "type")
    require_error(client.post("/generate", json=generate("Hi", "nobody")), UNKNOWN, "nobody")
    require_error(client.post("/generate", json=generate("Hi", tokens=-1)), 400, "max_new_tokens")
    require_error(client.get("/flush_cache?timeout=x", headers=bearer(ADMIN)), 400)
    answer = client.post(
        "/load_lora_adapter",
        json={"lora_name": "x", "lora_path": "/nowhere"},
        headers=bearer(ADMIN),
    )
    require_error(answer, 400, "/nowhere")
    assert answer.json()["success"] is False  # SGLang's own words stay
    # Anthropic's clients look at the type beside it.
    body = client.post("/v1/messages", json={"model": "smollm2"}).json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert server.alive()


def test_a_stream_that_fails_at_once_has_the_status_of_its_error(client: httpx.Client) -> None:
    answer = client.post("/generate", json=generate("Hi", "nobody", stream=True))
    require_error(answer, UNKNOWN, "nobody")
    answer = client.post("/generate", json=generate("Hi" * 5000, stream=True))
    require_error(answer, 400, "context length")


def test_openai_clients_understand_the_errors(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(model="nobody", prompt="Hi")
        assert "nobody" in error.value.body["message"]
        assert error.value.status_code in (400, 404)
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(
                model="plan", messages=[{"role": "user", "content": "Hi " * 5000}], stream=True
            )
        assert "context length" in error.value.body["message"]
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_body_above_the_limit_is_413(client: httpx.Client) -> None:
    text = json.dumps(generate("a" * MAX_BODY)).encode()
    headers = {"Content-Type": "application/json"}
    for path in ("/generate", "/v1/completions"):
        answer = client.post(path, content=text, headers=headers)
        require_error(answer, 413, str(MAX_BODY), "--precache-max-body-bytes")
        # A body of unknown length, which comes in pieces.
        pieces = (text[i : i + 5000] for i in range(0, len(text), 5000))
        answer = client.post(path, content=pieces, headers=headers)
        require_error(answer, 413, str(MAX_BODY), "--precache-max-body-bytes")
    assert client.post("/generate", json=generate("a" * 1000)).status_code == 200


def test_only_listed_origins_may_read(client: httpx.Client) -> None:
    def allowed(origin: str, answer: httpx.Response) -> bool:
        return answer.headers.get("access-control-allow-origin") == origin

    preflight = {"Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type"
    for origin, expected in ((ORIGIN, True), ("https://example.com", False), ("null", False)):
        headers = {"Origin": origin}
        assert allowed(origin, client.get("/v1/models", headers=headers)) == expected
        # An error, too, or a page could not say what went wrong.
        assert allowed(origin, client.get("/nowhere", headers=headers)) == expected
        answer = client.options("/v1/completions", headers=headers | preflight)
        assert allowed(origin, answer) == expected
        assert (answer.status_code == 200) == expected
        assert "access-control-allow-credentials" not in answer.headers


# -- schemathesis --------------------------------------------------------------


def test_no_input_to_our_routes_is_an_internal_error(server: ServerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=bearer(KEY))
    paths = []
    for found in schema.include(path_regex="^/precache").get_all_operations():
        operation = found.ok()
        paths.append(operation.path)
        for mode in schemathesis.GenerationMode:
            _try_out(operation.as_strategy(generation_mode=mode))
    assert "/precache/state" in paths
    assert server.alive()


def _try_out(cases: st.SearchStrategy[Any]) -> None:
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(case=cases)
    def one(case: Any) -> None:
        answer = case.call(headers=bearer(ADMIN))
        case.validate_response(answer, checks=(schemathesis.checks.not_a_server_error,))
        assert answer.status_code != 401

    with contextlib.suppress(Unsatisfiable):  # nothing is wrong with an input that is not there
        one()


# -- load, logs, disconnects ---------------------------------------------------


def test_overload_is_503_with_a_time_to_come_back(
    client: httpx.Client, server: ServerProcess
) -> None:
    body = generate(SECRET_TEXT, tokens=300)
    running = [Stream(server.url, body | {"cache_salt": str(i)}, KEY) for i in range(2)]
    for stream in running:
        stream.wait_for(1)
    queued = [Stream(server.url, body | {"cache_salt": str(i)}, KEY) for i in range(2, 4)]
    until(lambda: load_of(client, "num_waiting_reqs") == 2)
    for more in ({"stream": False}, {"stream": True}):
        answer = client.post("/generate", json=generate("Hi") | more)
        require_error(answer, 503, "queue is full")
        assert int(answer.headers["retry-after"]) > 0
        message = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/chat/completions", {"messages": message}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": message, "max_tokens": 4}),
            ("/api/generate", {"prompt": "Hi"}),
            ("/api/chat", {"messages": message}),
        ):
            answer = client.post(path, json={"model": "plan"} | body | more)
            # SGLang tells Anthropic's clients nothing about what is wrong with a server.
            named = () if path == "/v1/messages" else ("queue is full",)
            require_error(answer, 503, *named)
            assert int(answer.headers["retry-after"]) > 0
    assert all(stream.running for stream in running)
    for stream in (*running, *queued):
        stream.hang_up()
    at_rest(server)
    assert client.post("/generate", json=generate("Hi")).status_code == 200


def load_of(client: httpx.Client, name: str) -> int:
    (load,) = client.get("/v1/loads").json()["loads"]
    number: int = load[name]
    return number


def test_the_log_names_requests_and_roles_but_no_text(
    client: httpx.Client, server: ServerProcess
) -> None:
    name = "seen-1\nrequest rid='forged'"
    text = f"Tell me: {SECRET_TEXT}"
    assert client.post("/generate", json=generate(text, rid=name)).status_code == 200
    stream = Stream(server.url, generate(text, "action", 200, rid="seen-2"), KEY)
    stream.wait_for(2)
    stream.hang_up()
    client.post("/v1/completions", json={"model": "action", "prompt": text, "max_tokens": 2})
    client.post("/generate", json=generate(text, "nobody"))
    client.post("/generate", json=generate(text * 3000))
    client.post("/generate", content=f'{{"text": "{text}"', headers={"Content-Type": "text/json"})
    at_rest(server)
    lines = [line for line in server.log().splitlines() if "server_args=" not in line]
    (line,) = [line for line in lines if "seen-1" in line and "request rid=" in line]
    assert f"rid={name!r} role='plan' end=length prompt=" in line and "output=4" in line
    assert any("role='action' end=length" in line and "output=2" in line for line in lines)
    assert any("seen-2" in line and "role='action' is aborted" in line for line in lines)
    assert not any(line.startswith("request rid='forged'") for line in lines)
    assert not any("Xylophone" in line or "quartz" in line for line in lines)


def test_a_disconnect_in_the_middle_of_neutral_work_leaves_nothing_behind(
    client: httpx.Client, server: ServerProcess
) -> None:
    context = " ".join(f"Fact {i} is true." for i in range(400))
    prompt_tokens = client.post("/generate", json=generate(context)).json()["meta_info"][
        "prompt_tokens"
    ]
    assert prompt_tokens > 1500
    owed = server.state()["backlog_tokens"]
    assert owed > 1000
    # The next turn waits for the neutral pass over the first one. Its client does not.
    turn = generate(context + " And now?", "action", 1000, stream=True, rid="left-early")
    body = json.dumps(turn).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.3)
        assert server.state()["backlog_tokens"] > 0
    assert client.post("/generate", json=generate("Hi")).status_code == 200
    line = "request rid='left-early' role='action' is aborted"
    until(lambda: line in server.log(), timeout=30)
    state = at_rest(server)
    assert state["shadow_tokens"] == 0
    # The pass went on, and what it computed is there for whoever asks.
    answer = client.post("/generate", json=generate(context + " And now?", "action"))
    assert answer.json()["meta_info"]["precache"]["shared"] >= prompt_tokens - 2
    at_rest(server)


def test_whoever_hangs_up_ends_no_request_whose_id_begins_like_theirs(
    client: httpx.Client, server: ServerProcess
) -> None:
    staying = Stream(server.url, generate("Once", tokens=60, rid="turn-12"), KEY)
    leaving = Stream(server.url, generate("Twice", "action", 3000, rid="turn-1"), KEY)
    staying.wait_for(2)
    leaving.wait_for(2)
    leaving.hang_up()
    staying.join()
    assert staying.end == "length"
    at_rest(server)


def test_loading_and_unloading_neither_stalls_streams_nor_drops_rows_of_others(
    client: httpx.Client, server: ServerProcess
) -> None:
    context = "Question: Why is the sky blue?\n\nThought: \n### Response:\n" * 8
    for role in ("plan", "action"):
        assert client.post("/generate", json=generate(context, role)).status_code == 200
    before = at_rest(server)["lr"]
    assert before["plan"]["tokens"] > 100 and before["action"]["tokens"] > 100
    stream = Stream(server.url, generate("Once", tokens=3000, cache_salt="s"), KEY)
    stream.wait_for(40)
    num_before = len(stream.times)
    extra = {"lora_name": "extra", "lora_path": str(demo_adapters()["reflect"])}
    durations = []
    for _ in range(20):
        start = time.monotonic()
        server.post("/load_lora_adapter", extra)
        server.post("/unload_lora_adapter", {"lora_name": "extra"})
        durations.append(time.monotonic() - start)
    # It is gone for callers, too: SGLang would load it again for the next one.
    require_error(client.post("/generate", json=generate("Hi", "extra")), UNKNOWN, "extra")
    state = server.state()["lr"]
    num_after = len(stream.times)
    assert stream.running and num_after > num_before
    gaps = [b - a for a, b in itertools.pairwise(stream.times)]
    alone, beside = gaps[: num_before - 1], gaps[num_before - 1 : num_after - 1]
    report = f"longest gap alone {max(alone):.3f} s, beside loads {max(beside):.3f} s"
    print(
        f"{report}; a load and an unload: {sum(durations) / 20:.3f} s, up to {max(durations):.3f}"
    )
    assert max(beside) < 1 + max(alone), report
    assert {role: state[role]["tokens"] for role in before} == {
        role: before[role]["tokens"] for role in before
    }
    stream.hang_up()
    answer = client.post("/generate", json=generate(context, "action"))
    found = answer.json()["meta_info"]["precache"]
    assert found["computed"] == 0 and found["replayed"] <= 1
    at_rest(server)


def test_a_role_is_replaced_while_another_streams(
    client: httpx.Client, server: ServerProcess
) -> None:
    text = "Question: Why is the sky blue?\n\nThought: \n### Response:\n"

    def answer() -> str:
        found: str = client.post("/generate", json=generate(text, "swap", 12)).json()["text"]
        at_rest(server)
        return found

    paths = demo_adapters()
    expected = {}
    for role in ("plan", "reflect"):
        server.post("/load_lora_adapter", {"lora_name": "swap", "lora_path": str(paths[role])})
        server.post("/flush_cache?timeout=30")
        expected[role] = answer()
        server.post("/unload_lora_adapter", {"lora_name": "swap"})
    assert expected["plan"] != expected["reflect"]
    stream = Stream(server.url, generate("Once", "action", 3000, cache_salt="s"), KEY)
    stream.wait_for(5)
    for role in ("reflect", "plan"):
        server.post("/load_lora_adapter", {"lora_name": "swap", "lora_path": str(paths[role])})
        body = generate(text, "swap", 12, cache_salt=role)
        assert client.post("/generate", json=body).json()["text"] == expected[role]
        server.post("/unload_lora_adapter", {"lora_name": "swap"})
    assert stream.running
    stream.hang_up()
    at_rest(server)


# -- the end -------------------------------------------------------------------


def test_sigterm_lets_streams_end_sends_new_requests_away_and_ends_with_status_0(
    client: httpx.Client, server: ServerProcess
) -> None:
    """And no request that comes at a bad time is left without an answer, or keeps it from ending.

    Clients keep asking, over connections that are open and over new ones, until nobody listens.
    """
    stream = Stream(server.url, generate("Once upon a time", tokens=60), KEY)
    stream.wait_for(3)
    answers: list[httpx.Response | None] = []

    def knock(fresh: bool) -> None:
        options: dict[str, Any] = {"headers": bearer(KEY), "timeout": DRAIN, "trust_env": False}
        kept = httpx.Client(base_url=server.url, **options)
        while True:
            caller = httpx.Client(base_url=server.url, **options) if fresh else kept
            try:
                answers.append(caller.post("/generate", json=generate("Hi", tokens=1)))
            except httpx.TimeoutException:
                answers.append(None)
                return
            except httpx.TransportError:
                return  # nobody listens any more
            finally:
                caller.close() if fresh else None
            time.sleep(0.02)

    started = time.monotonic()
    status: list[int] = []
    ending = threading.Thread(target=lambda: status.append(server.terminate(DRAIN + 60)))
    ending.start()
    until(lambda: client.get("/health").status_code == 503, timeout=10)
    knocking = [threading.Thread(target=knock, args=(i % 2 == 0,)) for i in range(4)]
    for thread in knocking:
        thread.start()
    answer = client.post("/v1/completions", json={"model": "plan", "prompt": "Hi"})
    require_error(answer, 503, "shutting down")
    assert int(answer.headers["retry-after"]) > 0
    assert stream.running
    stream.join()
    assert stream.end == "length"
    assert stream.events[-1]["meta_info"]["completion_tokens"] == 60
    ending.join(DRAIN + 60)
    assert status == [0], server.log_tail()
    print(f"ended {time.monotonic() - started:.1f} s after SIGTERM")
    for thread in knocking:
        thread.join(DRAIN)
        assert not thread.is_alive()
    assert len(answers) > 20
    assert None not in answers
    for found in answers:
        require_error(found, 503, "shutting down")


@pytest.fixture(scope="module")
def other(model: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    """A server with an administrator's key alone, and 2 s to drain."""
    args = ["--skip-tokenizer-init", "--max-total-tokens", "20000", "--context-length", "4096"]
    args += ["--max-loras-per-batch", "3", "--admin-api-key", ADMIN]
    args += ["--precache-drain-timeout", "2"]
    with ServerProcess(model, adapters, args, api_key=ADMIN) as running:
        yield running


def test_with_an_admin_key_alone_callers_need_none(other: ServerProcess) -> None:
    for method, path in (*CALLER_ROUTES, *PUBLIC_ROUTES):
        assert not is_closed(other, method, path, None), path
    for method, path in ADMIN_ROUTES:
        assert is_closed(other, method, path, None), path
        assert not is_closed(other, method, path, ADMIN), path


def test_no_origin_may_read_by_default(other: ServerProcess) -> None:
    with httpx.Client(base_url=other.url, timeout=60, trust_env=False) as client:
        headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        for answer in (
            client.get("/v1/models", headers=headers),
            client.get("/health", headers=headers),
            client.options("/generate", headers=headers),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_what_outlasts_the_drain_is_cut_off(other: ServerProcess) -> None:
    """After SIGINT as after SIGTERM."""
    sampling = {"max_new_tokens": 4000, "temperature": 0, "ignore_eos": True}
    bodies = [
        {"input_ids": [20 + i] * 20, "sampling_params": sampling, "lora_path": role}
        for i, role in enumerate(("plan", "action"))
    ]
    streams = [Stream(other.url, body) for body in bodies]
    for stream in streams:
        stream.wait_for(3)
    whole: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=other.url, timeout=60, trust_env=False) as client:
            whole.append(client.post("/generate", json=bodies[0]))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    started = time.monotonic()
    assert other.terminate(45, signal.SIGINT) == 0
    print(f"ended {time.monotonic() - started:.1f} s after SIGINT")
    for stream in streams:
        stream.join()
        assert stream.end == "abort"
        assert stream.events[-1]["meta_info"]["completion_tokens"] < 4000
    asking.join(10)
    assert whole[0].status_code == 503 or whole[0].json()["meta_info"]["finish_reason"]["type"] == (
        "abort"
    )
    assert "Cutting off 3 requests" in other.log()


# -- without a server ----------------------------------------------------------


@pytest.mark.parametrize("level", list(auth.AuthLevel)[:2])
def test_an_api_key_alone_opens_everything(level: auth.AuthLevel) -> None:
    """Which level a route has is seen above, by the keys that open it on servers."""

    def opens(key: str | None, path: str = "/precache/state") -> bool:
        return around_decide_request_auth(
            auth.decide_request_auth,
            method="GET",
            path=path,
            authorization_header=None if key is None else f"Bearer {key}",
            api_key=KEY,
            admin_api_key=None,
            auth_level=level,
        ).allowed

    assert opens(KEY) and all(opens(None, path) for path in PAGE_PATHS)
    assert not opens(None) and not opens("wrong") and not opens(None, "/precache//")


@pytest.mark.parametrize(
    ("said", "message", "kind"),
    [
        (b"", "Bad Request", "Bad Request"),
        (b"Oh no", "Oh no", "Bad Request"),
        (b'{"detail": "Oh no"}', "Oh no", "Bad Request"),
        (b'{"detail": [{"loc": 1}]}', "Bad Request", "Bad Request"),
        (b'{"error": "Oh no"}', "Oh no", "Bad Request"),
        (b'{"error": {"message": "Oh no"}}', "Oh no", "Bad Request"),
        (b'{"object": "error", "message": "Oh no", "type": "T", "code": 400}', "Oh no", "T"),
        (b'{"success": false, "error_message": "Oh no"}', "Oh no", "Bad Request"),
        (b"[1]", "Bad Request", "Bad Request"),
    ],
)
def test_every_way_in_which_sglang_says_an_error_is_understood(
    said: bytes, message: str, kind: str
) -> None:
    body = json.loads(error_body(400, "/generate", said))
    assert body["error"] == {"message": message, "type": kind, "param": None, "code": 400}
    assert "type" not in body or body["type"] == "T"


def test_only_an_error_in_the_first_event_is_one() -> None:
    assert error_of_event(b'data: {"error": {"message": "no", "code": 503}}\n\n') is not None
    abort = {"meta_info": {"finish_reason": {"type": "abort", "status_code": 503, "message": "m"}}}
    assert error_of_event(f"data: {json.dumps(abort)}\n\n".encode()) is not None
    failed: dict[str, Any] = {"error": {"code": "server_error", "message": "m", "status_code": 429}}
    found = error_of_event(
        b"event: response.failed\n"
        + f"data: {json.dumps({'type': 'response.failed', 'response': failed})}\n\n".encode()
    )
    assert found is not None and found[0] == 429 and b'"m"' in found[1]
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "m"}}
    found = error_of_event(f"event: error\ndata: {json.dumps(overloaded)}\n\n".encode())
    assert found is not None and found[0] == 503
    del failed["error"]["status_code"]
    overloaded["error"]["type"] = "new_error"
    abort["meta_info"]["finish_reason"]["status_code"] = None  # a caller's own abort
    for chunk in (
        f"data: {json.dumps({'type': 'response.failed', 'response': failed})}\n\n".encode(),
        b'data: {"type": "response.failed", "response": {"error": null}}',
        f"event: error\ndata: {json.dumps(overloaded)}\n\n".encode(),
        f"data: {json.dumps(abort)}\n\n".encode(),
        b'data: {"text": "the \\"error\\" of {\\"code\\": 503}"}\n\n',
        b'data: {"error": {"message": "no code"}}\n\n',
        b"data: [DONE]\n\n",
        b"",
        b'data: "error"',
        b'data: {"error"',
    ):
        assert error_of_event(chunk) is None


def test_an_ollama_stream_says_what_ended_it() -> None:
    async def engine() -> AsyncIterator[bytes]:
        yield b'{"response": "A", "done": false}\n'
        raise fastapi.HTTPException(503, "No room.")

    async def answer() -> list[Any]:
        rest = engine()
        return [chunk async for chunk in stream_from(await anext(rest), rest)]

    lines = [json.loads(line) for line in asyncio.run(answer())]
    assert lines == [{"response": "A", "done": False}, {"error": "No room."}]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"precache_cors_origins": ["example.com"]}, "no origin"),
        ({"precache_cors_origins": ["https://example.com/page"]}, "no origin"),
        ({"precache_max_body_bytes": 0}, "lets no request in"),
        ({"precache_max_body_bytes": "x"}, "whole number"),
        ({"precache_drain_timeout": -1}, "no time"),
        ({"precache_drain_timeout": float("nan")}, "no time"),
        ({"precache_drain_timeout": "soon"}, "not a number"),
    ],
)
def test_a_bad_limit_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Settings.from_mapping(values)


def test_limits_without_a_method_are_refused() -> None:
    refuse_server_flags(Settings.from_mapping({"precache_method": "off"}))
    limited = Settings.from_mapping({"precache_method": "off", "precache_drain_timeout": 3})
    with pytest.raises(SettingsError, match="--precache-drain-timeout 3"):
        refuse_server_flags(limited)
