"""What agents talk with: the official OpenAI client, other clients, SGLang programs.

One real server, whose served name has a colon. Greedy and in float32, so that a text tells
who wrote it.
"""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import openai
import pytest
import sglang as sgl
from openai_clients import BothClients
from precache_sglang.launch.examples import plan_action_reflect as example
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerError, ServerProcess
from precache_sglang.launch.trajectories import load_trajectories
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as SGLangRuntimeEndpoint

from precache_sglang.frontend import RuntimeEndpoint, gen, select
from precache_sglang.request_role import HEADER

SERVED = "s3://lab/smollm2"  # the only names with a colon that SGLang serves
ROLES = ("plan", "action", "reflect")
QUESTION = "Question: Why is the sky blue?\n\nThought: \n### Response:\n"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]

_salts = (f"salt-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    args = ["--served-model-name", SERVED, "--dtype", "float32", "--log-level", "warning"]
    args += ["--max-total-tokens", "12000", "--max-loras-per-batch", "4"]
    args += ["--context-length", "4096", "--max-running-requests", "8"]
    # A model this small would fill a JSON answer with blanks.
    args += ["--tool-call-parser", "qwen", "--constrained-json-disable-any-whitespace"]
    with ServerProcess(ensure_demo_model(), demo_adapters(), args) as running:
        yield running
        state = running.wait_for_backlog()
        assert state["problems"] == []
        assert state["lr_slots_pinned"] == 0


@pytest.fixture(params=["sync", "async"])
def ask(server: ServerProcess, request: pytest.FixtureRequest) -> BothClients:
    """Calls one of the official clients; see `BothClients`."""
    return BothClients(f"{server.url}/v1", is_async=request.param == "async")


def fresh() -> dict[str, Any]:
    """A tenant of its own: nothing is read from the cache, so that equal roles say the same."""
    return {"cache_salt": next(_salts)}


def native(server: ServerProcess, text: str, role: str | None, num_tokens: int = 8) -> str:
    """What `role` writes after `text`, by SGLang's own endpoint."""
    body = {
        "text": text,
        "lora_path": role,
        "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0},
    }
    answer: str = server.post("/generate", body | fresh())["text"]
    return answer


# -- choosing a role -----------------------------------------------------------

Call = Callable[..., Callable[[Any], Any]]


def completion(model: str, headers: Any = None, **extra: Any) -> Callable[[Any], Any]:
    return lambda client: client.completions.create(
        model=model,
        prompt=QUESTION,
        max_tokens=8,
        temperature=0,
        extra_headers=headers,
        extra_body=fresh() | extra,
    )


def chat(model: str, headers: Any = None, **extra: Any) -> Callable[[Any], Any]:
    return lambda client: client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=8,
        temperature=0,
        extra_headers=headers,
        extra_body=fresh() | extra,
    )


def response(model: str, headers: Any = None, **extra: Any) -> Callable[[Any], Any]:
    return lambda client: client.responses.create(
        model=model,
        input="Why is the sky blue?",
        max_output_tokens=8 + 2,  # SGLang keeps two for itself
        temperature=0,
        extra_headers=headers,
        extra_body=fresh() | extra,
    )


CALLS = {"completions": completion, "chat": chat, "responses": response}


def text_of(answer: Any) -> str:
    if answer.object == "response":
        return str(answer.output_text)
    choice = answer.choices[0]
    return str(choice.message.content if answer.object == "chat.completion" else choice.text)


