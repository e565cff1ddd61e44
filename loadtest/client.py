"""One user's HTTP: streamed turns, hang-ups, refusals; and what the pools must look like after.

Everything goes through `requests`, which Locust has made cooperative by the time it runs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
from precache_sglang.launch.keys import key_headers
from report import Failure, Run, Turn
from traces import Step

CONNECT_LIMIT, READ_LIMIT = 10.0, 300.0  # seconds
KEEP_ALIVE = 2.0  # seconds; servers close what idles for longer (SGLang: 5), maybe as we send
DRAIN_LIMIT = 180.0  # seconds in which nothing may be owed any more after the load

# Called with kind, name, milliseconds, size and an error, if any: one of Locust's metrics.
Report = Callable[[str, str, float, int, str | None], None]


class NotAtRestError(RuntimeError):
    """A server that others use, or that has lost slots before; the message says which."""


@dataclass
class Answer:
    """A streamed answer as far as it came; times on `time.perf_counter`'s clock.

    Attributes:
        output: Text or token ids so far, as the prompt was.
        usage: Token counts, with ``precache`` where the server shares.
        finish: Why it ended; None: it did not.
        error: Status (None where none came) and body of what came instead.
        hung_up: We left before its end.
    """

    sent: float
    output: Any = None
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    error: tuple[int | None, str] | None = None
    hung_up: bool = False
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)

    @property
    def num_events(self) -> int:
        return len(self.gaps) + 1 if self.first else 0

    @property
    def whole(self) -> bool:
        return self.error is None and self.finish in ("stop", "length")


class Client:
    """A connection and a notebook.

    Args:
        url: Of the server.
        run: Where turns, failures and counts are kept.
        report: Locust's metrics.
        started: When the run began, on `time.perf_counter`'s clock.
    """

    def __init__(self, url: str, run: Run, report: Report, started: float) -> None:
        self.url = url.rstrip("/")
        self.run = run
        self.report = report
        self.started = started
        self.session = requests.Session()
        self.session.trust_env = False  # never through a proxy
        self._idle_since = 0.0

    # -- turns ---------------------------------------------------------------

    def turn(
        self,
        step: Step,
        prompt: str | list[int],
        model: str,
        salt: str,
        stop_after: int | None = None,
    ) -> Answer:
        """Send one turn; hang up after `stop_after` events. Records what came of it."""
        path, body = turn_body(step, prompt, model, salt)
        answer = self.stream(path, body, stop_after)
        name = f"{step.role}, {'text' if isinstance(prompt, str) else 'tokens'}"
        self.record(step.role, name, body, answer)
        return answer

    def record(self, role: str, name: str, body: Any, answer: Answer) -> None:
        """Note a whole answer, one that was hung up, or a failure."""
        milliseconds = 1e3 * ((answer.last or time.perf_counter()) - answer.sent)
        if answer.whole:
            turn = _turn(role, answer, self.started)
            self.run.turns.append(turn)
            self.report("turn", name, milliseconds, turn.output_tokens, None)
            self.report("TTFT", role, 1e3 * turn.ttft_s, turn.prompt_tokens, None)
            for gap in turn.gaps_s:
                self.report("ITL", role, 1e3 * gap, 1, None)
            share = 100 * turn.shared / turn.prompt_tokens
            self.report("shared %", role, share, turn.prompt_tokens, None)
        elif answer.hung_up:
            self.run.counts["cancelled"] += 1
            self.report("cancel", name, milliseconds, answer.num_events, None)
        else:
            status, text = answer.error or (200, f"ended with {answer.finish!r}: {answer.output}")
            self.fail("turn", name, body, status, text)

    def stream(self, path: str, body: Mapping[str, Any], stop_after: int | None = None) -> Answer:
        """The answer, or its first `stop_after` events; leaving closes the connection."""
        answer = Answer(sent=time.perf_counter())
        try:
            with self.post(path, {**body, "stream": True}, stream=True) as response:
                if response.status_code != 200:
                    answer.error = (response.status_code, response.text)
                    return answer
                for event in _events(response):
                    _take(answer, event)
                    if answer.error:
                        return answer
                    if answer.num_events == stop_after and not answer.finish:
                        answer.hung_up = True
                        return answer
        except (requests.RequestException, json.JSONDecodeError) as error:
            answer.error = (None, f"{type(error).__name__}: {error}")
        return answer

    def refused(self, step: Step, prompt: str | list[int], model: str, salt: str) -> None:
        """Send a turn to a role that does not exist: a 4xx that names it is right."""
        path, body = turn_body(step, prompt, model, salt)
        answer = self.post(path, body)
        if 400 <= answer.status_code < 500 and step.role in answer.text:
            self.run.counts["refused"] += 1
            self.report("bad name", path, 1e3 * answer.elapsed.total_seconds(), 0, None)
        else:
            self.fail("bad name", path, body, answer.status_code, answer.text)

    def call(self, what: str, path: str, body: Any) -> bool:
        """An operator's request; whether it was answered with a 200."""
        answer = self.post(path, body)
        if answer.status_code != 200:
            self.fail(what, path, body, answer.status_code, answer.text)
            return False
        self.report(what, path, 1e3 * answer.elapsed.total_seconds(), len(answer.content), None)
        return True

    def fail(self, what: str, name: str, body: Any, status: int | None, text: str) -> None:
        self.run.failures.append(Failure(f"{what}: {name}", brief(body), status, text[:2000]))
        self.report(what, name, 0.0, 0, f"{status} {text[:200]}")

    def post(self, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        return self._send("POST", path, json=body, **kwargs)

    def get(self, path: str) -> requests.Response:
        return self._send("GET", path)

    def _send(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        if time.perf_counter() - self._idle_since > KEEP_ALIVE:
            self.session.close()  # its connections; the next request opens one
        try:
            return self.session.request(
                method,
                self.url + path,
                headers=key_headers(path),
                timeout=(CONNECT_LIMIT, READ_LIMIT),
                **kwargs,
            )
        finally:
            self._idle_since = time.perf_counter()

    def state(self) -> dict[str, Any] | None:
        """``GET /precache/state``; None on stock SGLang."""
        answer = self.get("/precache/state")
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        state: dict[str, Any] = answer.json()
        return state

    def close(self) -> None:
        self.session.close()


def turn_body(
    step: Step, prompt: str | list[int], model: str, salt: str
) -> tuple[str, dict[str, Any]]:
    """Path and body: text goes to the OpenAI endpoint, token ids to SGLang's own."""
    if isinstance(prompt, str):
        return "/v1/completions", {
            "model": f"{model}:{step.role}",
            "prompt": prompt,
            "max_tokens": step.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
    return "/generate", {
        "input_ids": prompt,
        "lora_path": step.role,
        "cache_salt": salt,
        "sampling_params": {
            "max_new_tokens": step.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
    }


def brief(body: Any) -> Any:
    """`body` with the lengths of prompts in their place."""
    if not isinstance(body, dict):
        return body
    return {
        name: f"<{len(value)} {'characters' if name == 'prompt' else 'tokens'}>"
        if name in ("prompt", "input_ids")
        else value
        for name, value in body.items()
    }


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    # Without a size, pieces come as the server sends them.
    for line in response.iter_lines(chunk_size=None):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


def _take(answer: Answer, event: Mapping[str, Any]) -> None:
    """One event of either endpoint. Native ones repeat what came before, others do not."""
    if "error" in event:
        answer.error = (event["error"].get("code"), json.dumps(event))
        return
    if meta := event.get("meta_info"):
        answer.output = event["output_ids"]
        answer.usage = meta
        reason = meta["finish_reason"]
        answer.finish = reason and reason["type"]
        if answer.finish == "abort":
            answer.error = (reason.get("status_code"), json.dumps(reason))
            return
    else:
        answer.usage = event.get("usage") or answer.usage
        if not event["choices"]:
            return
        (choice,) = event["choices"]
        answer.output = (answer.output or "") + choice["text"]
        answer.finish = choice["finish_reason"] or answer.finish
    now = time.perf_counter()
    if answer.first:
        answer.gaps.append(now - answer.last)
    else:
        answer.first = now
    answer.last = now


def _turn(role: str, answer: Answer, started: float) -> Turn:
    usage = answer.usage
    prompt = usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    cached = usage.get("cached_tokens", details.get("cached_tokens", 0))
    counts = usage.get("precache") or {
        "shared": 0,
        "own": cached,
        "replayed": 0,
        "computed": prompt - cached,
    }
    return Turn(
        role=role,
        at=answer.sent - started,
        ttft_s=answer.first - answer.sent,
        turn_s=answer.last - answer.sent,
        gaps_s=answer.gaps,
        prompt_tokens=prompt,
        output_tokens=usage["completion_tokens"],
        **counts,
    )


# -- pools -------------------------------------------------------------------


def start_clean(client: Client) -> dict[str, Any] | None:
    """Flush, and return what the server holds then; None on stock SGLang.

    Raises:
        NotAtRestError: It is busy, or does not come out of the flush empty.
    """
    problems = _flush(client)
    state = client.state()
    if state is not None:
        problems += lost(state, flushed=True)
    if problems:
        raise NotAtRestError(f"the server is not at rest before it: {'; '.join(problems)}")
    return state


def settle(client: Client, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """After the load: wait until nothing is owed, flush, compare with `before`.

    Returns ``drain_s``, the states ``after_drain`` and ``after_flush`` (None on stock SGLang),
    and ``problems``: empty if both pools came back whole.
    """
    begin = time.perf_counter()
    state, problems = client.state(), []
    while state is not None and _owes(state):
        if time.perf_counter() - begin > DRAIN_LIMIT:
            problems.append(f"not at rest {DRAIN_LIMIT:.0f} s after the load")
            break
        time.sleep(0.1)
        state = client.state()
    drain_s = time.perf_counter() - begin
    if state is not None:
        problems += lost(state)
    problems += _flush(client)
    flushed = client.state()
    if flushed is not None and before is not None:
        problems += [f"after a flush: {problem}" for problem in lost(flushed, flushed=True)]
        problems += [
            f"{name} was {before[name]} before the load and is {flushed[name]}"
            for name in ("teams", "base_pool_tokens", "lr_pool_slots")
            if before[name] != flushed[name]
        ]
    return {
        "drain_s": drain_s,
        "problems": problems,
        "after_drain": state,
        "after_flush": flushed,
    }


def lost(state: Mapping[str, Any], flushed: bool = False) -> list[str]:
    """What a server at rest holds that is not in its cache; after a flush, all that it holds."""
    found = {
        "problems": state["problems"],
        "KV slots lost": state["base_tokens_in_use"]
        - state["base_tokens"]
        - state.get("own_base_tokens", 0),
        "low-rank slots lost": state["lr_slots_in_use"] - state["lr_slots_evictable"],
        "low-rank slots pinned": state["lr_slots_pinned"],
        "rows of the request table lost": state["request_rows_in_use"],
    }
    if flushed:
        found["KV slots in use"] = state["base_tokens_in_use"]
        found["low-rank slots in use"] = state["lr_slots_in_use"]
    return [f"{name}: {value}" for name, value in found.items() if value]


def _owes(state: Mapping[str, Any]) -> bool:
    return any(
        state[name]
        for name in ("backlog_tokens", "provisional_tokens", "shadow_tokens", "request_rows_in_use")
    )


def _flush(client: Client) -> list[str]:
    with contextlib.closing(client.post("/flush_cache?timeout=60")) as answer:
        return [] if answer.status_code == 200 else [f"not flushed: {answer.text.strip()}"]
