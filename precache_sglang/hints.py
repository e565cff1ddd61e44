"""What a caller says beside the prompt: a request id, a trajectory, whether to explain.

As headers, or as fields of SGLang's ``custom_params`` (in ``sampling_params`` of /generate,
at the top of an OpenAI chat or completions body), which the scheduler receives:

=======================  =======================  ========================================
header                   field                    meaning
=======================  =======================  ========================================
X-Request-Id             (none)                   the request's id; sent back in any case
X-Precache-Trajectory    precache_trajectory      whose turn it is; further turns may follow
X-Precache-Explain       precache_explain         show the text where the cached context ends
=======================  =======================  ========================================

All are hints. None is a namespace, and no answer depends on one.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

TRAJECTORY = "precache_trajectory"
EXPLAIN = "precache_explain"

_MAX_LEN = 128
# What can stand in a header and in a line of a log.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# SGLang treats ids that begin so as its own, and so do we.
_RESERVED = ("HEALTH_CHECK", "precache-")
_FLAGS = {"1": True, "true": True, "0": False, "false": False}

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


@dataclass
class Hints:
    """What the headers of one HTTP request say.

    Attributes:
        request_id: Goes out in ``X-Request-Id``; nobody else's while the request lasts.
        is_callers: The caller chose it.
        is_taken: An engine request has it as its id.
    """

    request_id: str
    is_callers: bool = False
    is_taken: bool = False
    trajectory: str | None = None
    explain: bool | None = None


_current: ContextVar[Hints | None] = ContextVar("precache_hints", default=None)


def check_trajectory(name: str, value: Any) -> str:
    """`value` if it can be a trajectory id. `name` is what the caller wrote it under.

    Raises:
        ValueError: with name, value and remedy.
    """
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_LEN or not value.isprintable():
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        raise ValueError(
            f"{name} {shown} is no trajectory id; give 1 to {_MAX_LEN} printable characters, "
            "or leave it out."
        )
    return value


def check_explain(name: str, value: Any) -> bool:
    """`value` as a flag; raises `ValueError` like `check_trajectory`."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    raise ValueError(f"{name} {str(value)[:60]!r} is neither yes nor no; give 1 or 0.")


def is_request_id(value: str) -> bool:
    return _REQUEST_ID.fullmatch(value) is not None and not value.startswith(_RESERVED)


def check_ids_in_body(rid: Any) -> None:
    """Raises `ValueError` for an id that is not the caller's to give: no log would show it."""
    for value in rid if isinstance(rid, list) else [rid]:
        if isinstance(value, str) and value.startswith(_RESERVED):
            raise ValueError(f"rid {value!r:.100} begins like the server's own ids; give another.")


# -- HTTP ----------------------------------------------------------------------


class HintsMiddleware:
    """Reads the headers of every request, and names the request in every answer.

    Outermost, so that errors of the layers below carry the id too.

    Args:
        app: What to wrap.
        in_flight: Ids of the engine requests in flight.
        refuse: Makes an application that answers with status 400 and this text.
    """

    def __init__(
        self,
        app: _App,
        in_flight: Callable[[], Iterable[str]],
        refuse: Callable[[_Scope, str], Awaitable[_App]],
    ) -> None:
        self.app = app
        self.in_flight = in_flight
        self.refuse = refuse
        self._claimed: set[str] = set()  # ids of the HTTP requests in progress

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        hints = self._name(headers.get(b"x-request-id", ""))

        async def send_named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *(pair for pair in message.get("headers", ()) if pair[0] != b"x-request-id"),
                    (b"x-request-id", hints.request_id.encode()),
                ]
            await send(message)

        self._claimed.add(hints.request_id)
        token = _current.set(hints)
        claimed = hints.request_id
        try:
            try:
                _read(headers, hints)
            except ValueError as error:
                app = await self.refuse(scope, str(error))
            else:
                app = self.app
            await app(scope, receive, send_named)
        finally:
            _current.reset(token)
            # Only now: SGLang aborts a stream's id once more, seconds after its end.
            self._claimed.discard(claimed)

    def _name(self, wanted: str) -> Hints:
        if is_request_id(wanted) and self._is_free(wanted):
            return Hints(wanted, is_callers=True)
        return Hints(uuid.uuid4().hex)

    def _is_free(self, wanted: str) -> bool:
        # Several prompts under the id X are X_0, X_1 …
        return not any(
            other == wanted or other.startswith(f"{wanted}_") or wanted.startswith(f"{other}_")
            for other in itertools.chain(self._claimed, self.in_flight())
        )


def _read(headers: dict[bytes, str], hints: Hints) -> None:
    trajectory = headers.get(b"x-precache-trajectory")
    if trajectory is not None:
        hints.trajectory = check_trajectory("X-Precache-Trajectory", trajectory)
    explain = headers.get(b"x-precache-explain")
    if explain is not None:
        hints.explain = check_explain("X-Precache-Explain", explain)


# -- on SGLang's record of a request -------------------------------------------


def adopt_request_id(request: GenerateReqInput) -> None:
    """Make the HTTP request's id the engine request's, unless the body names one.

    An id in the body stays what it is and, if the caller sent no header, goes out in ours.
    Several prompts get the id with ``_0``, ``_1`` … appended. Of the engine requests that an
    HTTP request makes, the first gets the id.
    """
    hints = _current.get()
    if hints is None or hints.is_taken:
        return
    hints.is_taken = True
    if request.rid is None:
        request.rid = hints.request_id
    elif isinstance(request.rid, str) and not hints.is_callers and is_request_id(request.rid):
        hints.request_id = request.rid


def put_into_params(request: GenerateReqInput) -> None:
    """Check the fields in ``custom_params``, and add there what the headers say.

    Raises:
        ValueError: if a field cannot be what it is named after.
    """
    hints = _current.get() or Hints("")
    given = request.sampling_params
    each = given if isinstance(given, list) else [given or {}]
    if not all(isinstance(params, dict) for params in each):
        return  # SGLang refuses it
    changed = [_with_hints(params, hints) for params in each]
    request.sampling_params = changed if isinstance(given, list) else changed[0]
    custom = changed[0].get("custom_params") if len(changed) == 1 else None
    if request.routing_key is None and isinstance(custom, dict):
        # SGLang's --schedule-policy routing-key runs turns of one trajectory together.
        request.routing_key = custom.get(TRAJECTORY)


def _with_hints(params: dict[str, Any], hints: Hints) -> dict[str, Any]:
    custom = params.get("custom_params")
    if custom is not None and not isinstance(custom, dict):
        # SGLang passes on what it is, and what reads it in the scheduler expects fields.
        raise ValueError(
            f"custom_params {custom!r:.100} is not an object; send one, or leave it out."
        )
    custom = custom or {}
    ours: dict[str, Any] = {}
    if custom.get(TRAJECTORY) is not None:
        ours[TRAJECTORY] = check_trajectory(TRAJECTORY, custom[TRAJECTORY])
    elif hints.trajectory is not None:
        ours[TRAJECTORY] = hints.trajectory
    if custom.get(EXPLAIN) is not None:
        ours[EXPLAIN] = check_explain(EXPLAIN, custom[EXPLAIN])
    elif hints.explain is not None:
        ours[EXPLAIN] = hints.explain
    return {**params, "custom_params": {**custom, **ours}} if ours else params
