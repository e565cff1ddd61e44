"""What callers say beside the prompt, over HTTP: request ids, trajectories.

One server: a tiny model with a real tokenizer and chat template.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from precache_sglang.launch.process import ServerProcess
from standins import quiet_imports
from tiny import make_adapter, make_model_with_tokenizer

ROLES = ("plan", "action")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("hints")
    # Answers have the length that was asked for.
    model = make_model_with_tokenizer(folder / "model", eos_token_id=None)
    adapters = {
        role: make_adapter(folder / role, model, seed=seed) for seed, role in enumerate(ROLES)
    }
    args = ["--served-model-name", "tiny", "--log-level", "warning", "--dtype", "float32"]
    args += ["--max-total-tokens", "9000", "--max-running-requests", "6"]
    args += ["--max-loras-per-batch", "3", "--chunked-prefill-size", "32"]
    # Nothing beside the turns, and nobody waits: what is not neutral by then is provisional.
    args += ["--precache-schedule", "lp", "--precache-max-neutral-wait", "0"]
    with ServerProcess(model, adapters, args) as running:
        yield running


class Answer:
    """Status, headers and body of one answer, errors included."""

    def __init__(self, response: Any) -> None:
        self.status: int = response.status
        self.request_id: str = response.headers["X-Request-Id"]
        self.text: str = response.read().decode()

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of a streamed answer."""
        lines = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def ask(
    server: ServerProcess, path: str, body: dict[str, Any] | None = None, **headers: str
) -> Answer:
    """POST `body`, or GET; ``X_Request_Id=…`` is a header."""
    request = urllib.request.Request(
        server.url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"}
        | {name.replace("_", "-"): value for name, value in headers.items()},
    )
    try:
        with _OPENER.open(request, timeout=120) as response:
            return Answer(response)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error)


def generate(num_tokens: int = 4, **changes: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, **changes.pop("sampling", {})}
    return {"text": "one two three", "lora_path": "plan", "sampling_params": sampling} | changes


def chat(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "one two three"}]
    return {"model": "tiny:plan", "messages": messages, "max_tokens": 4} | changes


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny:plan", "prompt": "one two three", "max_tokens": 4} | changes


# -- request ids -------------------------------------------------------------


def test_a_callers_id_is_the_requests_id_and_comes_back(server: ServerProcess) -> None:
    answer = ask(server, "/generate", generate(), X_Request_Id="mine/1")
    assert answer.request_id == answer.body["meta_info"]["id"] == "mine/1"
    for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", completion())):
        answer = ask(server, path, body, X_Request_Id="mine-2")
        assert answer.request_id == answer.body["id"] == "mine-2"


def test_streams_carry_the_id_too(server: ServerProcess) -> None:
    answer = ask(server, "/generate", generate(stream=True), X_Request_Id="streamed-1")
    assert answer.request_id == "streamed-1"
    assert {event["meta_info"]["id"] for event in answer.events} == {"streamed-1"}
    for wanted, path, body in (
        ("streamed-2", "/v1/chat/completions", chat()),
        ("streamed-3", "/v1/completions", completion()),
    ):
        answer = ask(server, path, body | {"stream": True}, X_Request_Id=wanted)
        assert answer.request_id == wanted
        assert {event["id"] for event in answer.events} == {wanted}


def test_an_id_is_not_free_right_after_a_stream(server: ServerProcess) -> None:
    """SGLang aborts the id of a stream once more, two seconds after its end."""
    ask(server, "/generate", generate(stream=True), X_Request_Id="again")
    answer = ask(server, "/generate", generate(), X_Request_Id="again")
    assert answer.request_id == answer.body["meta_info"]["id"] != "again"


def test_a_request_without_an_id_gets_one(server: ServerProcess) -> None:
    one, other = (ask(server, "/generate", generate()) for _ in range(2))
    assert one.request_id == one.body["meta_info"]["id"]
    assert other.request_id == other.body["meta_info"]["id"] != one.request_id
    assert ask(server, "/precache/state").request_id
    # An id in the body is SGLang's own way, and stays.
    for stream in (False, True):
        assert ask(server, "/generate", generate(rid="body", stream=stream)).request_id == "body"