@pytest.fixture(scope="module")
def written(server: ServerProcess) -> dict[str, dict[str | None, str]]:
    """By prompt format and role, what the role writes; no two roles write the same."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    chat_text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    texts = {"completions": QUESTION, "chat": chat_text, "responses": chat_text}
    found = {
        name: {role: native(server, text, role) for role in (*ROLES, None)}
        for name, text in texts.items()
    }
    for answers in found.values():
        assert len(set(answers.values())) == len(answers), answers
    return found


@pytest.mark.parametrize("endpoint", CALLS)
def test_a_role_is_chosen_by_model_lora_path_or_header(
    endpoint: str, ask: BothClients, written: dict[str, dict[str | None, str]]
) -> None:
    call, expected = CALLS[endpoint], written[endpoint]
    for chosen in (
        call("plan"),
        call(SERVED, lora_path="plan"),
        call(SERVED, headers={HEADER: "plan"}),
        call("plan", headers={HEADER.lower(): "plan"}, lora_path="plan"),
    ):
        assert text_of(ask(chosen)) == expected["plan"]
    for role in ROLES:
        assert text_of(ask(call(f"{SERVED}:{role}"))) == expected[role]
    assert text_of(ask(call(SERVED))) == expected[None]


@pytest.mark.parametrize("endpoint", CALLS)
def test_unknown_names_are_not_found_and_contradictions_refused(
    endpoint: str, ask: BothClients, server: ServerProcess
) -> None:
    call = CALLS[endpoint]
    for unknown in (
        call("nobody"),
        call(f"{SERVED}:nobody"),
        call(f"{SERVED}:"),
        call("s3:plan"),
        call("gpt-4:plan"),
        call(SERVED, lora_path="nobody"),
        call(SERVED, headers={HEADER: "nobody"}),
        call(SERVED, headers={HEADER: SERVED}),
    ):
        with pytest.raises(openai.NotFoundError, match="plan, action, reflect"):
            ask(unknown)
    for contradiction in (
        call("plan", headers={HEADER: "action"}),
        call(f"{SERVED}:plan", lora_path="action"),
        call(SERVED, headers={HEADER: "plan"}, lora_path="action"),
    ):
        with pytest.raises(openai.BadRequestError, match="name different roles"):
            ask(contradiction)
    assert server.alive()


def test_every_listed_model_can_be_retrieved(ask: BothClients) -> None:
    listed = {model.id: model for model in ask(lambda client: client.models.list()).data}
    assert set(listed) == {SERVED, *ROLES}
    for name, model in listed.items():
        assert model.parent == (None if name == SERVED else SERVED)
        retrieved = ask(lambda client, name=name: client.models.retrieve(name))
        retrieved.created = model.created  # now, both times
        assert retrieved == model
    for unknown in ("nobody", f"{SERVED}:nobody"):
        with pytest.raises(openai.NotFoundError) as error:
            ask(lambda client, name=unknown: client.models.retrieve(name))
        assert all(name in str(error.value) for name in listed)


def test_a_role_that_is_loaded_and_unloaded_comes_and_goes(
    server: ServerProcess, ask: BothClients
) -> None:
    adapter = {"lora_name": "plan:v2", "lora_path": str(demo_adapters()["plan"])}
    server.post("/load_lora_adapter", adapter)
    try:
        assert ask(lambda client: client.models.retrieve("plan:v2")).parent == SERVED
        same = {text_of(ask(completion(name))) for name in ("plan", "plan:v2", f"{SERVED}:plan:v2")}
        assert len(same) == 1
    finally:
        server.post("/unload_lora_adapter", {"lora_name": "plan:v2"})
    with pytest.raises(openai.NotFoundError):
        ask(lambda client: client.models.retrieve("plan:v2"))


def post(server: ServerProcess, path: str, body: dict[str, Any], *headers: tuple[str, str]) -> str:
    """The body of the answer to a request with more headers. Raises `HTTPError`."""
    sent = urllib.request.Request(server.url + path, data=json.dumps(body).encode(), method="POST")
    for name, value in (("Content-Type", "application/json"), *headers):
        sent.add_header(name, value)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(sent, timeout=60) as answer:
        return str(answer.read(), "utf-8")


@pytest.mark.parametrize("stream", [False, True])
def test_the_native_endpoint_takes_the_header(
    stream: bool, server: ServerProcess, written: dict[str, dict[str | None, str]]
) -> None:
    def body(**changes: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": 8, "temperature": 0}
        return {"text": QUESTION, "sampling_params": sampling} | fresh() | changes

    plan = (HEADER, "plan")
    answers = [post(server, "/generate", body(lora_path=path), plan) for path in (None, "plan")]
    assert {json.loads(answer)["text"] for answer in answers} == {written["completions"]["plan"]}
    for status, change, header in (
        (404, {"lora_path": "nobody"}, None),
        (404, {}, (HEADER, "nobody")),
        (400, {"lora_path": "action"}, plan),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            post(server, "/generate", body(stream=stream, **change), *([header] if header else []))
        with error.value:
            assert error.value.code == status


def test_other_protocols_know_roles_and_refuse_other_names(server: ServerProcess) -> None:
    def said(path: str, model: str) -> str:
        body = {"model": model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
        if path == "/api/chat":
            body |= {"stream": False, "options": {"num_predict": 8, "temperature": 0}}
        answer = server.post(path, body)
        content = answer["message"] if path == "/api/chat" else answer["content"][0]
        return str(content["content" if path == "/api/chat" else "text"])

    for path in ("/v1/messages", "/api/chat"):
        texts = {name: said(path, name) for name in (SERVED, "plan", f"{SERVED}:plan")}
        assert texts["plan"] == texts[f"{SERVED}:plan"] != texts[SERVED]
        with pytest.raises(ServerError, match=r"^404 .*plan, action, reflect"):
            said(path, "nobody")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_usage_says_what_was_shared_in_every_protocol_that_has_one(
    path: str, stream: bool, server: ServerProcess
) -> None:
    def usages(role: str) -> list[dict[str, Any]]:
        body = {"model": role, "max_tokens": 4, "stream": stream}
        text = f"{path} {stream} is asked by one role and then by another."
        body |= (
            {"input": text}
            if "responses" in path
            else {"messages": [{"role": "user", "content": text}]}
        )
        said = post(server, path, body)
        if not stream:
            return [json.loads(said)["usage"]]
        events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
        holders = [event.get("response") or event.get("message") or event for event in events]
        return [holder["usage"] for holder in holders if holder.get("usage")]

    usages("plan")
    found = usages("action")
    assert found
    for usage in found:
        counts = usage["precache"]
        assert counts["shared"] > 0.5 * sum(counts.values())
        (match,) = usage["precache_match"]
        assert match["reason"]
    if "responses" in path:
        assert sum(found[-1]["precache"].values()) == found[-1]["input_tokens"]


# -- what else the OpenAI endpoints do ---------------------------------------------


def test_streams_say_what_whole_answers_say(
    ask: BothClients, written: dict[str, dict[str | None, str]]
) -> None:
    options = {"max_tokens": 8, "temperature": 0, "stream": True}
    chunks = ask(
        lambda client: client.completions.create(
            model="plan", prompt=QUESTION, extra_body=fresh(), **options
        )
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == written["completions"]["plan"]
    chunks = ask(
        lambda client: client.chat.completions.create(
            model="plan",
            messages=MESSAGES,
            extra_body=fresh(),
            stream_options={"include_usage": True},
            **options,
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == written["chat"]["plan"]
    usage = chunks[-1].usage
    assert sum(usage.precache.values()) == usage.prompt_tokens
    events = ask(
        lambda client: client.responses.create(
            model=f"{SERVED}:plan",
            input=MESSAGES[0]["content"],
            max_output_tokens=8 + 2,
            temperature=0,
            stream=True,
            extra_body=fresh(),
        )
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == written["responses"]["plan"] == events[-1].response.output_text


def test_stops_choices_and_logprobs(
    ask: BothClients, written: dict[str, dict[str | None, str]]
) -> None:
    whole = written["chat"]["action"]
    answer = ask(
        lambda client: client.chat.completions.create(
            model="action",
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            n=2,
            stop=[whole[3:6]],
            logprobs=True,
            top_logprobs=2,
            extra_body=fresh(),
        )
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.content == whole[: whole.index(whole[3:6])]
        for token in choice.logprobs.content:
            assert token.logprob <= 0
            assert len(token.top_logprobs) == 2
            assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
    answer = ask(
        lambda client: client.completions.create(
            model="action", prompt=QUESTION, max_tokens=4, logprobs=2, extra_body=fresh()
        )
    )
    assert len(answer.choices[0].logprobs.token_logprobs) == 4


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["A", "B"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


def test_a_role_writes_json_by_a_schema(ask: BothClients) -> None:
    answer = ask(
        lambda client: client.chat.completions.create(
            model="reflect",
            messages=MESSAGES,
            max_tokens=60,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "verdict", "schema": SCHEMA},
            },
        )
    )
    verdict = json.loads(answer.choices[0].message.content)
    assert verdict["answer"] in ("A", "B")
    assert isinstance(verdict["sure"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_role_calls_the_tool_it_is_told_to(ask: BothClients, stream: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {"letter": {"enum": ["A", "B"]}},
        "required": ["letter"],
        "additionalProperties": False,
    }
    # Only a strict tool's arguments are held to their schema.
    finish = {"name": "Finish", "strict": True, "parameters": parameters}
    answer = ask(
        lambda client: client.chat.completions.create(
            model=f"{SERVED}:action",
            messages=MESSAGES,
            max_tokens=60,
            temperature=0,
            tools=[{"type": "function", "function": finish}],
            tool_choice={"type": "function", "function": {"name": "Finish"}},
            stream=stream,
        )
    )
    if stream:
        deltas = [
            call
            for chunk in answer
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
        ]
        name = deltas[0].function.name
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "Finish"
    assert json.loads(arguments)["letter"] in ("A", "B")


def test_embeddings_are_refused(ask: BothClients) -> None:
    for model in (SERVED, "plan"):
        with pytest.raises(openai.BadRequestError, match="embedding"):
            ask(lambda client, model=model: client.embeddings.create(model=model, input="sky"))


# -- SGLang programs -----------------------------------------------------------


@pytest.fixture
def endpoint(server: ServerProcess) -> RuntimeEndpoint:
    """With nothing in the cache."""
    server.wait_for_backlog()
    server.post("/flush_cache?timeout=30")
    return RuntimeEndpoint(server.url)


def by_hand(server: ServerProcess, text: str, role: str | None, num_tokens: int = 8) -> str:
    """`native`, in the one cache that programs use."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0}
    body = {"text": text, "lora_path": role, "sampling_params": sampling}
    answer: str = server.post("/generate", body)["text"]
    return answer


