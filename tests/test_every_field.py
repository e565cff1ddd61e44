"""No value of any field of any request ends the server, or is an internal error.

One server: a tiny model with a real tokenizer and chat template. What a field may hold is not
written down here: each gets everything that JSON can say, and must be served or refused (4xx).
"""

from __future__ import annotations

import dataclasses
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from precache_sglang.launch.process import ServerProcess
from standins import quiet_imports
from tiny import make_adapter, make_model_with_tokenizer

with quiet_imports():
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
    )
    from sglang.srt.managers.io_struct import GenerateReqInput

VALUES: tuple[Any, ...] = (
    *(None, True, -1, -5, 0, 5, 2**40, 2**70, -7.5, "", "x", "(", "\0"),
    *([], [None], [""], [[]], [1], ["a", None], [5, 5], [[5], [5]], [[1], "a"], [{}, {"a": []}]),
    *({}, {"a": 1}, {"a": {"b": []}}, {"type": "x"}, [{"role": "user"}], [{"type": "function"}]),
)

GREEDY = {"max_new_tokens": 1, "temperature": 0}
MESSAGES = [{"role": "user", "content": "one two"}]
GENERATE = [field.name for field in dataclasses.fields(GenerateReqInput)]
REQUESTS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "generate text": ("/generate", GENERATE, {"text": "one two", "sampling_params": GREEDY}),
    "generate tokens": ("/generate", GENERATE, {"input_ids": [5, 6, 7], "sampling_params": GREEDY}),
    "generate with logprobs": (
        "/generate",
        GENERATE,
        {"text": "one two", "return_logprob": True, "sampling_params": GREEDY},
    ),
    "generate a batch": (
        "/generate",
        GENERATE,
        {"text": ["one", "two"], "lora_path": ["plan", None], "sampling_params": GREEDY},
    ),
    "completion": (
        "/v1/completions",
        list(CompletionRequest.model_fields),
        {"model": "plan", "prompt": "one two", "max_tokens": 1},
    ),
    "completion of two": (
        "/v1/completions",
        list(CompletionRequest.model_fields),
        {"model": "plan", "prompt": ["one", "two"], "max_tokens": 1, "n": 2},
    ),
    "chat": (
        "/v1/chat/completions",
        list(ChatCompletionRequest.model_fields),
        {"model": "plan", "messages": MESSAGES, "max_tokens": 1},
    ),
    "response": (
        "/v1/responses",
        list(ResponsesRequest.model_fields),
        {"model": "plan", "input": "one two", "max_output_tokens": 4, "store": False},
    ),
    "message": (
        "/v1/messages",
        list(AnthropicMessagesRequest.model_fields),
        {"model": "plan", "messages": MESSAGES, "max_tokens": 1},
    ),
    "ollama generate": (
        "/api/generate",
        list(OllamaGenerateRequest.model_fields),
        {"model": "plan", "prompt": "one two", "options": {"num_predict": 1}, "stream": False},
    ),
    "ollama stream": (
        "/api/generate",
        ["options"],
        {"model": "plan", "prompt": "one two", "options": {"num_predict": 1}},
    ),
    "ollama chat": (
        "/api/chat",
        list(OllamaChatRequest.model_fields),
        {"model": "plan", "messages": MESSAGES, "options": {"num_predict": 1}, "stream": False},
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fields")
    model = make_model_with_tokenizer(folder / "model")
    adapters = {"plan": make_adapter(folder / "plan", model, seed=0)}
    args = ["--served-model-name", "tiny", "--log-level", "warning", "--dtype", "float32"]
    args += ["--max-total-tokens", "4000", "--context-length", "300"]
    # Else SGLang refuses hidden states before we can.
    args += ["--max-loras-per-batch", "3", "--enable-return-hidden-states", "--enable-metrics"]
    with ServerProcess(model, adapters, args) as running:
        yield running


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_is_served_or_refused(kind: str, server: ServerProcess) -> None:
    path, fields, good = REQUESTS[kind]
    assert send(server, path, good)[0] == 200
    failed = []
    for field in fields:
        for value in VALUES:
            status, text = send(server, path, good | {field: value})
            if not 200 <= status < 500:
                failed.append(f"{field}={value!r}: {status} {text[:200]}")
    assert not failed, "\n".join(failed)
    assert send(server, path, good)[0] == 200
    state = server.wait_for_backlog(timeout=120)
    assert state["problems"] == []
    assert state["lr_slots_pinned"] == 0
    assert state["base_tokens_in_use"] == state["base_tokens"] + state["own_base_tokens"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"ebnf": "root ::= root", "temperature": 1, "top_p": 0.9},
        {"ebnf": "root ::= root", "temperature": 1, "min_p": 0.1, "top_k": 5},
        {"ebnf": "root ::= root", "temperature": 1},
        {"logit_bias": {"5": 1e38}, "temperature": 1e-3, "top_p": 0.9},
        {"logit_bias": {"5": -1e38, "6": 1e38}, "temperature": 1e-3},
        {"temperature": 1e308, "top_k": 1, "repetition_penalty": 1e-9},
        {"stop_regex": "("},
        {"stop_regex": ["a", "(?P<"]},
    ],
    ids=str,
)
def test_no_sampling_ends_the_server(sampling: dict[str, Any], server: ServerProcess) -> None:
    """Probabilities that are no numbers are one request's own trouble."""
    body = {"text": "one two", "lora_path": "plan", "sampling_params": {"max_new_tokens": 3}}
    body["sampling_params"] |= sampling
    status, text = send(server, "/generate", body)
    assert status < 500 or ("ebnf" in sampling and "Grammar" in text)
    assert status == 400 or "stop_regex" not in sampling
    good = {"text": "one two", "sampling_params": {"max_new_tokens": 3, "top_p": 0.9}}
    assert send(server, "/generate", good)[0] == 200


def send(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of the answer; the process must be there still."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        pytest.fail(f"{body!r:.500}: {error!r}; {server.log_tail()}")
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ""}),
        ("/generate", {"text": ["one", ""]}),
        ("/generate", {"input_ids": [[]]}),
        ("/generate", {"input_ids": [[5, 6], []]}),
        ("/v1/completions", {"model": "plan", "prompt": ""}),
        ("/v1/completions", {"model": "plan", "prompt": ["one", ""]}),
        ("/v1/completions", {"model": "plan", "prompt": [[5, 6], []]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
def test_a_prompt_without_tokens_is_refused(
    path: str, body: dict[str, Any], stream: bool, server: ServerProcess
) -> None:
    status, text = send(server, path, body | {"stream": stream})
    assert status == 400 or stream
    assert "no tokens" in text or "empty" in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "one", "rid": "HEALTH_CHECK_1"}),
        ("/generate", {"text": "one", "rid": "HEALTH_CHECK_1", "stream": True}),
        ("/generate", {"text": ["one", "two"], "rid": ["a", "precache-1"]}),
        ("/v1/completions", {"model": "plan", "prompt": "one", "rid": "HEALTH_CHECK_1"}),
        ("/v1/chat/completions", {"model": "plan", "messages": MESSAGES, "rid": "precache-1"}),
        ("/v1/responses", {"model": "plan", "input": "one", "request_id": "HEALTH_CHECK_1"}),
    ],
    ids=str,
)
def test_nobody_hides_behind_the_servers_own_ids(
    path: str, body: dict[str, Any], server: ServerProcess
) -> None:
    status, text = send(server, path, body)
    assert status == 400
    assert "server's own ids" in text