def test_the_responses_endpoint_keeps_its_own_ids(server: ServerProcess) -> None:
    body = {"model": "tiny", "input": "one two three", "max_output_tokens": 4}
    answer = ask(server, "/v1/responses", body, X_Request_Id="mine-3")
    assert (answer.status, answer.request_id) == (200, "mine-3")
    assert answer.body["id"].startswith("resp_")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/nowhere", None, 404),
        ("/generate", {}, 400),
        ("/generate", generate(lora_path="nobody"), 400),
        ("/v1/completions", completion(prompt=None), 400),
        ("/v1/chat/completions", chat(model="tiny:nobody"), 400),
        ("/v1/responses", {"input": 5}, 400),
    ],
)
def test_errors_carry_the_id(
    server: ServerProcess, path: str, body: dict[str, Any] | None, status: int
) -> None:
    answer = ask(server, path, body, X_Request_Id="failing")
    assert (answer.status // 100, answer.request_id) == (status // 100, "failing")


@pytest.mark.parametrize(
    "wanted", ["", "two words", "x" * 129, "HEALTH_CHECK_1", "precache-1", "é"]
)
def test_what_cannot_be_an_id_is_replaced(server: ServerProcess, wanted: str) -> None:
    answer = ask(server, "/generate", generate(), X_Request_Id=wanted)
    assert answer.status == 200
    assert answer.request_id == answer.body["meta_info"]["id"] != wanted


def test_an_id_in_use_is_nobody_elses(server: ServerProcess) -> None:
    first: list[Answer] = []
    body = generate(250)
    thread = threading.Thread(
        target=lambda: first.append(ask(server, "/generate", body, X_Request_Id="twice"))
    )
    thread.start()
    time.sleep(0.3)
    for taken in ("twice", "twice_0"):
        second = ask(server, "/generate", generate(), X_Request_Id=taken)
        assert second.status == 200
        assert second.request_id == second.body["meta_info"]["id"] != taken
    # A batch of that name would want twice_0 and twice_1.
    several = ask(server, "/generate", generate(text=["a", "b"]), X_Request_Id="twice")
    assert several.status == 200 and several.request_id != "twice"
    assert thread.is_alive(), "the first request was still running"
    thread.join()
    assert first[0].request_id == first[0].body["meta_info"]["id"] == "twice"
    assert first[0].body["meta_info"]["completion_tokens"] == 250
    again = ask(server, "/generate", generate(), X_Request_Id="twice")
    assert again.body["meta_info"]["id"] == "twice"


def test_several_prompts_and_several_answers(server: ServerProcess) -> None:
    answer = ask(server, "/generate", generate(text=["a b", "c d"]), X_Request_Id="batch")
    assert answer.request_id == "batch"
    assert [one["meta_info"]["id"] for one in answer.body] == ["batch_0", "batch_1"]
    answer = ask(server, "/generate", generate(sampling={"n": 2}), X_Request_Id="samples")
    assert answer.request_id == "samples" and len(answer.body) == 2
    answer = ask(server, "/v1/completions", completion(n=2, stream=True), X_Request_Id="samples")
    assert (answer.status, answer.request_id) == (200, "samples")


def test_an_abort_ends_the_request_of_that_id_and_no_other(server: ServerProcess) -> None:
    """SGLang aborts whatever begins with the id: other people's requests."""
    answers: dict[str, Answer] = {}

    def run(name: str, num_tokens: int) -> None:
        answers[name] = ask(server, "/generate", generate(num_tokens), X_Request_Id=name)

    names = ("ab", "abc", "ab-1")
    threads = [threading.Thread(target=run, args=(name, 250)) for name in names]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    server.post("/abort_request", {"rid": "ab"})
    for thread in threads:
        thread.join()
    reasons = {
        name: answers[name].body["meta_info"]["finish_reason"]["type"]
        for name in names
        if answers[name].status == 200
    }
    assert reasons.pop("ab", "abort") == "abort"
    assert reasons == {"abc": "length", "ab-1": "length"}
    for name in ("abc", "ab-1"):
        assert answers[name].body["meta_info"]["completion_tokens"] == 250


# -- trajectories ------------------------------------------------------------


def test_a_trajectory_is_the_key_of_sglangs_routing_key_policy() -> None:
    with quiet_imports():
        from sglang.srt.managers.io_struct import GenerateReqInput

        from precache_sglang.hints import put_into_params

    params = {"custom_params": {"precache_trajectory": "a", "mine": 1}}
    for given, expected in ((None, "a"), ("theirs", "theirs")):
        request = GenerateReqInput(text="one", sampling_params=params, routing_key=given)
        put_into_params(request)
        assert (request.routing_key, request.sampling_params) == (expected, params)
    request = GenerateReqInput(text="one")
    put_into_params(request)
    assert (request.routing_key, request.sampling_params) == (None, {})


@pytest.mark.parametrize("wanted", ["", "x" * 129, "tab\tinside", "\x7f"])
def test_what_cannot_be_a_trajectory_is_refused(server: ServerProcess, wanted: str) -> None:
    for path, body in (
        ("/generate", generate()),
        ("/v1/chat/completions", chat(stream=True)),
        ("/v1/responses", {"model": "tiny", "input": "one"}),
    ):
        answer = ask(server, path, body, X_Precache_Trajectory=wanted, X_Request_Id="refused")
        assert (answer.status, answer.request_id) == (400, "refused")
        assert "X-Precache-Trajectory" in answer.body["error"]["message"]
    for field in (wanted, 5, ["a"], {"a": 1}):
        custom = {"precache_trajectory": field}
        for path, body in (
            ("/generate", generate(sampling={"custom_params": custom})),
            ("/v1/chat/completions", chat(custom_params=custom)),
            ("/v1/completions", completion(custom_params=custom, stream=True)),
        ):
            answer = ask(server, path, body)
            assert answer.status == 400 and "precache_trajectory" in answer.text


def test_a_wish_for_an_explanation_is_yes_or_no(server: ServerProcess) -> None:
    answer = ask(server, "/generate", generate(), X_Precache_Explain="perhaps")
    assert answer.status == 400 and "X-Precache-Explain 'perhaps'" in answer.text
    for field, shown in ((1, True), ("true", True), (0, False), (False, False), (None, False)):
        custom = {"custom_params": {"precache_explain": field}}
        answer = ask(server, "/generate", generate(sampling=custom))
        assert ("end" in answer.body["meta_info"]["precache_match"]) is shown, field
    answer = ask(server, "/generate", generate(sampling={"custom_params": {"precache_explain": 2}}))
    assert answer.status == 400 and "precache_explain '2'" in answer.text


def test_a_trajectory_changes_no_answer_and_is_no_namespace(server: ServerProcess) -> None:
    server.wait_for_backlog()
    server.post("/flush_cache?timeout=30")
    prompt = {"text": "a context that roles share " * 10}
    ask(server, "/generate", generate(**prompt), X_Precache_Trajectory="a")
    server.wait_for_backlog()
    custom = {"custom_params": {"precache_trajectory": "a"}}
    answers = [
        ask(server, "/generate", generate(**prompt)).body,
        ask(server, "/generate", generate(**prompt), X_Precache_Trajectory="b").body,
        ask(server, "/generate", generate(**prompt, sampling=custom)).body,
    ]
    for answer in answers:
        assert answer["output_ids"] == answers[0]["output_ids"]
        counts = answer["meta_info"]["precache"]
        assert counts["computed"] == 0 and counts["replayed"] <= 1, counts


def test_an_idle_engine_computes_first_what_a_trajectory_with_a_name_owes(
    server: ServerProcess,
) -> None:
    """Three turns are owed as the engine becomes idle; the named one ended last."""
    server.wait_for_backlog()
    server.post("/flush_cache?timeout=30")
    tokens = list(range(1000, 2400))
    blocker = threading.Thread(
        # While it decodes, lp runs nothing.
        target=lambda: server.post("/generate", generate(300, text="something else"))
    )
    blocker.start()
    time.sleep(0.3)

    def turn(prompt: list[int], **headers: str) -> dict[str, Any]:
        body = generate(2) | {"input_ids": prompt}
        del body["text"]
        answer: dict[str, Any] = ask(server, "/generate", body, **headers).body
        return answer

    turn(tokens)
    turn(tokens[::-1])
    named = tokens[500:700]
    turn(named, X_Precache_Trajectory="agent 7")
    before = server.state()
    assert before["backlog_tokens"] >= 2 * len(tokens) + len(named)
    assert blocker.is_alive() and before["total_neutral"] == server.state()["total_neutral"]
    blocker.join()
    # Some more, in case that something is owed for so long that it takes a step in between.
    while server.state()["total_neutral"] < before["total_neutral"] + len(named) + 200:
        time.sleep(0.001)
    # Nobody waits here: had the others gone first, this would publish the turn provisionally.
    match = turn([*named, 5, 6], X_Precache_Trajectory="agent 7")["meta_info"]["precache_match"]
    owed = server.state()["backlog_tokens"]
    assert owed > len(tokens), "the others were still owed"
    assert match["base_tokens"] >= len(named) and match["provisional_tokens"] == 0
    server.wait_for_backlog()