@sgl.function
def turns(s: Any, context: str, roles: list[str | None]) -> None:
    s += context
    for index, role in enumerate(roles):
        s += gen(str(index), role=role, max_tokens=8, temperature=0)
        s += "\n\nThought: \n### Response:\n"


def turns_by_hand(server: ServerProcess, context: str, roles: list[str | None]) -> list[str]:
    said = []
    for role in roles:
        said.append(by_hand(server, context, role))
        context += said[-1] + "\n\nThought: \n### Response:\n"
    return said


@pytest.mark.parametrize("stream", [False, True])
def test_a_program_gives_every_call_its_role(
    stream: bool, server: ServerProcess, endpoint: RuntimeEndpoint
) -> None:
    roles: list[str | None] = ["plan", "action", None, "reflect"]
    state = turns.run(QUESTION, roles, backend=endpoint, stream=stream)
    said = [state[str(index)] for index in range(len(roles))]
    assert state.error() is None
    counts = state.get_meta_info("1")["precache"]
    assert counts["shared"] > 0.5 * sum(counts.values())  # read from what plan fed
    server.wait_for_backlog()
    server.post("/flush_cache?timeout=30")
    assert said == turns_by_hand(server, QUESTION, roles)


def test_programs_at_once_do_not_mix_up_their_roles(
    server: ServerProcess, endpoint: RuntimeEndpoint
) -> None:
    """Eight programs on one endpoint, each with its own order of roles."""
    orders = [list(order) for order in itertools.permutations((*ROLES, None), 3)][::3]
    contexts = [f"{number}. {QUESTION}" for number in range(len(orders))]
    jobs = [
        {"context": context, "roles": order}
        for context, order in zip(contexts, orders, strict=True)
    ]
    states = turns.run_batch(jobs, backend=endpoint, num_threads=8)
    said = [[state[str(index)] for index in range(3)] for state in states]
    server.wait_for_backlog()
    server.post("/flush_cache?timeout=30")
    for job, found in zip(jobs, said, strict=True):
        assert found == turns_by_hand(server, **job)


