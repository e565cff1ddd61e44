"""Every answer says why no more of its prompt was shared; over HTTP, and in units."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engine import Engine
from precache_sglang.launch.explain import (
    ExplainError,
    LocalTokenizer,
    Prompt,
    ServerTokenizer,
    compare,
)
from precache_sglang.launch.model import ensure_demo_model
from precache_sglang.launch.process import ServerProcess
from standins import quiet_imports
from tiny import make_adapter, make_model_with_tokenizer

with quiet_imports():
    from precache_sglang import match as match_module
    from precache_sglang.request import state_of

TOKENS = list(range(5000, 5200))


class Served:
    """A server with two teams, and an adapter that it has not loaded yet."""

    def __init__(self, server: ServerProcess, late: Path) -> None:
        self.server = server
        self.late = late
        self.fresh = iter(range(6000, 40000))

    def tokens(self, count: int) -> list[int]:
        """Tokens that nobody has sent."""
        return [next(self.fresh) for _ in range(count)]

    def ask(self, prompt: list[int] | str, role: str | None = "plan", **changes: Any) -> Any:
        sampling = {"max_new_tokens": 2, "temperature": 0, **changes.pop("sampling", {})}
        text = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        body = {**text, "lora_path": role, "sampling_params": sampling, **changes}
        return self.server.post("/generate", body)

    def match(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        meta = self.ask(*args, **kwargs)["meta_info"]
        self.server.wait_for_backlog()
        match, counts = meta["precache_match"], meta["precache"]
        assert sum(counts.values()) == meta["prompt_tokens"] == match.pop("prompt_tokens")
        # The two records tell the same story.
        read = counts["shared"] + counts["own"]
        assert match["rows_tokens"] == read
        assert match["base_tokens"] - read >= counts["replayed"]
        assert match["rows_tokens"] <= match["base_tokens"]
        return dict(match)


EXPLAIN = {"sampling": {"custom_params": {"precache_explain": True}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("match")
    model = make_model_with_tokenizer(folder / "model", eos_token_id=None)
    adapters = {
        role: make_adapter(folder / role, model, seed=seed)
        for seed, role in enumerate(("plan", "action", "alone", "late"))
    }
    late = adapters.pop("late")
    args = ["--served-model-name", "tiny", "--dtype", "float32", "--max-loras-per-batch", "5"]
    args += ["--max-total-tokens", "3000", "--precache-lr-tokens", "4000"]
    args += ["--max-running-requests", "6", "--precache-schedule", "lp"]
    # A turn's own base would make the base KV of others leave before their rows do.
    args += ["--precache-own-base-fraction", "0"]
    args += ["--precache-team", "pair=plan,action,late", "--precache-team", "other=alone"]
    with ServerProcess(model, adapters, args) as running:
        yield Served(running, late)


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> None:
    if "served" in request.fixturenames:
        server = request.getfixturevalue("served").server
        server.wait_for_backlog()
        server.post("/flush_cache?timeout=30")


# -- over HTTP ---------------------------------------------------------------


def test_a_first_prompt_then_all_of_it_then_more(served: Served) -> None:
    nothing = {"provisional_tokens": 0, "rows_reason": None}
    first = served.match(TOKENS)
    assert first == {"base_tokens": 0, "rows_tokens": 0, "reason": "first_prompt", **nothing}
    again = served.match(TOKENS, "action")
    assert again == {"base_tokens": 200, "rows_tokens": 199, "reason": "complete", **nothing}
    longer = served.match([*TOKENS, 7, 8, 9])
    # The answers of the turns before are cached too, and go on otherwise.
    assert longer == {"base_tokens": 200, "rows_tokens": 200, "reason": "differs", **nothing}
    short = served.tokens(20)
    answer = served.ask(short, "plan")["output_ids"]
    served.server.wait_for_backlog()
    grown = served.match([*short, *answer, 7, 8], "action")
    assert (grown["base_tokens"], grown["reason"]) == (21, "extends")


def test_what_differs_is_shown_to_who_asks(served: Served) -> None:
    common = "Question: Why is the sky blue? Use the tool."
    served.ask(f"{common} Answer as a poet would, in verse.")
    served.server.wait_for_backlog()
    prompt = f"{common} Judge the answer of a colleague with care."
    match = served.match(prompt, "action", **EXPLAIN)
    assert match["reason"] == "differs"
    end = match["end"]
    assert end["prompt"]["text"] == " Judge the answer of a colleague with care"
    assert end["cached"]["text"].startswith(" Answer as a poet would")
    assert end["before"]["text"].endswith("Use the tool.")
    assert all(0 < len(shown["tokens"]) <= 8 for shown in end.values())
    assert "end" not in served.match(prompt + " And so on.", "action")


def test_another_tenant_sees_nothing_of_a_prompt(served: Served) -> None:
    """Not by text, and not by a reason: it is told what it would be told on an empty server."""
    never = served.match(TOKENS, cache_salt="first", **EXPLAIN)
    served.match(TOKENS, "alone", cache_salt="first")
    served.match([*TOKENS[:100], 1, 2, 3], cache_salt="first")
    for namespace in (
        {"cache_salt": "b"},
        {"extra_key": "first"},
        {"extra_key": "t0:first"},
        {"cache_salt": "t0:"},
        {},
    ):
        assert served.match(TOKENS, **namespace, **EXPLAIN) == never, namespace
    assert never["reason"] == "first_prompt" and never["end"]["cached"]["tokens"] == []


def test_what_was_evicted_under_one_salt_is_no_business_of_another(served: Served) -> None:
    served.match(TOKENS, cache_salt="tenant")
    for _ in range(4):
        served.match(served.tokens(800), cache_salt="tenant")
    assert served.match(TOKENS, cache_salt="b")["reason"] == "first_prompt"
    assert served.match(TOKENS, cache_salt="tenant")["reason"] == "evicted"


def test_another_team_of_the_same_tenant_is_named(served: Served) -> None:
    served.match(TOKENS, "alone")
    match = served.match(TOKENS, "plan", **EXPLAIN)
    assert (match["base_tokens"], match["reason"]) == (0, "other_team")
    assert match["end"]["cached"]["tokens"] == []
    assert served.match(TOKENS, "alone", cache_salt="b")["reason"] == "first_prompt"


def test_rows_that_were_evicted_are_named(served: Served) -> None:
    served.match(TOKENS)
    # Two roles' rows of each token: 4000 are full before 3000 tokens of base KV are.
    for _ in range(3):
        served.match(served.tokens(750))
    match = served.match(TOKENS, "action")
    assert match == {
        "base_tokens": 200,
        "rows_tokens": 0,
        "provisional_tokens": 0,
        "reason": "complete",
        "rows_reason": "rows_evicted",
    }
    # The replay has brought them back.
    assert served.match(TOKENS, "action")["rows_reason"] is None


def test_an_adapter_that_is_loaded_later_replays_and_is_told_so(served: Served) -> None:
    served.match(TOKENS)
    served.server.post("/load_lora_adapter", {"lora_name": "late", "lora_path": str(served.late)})
    match = served.match(TOKENS, "late")
    assert (match["base_tokens"], match["rows_reason"]) == (200, "adapter_loaded_later")
    assert match["rows_tokens"] == 0
    assert served.match([*TOKENS, 5], "late")["rows_reason"] is None
    served.server.post("/unload_lora_adapter", {"lora_name": "late"})


def test_prompt_logprobs_cost_what_is_cached(served: Served) -> None:
    served.match(TOKENS)
    match = served.match(TOKENS, return_logprob=True, logprob_start_len=50)
    assert (match["rows_tokens"], match["rows_reason"]) == (50, "logprobs")
    assert match["reason"] == "complete"


def test_a_request_beside_one_with_the_same_tokens_is_told_to_wait_next_time(
    served: Served,
) -> None:
    thread = threading.Thread(
        target=served.ask, args=(TOKENS,), kwargs={"sampling": {"max_new_tokens": 300}}
    )
    thread.start()
    time.sleep(0.5)
    meta = served.ask(TOKENS, "action")["meta_info"]
    assert thread.is_alive()
    assert meta["precache_match"]["reason"] == "in_flight"
    assert (
        served.ask(TOKENS, "action", cache_salt="b")["meta_info"]["precache_match"]["reason"]
        == "first_prompt"
    )
    thread.join()


def test_openai_usage_has_one_record_per_prompt_and_keeps_its_sums(served: Served) -> None:
    url = f"{served.server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        explain = {"X-Precache-Explain": "1"}
        client.chat.completions.create(model="tiny:plan", messages=messages, max_tokens=2)
        served.server.wait_for_backlog()
        messages[1]["content"] = "Bye"
        answer = client.chat.completions.create(
            model="tiny:action", messages=messages, max_tokens=2, extra_headers=explain
        )
        (match,) = answer.usage.model_extra["precache_match"]
        assert match["reason"] == "differs"
        assert match["end"]["prompt"]["text"].startswith("Bye")
        assert match["end"]["cached"]["text"].startswith("Hi")
        served.server.wait_for_backlog()

        prompts = ["one two three", "four five six"]
        answer = client.completions.create(model="tiny:plan", prompt=prompts, max_tokens=2, n=2)
        assert len(answer.choices) == 4
        usage = answer.usage
        assert len(usage.model_extra["precache_match"]) == 2
        assert sum(usage.model_extra["precache"].values()) == usage.prompt_tokens
        *_, last = client.completions.create(
            model="tiny:plan",
            prompt=prompts,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=explain,
        )
        matches = last.usage.model_extra["precache_match"]
        assert [match["reason"] for match in matches] == ["complete"] * 2
        assert all("end" in match for match in matches)
        assert sum(last.usage.model_extra["precache"].values()) == last.usage.prompt_tokens


def test_native_streams_carry_the_record(served: Served) -> None:
    served.match(TOKENS)
    body = {
        "input_ids": [*TOKENS[:150], 1, 2],
        "lora_path": "plan",
        "sampling_params": {"max_new_tokens": 3, **EXPLAIN["sampling"]},
    }
    events = list(served.server.stream("/generate", body))
    assert len(events) > 1
    for event in events:
        match = event["meta_info"]["precache_match"]
        assert (match["base_tokens"], match["reason"]) == (150, "differs")
        assert match["end"]["cached"]["tokens"] == TOKENS[150:158]


def test_explain_asks_a_server_for_the_tokens_that_it_feeds(served: Served) -> None:
    asked = ServerTokenizer(served.server.url, None)
    local = LocalTokenizer(str(ensure_demo_model()))
    context = {"role": "user", "content": "Question: Why is the sky blue?"}
    one, other = (
        Prompt(role, messages=({"role": "system", "content": f"You are the {role}."}, context))
        for role in ("planner", "actor")
    )
    assert compare(asked, one, other) == compare(local, one, other)
    text = Prompt("text", text="One two\nthree.")
    assert asked.encode(text) == local.encode(text)
    # A chat is fed as it is compared.
    with openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as client:
        for prompt in (one, other):
            answer = client.chat.completions.create(
                model="tiny:plan", messages=prompt.messages, max_tokens=2
            )
            served.server.wait_for_backlog()
        assert answer.usage.prompt_tokens == len(asked.encode(other))
        (match,) = answer.usage.model_extra["precache_match"]
        assert match["base_tokens"] == compare(asked, one, other).common
    with pytest.raises(ExplainError, match=r"bad: .*/tokenize answered 4"):
        asked.encode(Prompt("bad", messages=({"role": "nobody"},)))


def test_the_log_tells_it_without_text_and_not_often(served: Served) -> None:
    lines = [line for line in served.server.log().splitlines() if "precache: request" in line]
    served.match("Secret words of a tenant. " * 30)
    served.match("Secret words of a tenant. " * 20 + "Other ones by now. " * 30, "action")
    more = [line for line in served.server.log().splitlines() if "precache: request" in line]
    assert more, "some request of this file was worth a line"
    assert len(more) - len(lines) <= 1
    assert not any("Secret" in line for line in more)
    line = r"request '[0-9a-f]{32}', role '\w+': \d+ of \d+ prompt tokens read, base KV of \d+ \("
    assert all(re.search(line, found) for found in more)


# -- units -------------------------------------------------------------------


def test_lines_come_at_a_rate_and_count_what_they_leave_out(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(match_module, "_LOG_FROM", 4)
    engine = make("prelrshared")
    log = engine.runtime.match_log
    with caplog.at_level(logging.INFO, logger=match_module.__name__):
        for last in range(10):
            engine.turn("plan", [*range(100, 110), *[last] * 6])
        assert len(caplog.messages) == 1
        assert "(differs)" in caplog.text and "role 'plan'" in caplog.text
        log._next = 0.0
        engine.turn("action", [*range(100, 110), *[50] * 6])
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("; 8 more like it since the last such line")


def test_rows_that_a_method_does_not_write_are_named(make: Callable[..., Engine]) -> None:
    engine = make("baseshared")
    engine.turn("plan", range(100, 120))
    match = state_of(engine.turn("action", range(100, 125))).match
    assert match is not None
    assert (match.base_tokens, match.rows_tokens) == (20, 0)
    assert match.rows_reason is match_module.RowsReason.NOT_WRITTEN
    assert match.reason is match_module.Reason.EXTENDS


def test_nonshared_names_the_other_role(make: Callable[..., Engine]) -> None:
    engine = make("nonshared")
    engine.turn("plan", range(100, 120))
    match = state_of(engine.turn("action", range(100, 125))).match
    assert match is not None and match.reason is match_module.Reason.OTHER_ROLE
    match = state_of(engine.turn("action", range(100, 125), salt="b")).match
    assert match is not None and match.reason is match_module.Reason.FIRST_PROMPT


@pytest.mark.parametrize("method", ["rebaseshared", "rebaseown"])
def test_provisional_tokens_are_counted(make: Callable[..., Engine], method: str) -> None:
    engine = make(method, max_neutral_wait_ms=0)
    engine.turn("plan", range(100, 120))
    for job in list(engine.runtime.backlog.jobs):
        engine.runtime.backlog.publish_provisionally(job)
    # The writer's own base is what rebaseown wants it to read.
    expected = {"plan": 0 if method == "rebaseown" else 20, "action": 20}
    for role, provisional in expected.items():
        req = engine.start(role, [*range(100, 120), 7, 8], impatient=True)
        engine.extend(req)
        match = state_of(req).match
        assert match is not None
        assert (match.base_tokens, match.provisional_tokens) == (20, provisional)
        engine.abort(req)


def test_what_evicted_children_leave_behind_is_bounded(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    for first in range(100, 180):
        engine.turn("plan", [first] * 6, salt=f"salt {first}")
        engine.tree.evict_leaves(100)
    assert len(engine.tree.root_node.evicted_below) == 32
    assert all(len(began) <= 8 for began in engine.tree.root_node.evicted_below.values())
    match = state_of(engine.turn("plan", [179] * 6, salt="salt 179")).match
    assert match is not None and match.reason is match_module.Reason.EVICTED
