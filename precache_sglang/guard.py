"""What stands between clients and SGLang's HTTP app: drain, errors, limits, origins.

All errors are JSON with an ``error`` object as OpenAI has it; whatever SGLang puts beside
it stays. A stream that fails before its first token has the status of its error. Answers
that say "later" (429, 503) say when. After SIGTERM new requests are sent away, and those that
run have ``--precache-drain-timeout`` seconds to end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.dependencies.utils import request_body_to_args
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precache_sglang.config import Settings
from precache_sglang.tenants import Tenants, current_tenant, read_tenants

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]

# Answered while the server drains: they tell probes and scrapers that it does.
_ALWAYS = ("/health", "/ready", "/metrics")
# Seconds after which a client may try again: a queue that is full, a server that restarts.
_RETRY_AFTER = "1"
_RETRY_AFTER_DRAIN = "10"
# In the error of ``/v1/responses``: the status that the engine gave it.
STATUS_KEY = "status_code"
# ``/v1/messages`` says the status of a stream's error by its type alone.
_ANTHROPIC_STATUS = {
    "invalid_request_error": 400,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "api_error": 500,
    "overloaded_error": 503,
}
# Seconds for what is cut off to reach its clients.
_GRACE = 2.0

_current: Guard | None = None


def current() -> Guard | None:
    """The guard of this process's HTTP server; None where there is none."""
    return _current


def install(app: Any, settings: Settings) -> None:
    """Put a guard around all of `app`, SGLang's FastAPI, with its middleware and key checks."""
    # SGLang lets pages of every origin read every answer.
    app.user_middleware = [m for m in app.user_middleware if m.cls is not CORSMiddleware]
    app.max_body_size = settings.max_body_bytes
    for kind in (AttributeError, TypeError, KeyError):
        app.add_exception_handler(kind, _on_body_of_another_type)
    build = app.build_middleware_stack

    def build_guarded() -> Any:
        global _current
        _current = guard = Guard(build(), settings)
        if not settings.cors_origins:
            return guard
        return CORSMiddleware(
            guard,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )

    app.build_middleware_stack = build_guarded


async def _on_body_of_another_type(_request: Request, error: Exception) -> Response:
    """Status 400 for what ends SGLang's own validators of a body, which expect objects inside."""
    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_code is request_body_to_args.__code__ for frame, _ in frames):
        raise error
    text = f"The body, or a value in it, is not of the type that this route takes: {error}"
    return JSONResponse({"detail": text}, status_code=400)