@sgl.function
def judged(s: Any, question: str) -> None:
    s += question
    branches = s.fork(len(ROLES))
    for branch, role in zip(branches.states, ROLES, strict=True):
        branch += gen("opinion", role=role, max_tokens=8, temperature=0)
    branches.join()
    s += " / ".join(s["opinion"]) + "\nVerdict: "
    s += select("verdict", ["right", "wrong"], role="reflect")
    s += "."


def test_roles_work_in_branches_that_are_joined(
    server: ServerProcess, endpoint: RuntimeEndpoint
) -> None:
    state = judged.run(QUESTION, backend=endpoint)
    assert state.error() is None
    assert state["verdict"] in ("right", "wrong")
    assert len(set(state["opinion"])) == len(ROLES)
    assert state.text() == (
        f"{QUESTION}{' / '.join(state['opinion'])}\nVerdict: {state['verdict']}."
    )


def chosen(endpoint: SGLangRuntimeEndpoint, role: str | None) -> dict[str, Any]:
    """How a role, or the model without one, rates two ways to go on."""

    @sgl.function
    def choose(s: Any) -> None:
        s += QUESTION
        s += select("choice", ["Let me look", "The answer"], role=role)

    state = choose.run(backend=endpoint)
    assert state.error() is None
    meta: dict[str, Any] = state.get_meta_info("choice")
    return {"choice": state["choice"], "rated": meta["normalized_prompt_logprobs"]}


def test_choices_are_rated_by_the_role(server: ServerProcess, endpoint: RuntimeEndpoint) -> None:
    ratings = [chosen(endpoint, role)["rated"] for role in (None, *ROLES)]
    for one, other in itertools.combinations(ratings, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-3
    # The same by hand: an endpoint all of whose calls go to one role.
    again = [chosen(endpoint.as_role(role), None)["rated"] for role in (None, *ROLES)]
    for one, other in zip(ratings, again, strict=True):
        assert one == pytest.approx(other, abs=0.05)


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_a_role_that_the_server_or_the_backend_does_not_know_ends_the_program(
    server: ServerProcess, endpoint: RuntimeEndpoint
) -> None:
    @sgl.function
    def one_call(s: Any, call: Any) -> None:
        s += QUESTION
        s += call

    state = one_call.run(gen("x", role="nobody", max_tokens=4), backend=endpoint)
    assert "nobody" in str(state.error()) and "plan, action, reflect" in str(state.error())
    stock = SGLangRuntimeEndpoint(server.url)
    for call in (gen("x", role="plan"), select("x", ["a", "b"], role="plan")):
        state = one_call.run(call, backend=stock)
        assert "precache_sglang.frontend.RuntimeEndpoint" in str(state.error())


def test_typed_calls_keep_their_type(endpoint: RuntimeEndpoint) -> None:
    @sgl.function
    def count(s: Any) -> None:
        s += QUESTION
        s += gen("number", role="plan", dtype=int, max_tokens=4)

    state = count.run(backend=endpoint)
    assert state.error() is None
    int(state["number"])


def test_the_example_answers_a_recorded_question_from_one_cache(
    server: ServerProcess,
    endpoint: RuntimeEndpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trajectory = min(load_trajectories(), key=lambda trajectory: trajectory.n_tokens)
    arguments = example.arguments_of(trajectory)
    assert len(arguments["observations"]) == 2
    state = example.solve.run(**arguments, backend=endpoint, temperature=0)
    assert state.error() is None
    assert state.text().startswith(trajectory.turns[0].input_text_appended)
    names = state.ret_value
    assert {name.split("_")[0] for name in names} >= {"thought", "argument", "verdict"}
    generated = [name for name in names if "precache" in state.get_meta_info(name)]
    for name in generated[1:]:
        counts = state.get_meta_info(name)["precache"]
        # All but the new text, which is an observation at most.
        assert counts["shared"] + counts["own"] > 0.5 * sum(counts.values()), (name, counts)
    # The same as a script; most of it is in the cache now.
    shipped = resources.files("precache_sglang.launch") / "assets/trajectories.jsonl"
    lines = shipped.read_text(encoding="utf-8").splitlines()
    chosen_line = next(line for line in lines if json.loads(line)["id"] == trajectory.id)
    (tmp_path / "one.jsonl").write_text(chosen_line, encoding="utf-8")
    example.main(["--url", server.url, "--trajectories", str(tmp_path / "one.jsonl")])
    printed = capsys.readouterr().out
    assert trajectory.question in printed
    assert f"answer {state['answer']!r}, recorded {trajectory.answer!r}" in printed