class Guard:
    """See the module's docstring; an ASGI app around `app`."""

    def __init__(self, app: App, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.tenants: Tenants | None = None
        if settings.tenants is not None:
            from sglang.srt.runtime_context import get_serving

            serving = get_serving()
            self.tenants = read_tenants(settings.tenants, serving.api_key, serving.admin_api_key)
        self._open: set[asyncio.Task[Any]] = set()  # of requests without their full answer

    @property
    def draining(self) -> bool:
        """Whether SIGTERM came; from the moment on that ``/health`` says so."""
        return _tokenizer_manager().gracefully_exit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            # SGLang takes SIGTERM over from the HTTP server with the first request only.
            _tokenizer_manager().auto_create_handle_loop()
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        answer = _Answer(self, scope, send, done=lambda: self._open.discard(task))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self.draining and not path.startswith(_ALWAYS):
            await answer.refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The server is shutting down and takes no new requests; send it again, to "
                "another server or later.",
            )
            return
        self._open.add(task)
        scope = self._as_tenant(scope)
        try:
            await self.app(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self.draining:
                raise
            await answer.refuse(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The server shut down before this request had its answer "
                f"(--precache-drain-timeout {self.settings.drain_timeout_s:g}); send it again.",
            )
        finally:
            self._open.discard(task)

    def _as_tenant(self, scope: Any) -> Any:
        """Note who asks; a tenant's key passes for the ``--api-key`` from here on."""
        if self.tenants is None:
            return scope
        headers = MutableHeaders(raw=list(scope["headers"]))
        name = self.tenants.name_of(headers.get("authorization", "").encode("latin-1"))
        current_tenant.set(name or "")
        if name is None:
            return scope
        headers["authorization"] = self.tenants.api_key_header.decode()
        return {**scope, "headers": headers.raw}

    async def drain(self, manager: TokenizerManager) -> None:
        """Wait for SIGTERM or SIGINT, then until nothing runs any more or the time is up.

        SGLang then stops its scheduler. Whatever is open after that would stay open, and keep
        the HTTP server from ending: so nothing is.
        """

        def stop() -> None:
            logger.warning("SIGINT received. Draining requests and shutting down...")
            manager.gracefully_exit = True

        if threading.current_thread() is threading.main_thread():
            # The HTTP server's own handler waits for open streams without a limit.
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
        while not manager.gracefully_exit:
            await asyncio.sleep(0.05)
        limit = self.settings.drain_timeout_s
        logger.info("Draining: %d requests have %g s to end.", len(self._open), limit)
        if not await self._ended(manager, limit):
            logger.warning("Cutting off %d requests after %g s.", len(self._open), limit)
            manager.abort_request(abort_all=True)
            await self._ended(manager, _GRACE)
            for task in list(self._open):
                task.cancel()
            await self._ended(manager, _GRACE)
            # SGLang waits for these without a limit.
            manager.rid_to_state.clear()

    async def _ended(self, manager: TokenizerManager, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._open or manager.rid_to_state:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True


class _Answer:
    """One answer on its way out.

    The start of an error, and of a stream, is held until the body says what it is.
    """

    def __init__(self, guard: Guard, scope: Any, send: Any, done: Callable[[], None]) -> None:
        self.guard = guard
        self.path: str = scope["path"]
        self._send = send
        self._done = done
        self._held: Message | None = None
        self._preludes: list[Message] = []  # of a stream that is held
        self._body = b""
        self._started = False
        self._ended = False

    async def send(self, message: Message) -> None:
        if self._ended:
            return  # the rest of a stream that was answered as an error
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            is_stream = headers.get("content-type", "").startswith("text/event-stream")
            if message["status"] >= 400 or is_stream:
                self._held = message
                return
        is_body = message["type"] == "http.response.body"
        if self._held is None or not is_body or await self._judge(message):
            await self._forward(message)

    async def _judge(self, message: Message) -> bool:
        """Look at a body behind a held start. True if `message` goes out as it is."""
        assert self._held is not None
        body, more = message.get("body", b""), message.get("more_body", False)
        status: int = self._held["status"]
        if status >= 400:
            self._body += body
            if not more:
                await self._error(status, self._body)
            return False
        if not body and more:
            return False
        if more and _is_prelude(body):
            self._preludes.append(message)
            return False
        error = error_of_event(body)
        if error is not None:
            status, said = error
            MutableHeaders(raw=self._held["headers"])["content-type"] = "application/json"
            await self._error(status, said)
            return False
        start, self._held = self._held, None
        for held in (start, *self._preludes):
            await self._forward(held)
        return True

    async def refuse(self, status: int, text: str) -> None:
        """Answer with an error of ours, if nothing has been sent yet."""
        if self._started:
            return
        self._held = {"type": "http.response.start", "headers": [(b"connection", b"close")]}
        await self._error(status, json.dumps({"detail": text}).encode())

    async def _error(self, status: int, said: bytes) -> None:
        start, self._held = self._held, None
        assert start is not None
        if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            limit = self.guard.settings.max_body_bytes
            text = f"The body is larger than {limit} bytes (--precache-max-body-bytes)."
            said = json.dumps({"detail": text}).encode()
        body = error_body(status, self.path, said)
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            seconds = _RETRY_AFTER_DRAIN if self.guard.draining else _RETRY_AFTER
            headers.setdefault("retry-after", seconds)
        await self._forward({**start, "status": int(status), "headers": headers.raw})
        await self._forward({"type": "http.response.body", "body": body})

    async def _forward(self, message: Message) -> None:
        self._started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
            self._done()  # the task may go on: SGLang has things to do after an answer
        await self._send(message)


def _is_prelude(chunk: bytes) -> bool:
    """Whether an event is sent before SGLang knows whether the engine takes the request."""
    name = chunk.split(b"\n", 1)[0].removeprefix(b"event: ")
    return name in (b"response.created", b"response.in_progress", b"message_start")


def error_of_event(chunk: bytes) -> tuple[int, bytes] | None:
    """Status and JSON text of the error that the first event of a stream brings, if it does.

    SGLang sends status 200 before it knows, and the error as an event of one of four kinds.
    """
    lines = chunk.split(b"\n")
    event = next((line for line in lines if line.startswith(b"data: ")), b"").removeprefix(
        b"data: "
    )
    if b'"error"' not in event and b'"abort"' not in event:
        return None
    try:
        said = json.loads(event)
    except ValueError:
        return None
    if not isinstance(said, dict):
        return None
    error: Any = said.get("error")
    if said.get("type") == "response.failed":
        error = (said.get("response") or {}).get("error") or {}
        error = {"message": error.get("message"), "code": error.get(STATUS_KEY)}
    elif said.get("type") == "error" and isinstance(error, dict):
        error = {**error, "code": _ANTHROPIC_STATUS.get(str(error.get("type")))}
    elif not isinstance(error, dict):
        error = (said.get("meta_info") or {}).get("finish_reason")
        if not isinstance(error, dict) or error.get("type") != "abort":
            return None
        error = {"message": error.get("message"), "code": error.get("status_code")}
    code = error.get("code")
    if not isinstance(code, int) or not 400 <= code < 600:
        return None
    return code, json.dumps({"error": error}).encode()


def error_body(status: int, path: str, said: bytes) -> bytes:
    """`said`, an answer with an error status, with OpenAI's ``error`` object in it.

    Anthropic's routes have an ``error`` object too, and ``"type": "error"`` beside it.
    """
    phrase = HTTPStatus(status).phrase
    try:
        body = json.loads(said)
    except ValueError:
        body = {"error": said.decode(errors="replace")}
    if not isinstance(body, dict):
        body = {"detail": body}
    given = body.get("error")
    fields = given if isinstance(given, dict) else body
    texts = (given, fields.get("message"), body.get("error_message"), body.get("detail"))
    error = {
        "message": next((text for text in texts if isinstance(text, str) and text), phrase),
        "type": fields.get("type") or phrase,
        "param": fields.get("param"),
        "code": fields.get("code") or status,
    }
    body["error"] = {**fields, **error} if fields is given else error
    if path.startswith("/v1/messages"):
        body["type"] = "error"
    return json.dumps(body).encode()


def _tokenizer_manager() -> TokenizerManager:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager
