"""Why no more of a prompt was read from the cache: reported with every answer.

Looks at the path that the request matched and at the children of its last node, never
further down, and, where there are several teams, at how far the same tokens go under those.
Nothing of another namespace (another ``cache_salt`` or ``extra_key``) is looked at.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from precache_sglang.request import RequestState, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from precache_sglang.prefix_cache import PrecacheRadixCache
    from precache_sglang.runtime import Runtime

logger = logging.getLogger(__name__)

# Tokens shown before and after the end of the match.
_AROUND = 8
_LOG_EVERY = 10.0  # seconds between two lines
_LOG_FROM = 64  # tokens that might have been shared, for a line


class Reason(str, Enum):
    """Why the cached base KV of a prompt ends where it does."""

    COMPLETE = "complete"  # all but the last token, which is always computed for its logits
    EXTENDS = "extends"  # the cached text ends there, the prompt goes on
    DIFFERS = "differs"  # the nearest cached trajectory goes on with another token
    FIRST_PROMPT = "first_prompt"  # nothing cached begins like it
    EVICTED = "evicted"  # what followed was cached, and had to make room
    IN_FLIGHT = "in_flight"  # a running request computes the same tokens, none published yet
    OTHER_TEAM = "other_team"  # more of it is cached, for another team of roles
    OTHER_ROLE = "other_role"  # more of it is cached, for another role, and the method shares none


class RowsReason(str, Enum):
    """Why the role's rows end before the cached base KV does, so that tokens are replayed."""

    EVICTED = "rows_evicted"  # rows of this role had to make room
    LOADED_LATER = "adapter_loaded_later"  # the tokens were cached before the role was loaded
    NOT_WRITTEN = "rows_not_written"  # by the method, or for lack of room then
    LOGPROBS = "logprobs"  # they are there, but the request asks for the prompt's logprobs


@dataclass(frozen=True)
class Match:
    """How far a prompt matched, and what ended it. Lengths are in tokens.

    Attributes:
        prompt_tokens: Length of the prompt.
        base_tokens: Of these, from the start, have base KV in the cache.
        rows_tokens: Of these, from the start, the role's rows were read too.
        provisional_tokens: Of the base, as many are to be replaced by a neutral pass.
        reason: Why the base ends at `base_tokens`.
        rows_reason: Why the rows end at `rows_tokens`; None if they go as far as the base.
        before: Token ids before the end of the base; empty unless asked for.
        prompt: Token ids of the prompt from there on.
        cached: Token ids with which the nearest cached trajectory goes on.
    """

    prompt_tokens: int
    base_tokens: int
    rows_tokens: int
    provisional_tokens: int
    reason: Reason
    rows_reason: RowsReason | None
    before: Sequence[int] = ()
    prompt: Sequence[int] = ()
    cached: Sequence[int] = ()
    explained: bool = False

    def as_dict(self) -> dict[str, Any]:
        """What goes to the front end, which decodes the tokens."""
        record = asdict(self)
        texts = {name: list(record.pop(name)) for name in ("before", "prompt", "cached")}
        record["reason"] = self.reason.value
        record["rows_reason"] = None if self.rows_reason is None else self.rows_reason.value
        if record.pop("explained"):
            record["end"] = {name: {"tokens": tokens} for name, tokens in texts.items()}
        return record


def match_of(runtime: Runtime, req: Req, others: Iterable[Req]) -> Match:
    """Explain the match of a request that is being admitted. `others` run or start beside it."""
    state = state_of(req)
    tree = runtime.tree
    prompt: array[int] = req.origin_input_ids
    path = _path(tree.root_node, req.last_node)
    readable = len(prompt) - 1
    base = min(state.base_len, len(prompt))
    rows = max(0, min(req.prefix_len, base))
    last = path[-1] if path else tree.root_node
    key = RadixKey(prompt, req.extra_key, cache_salt=req.cache_salt)
    reason = Reason.COMPLETE
    if base < readable:
        reason = _base_reason(runtime, key, base, last, state, others)
    shown: dict[str, Any] = {}
    if state.explain:
        nearest: Sequence[int] = ()
        if reason is Reason.DIFFERS:
            child = max(last.children.values(), key=lambda node: node.last_access_time)
            nearest = child.key.token_ids[:_AROUND]
        shown = {
            "before": prompt[max(0, base - _AROUND) : base],
            "prompt": prompt[base : base + _AROUND],
            "cached": nearest,
            "explained": True,
        }
    return Match(
        prompt_tokens=len(prompt),
        base_tokens=base,
        rows_tokens=rows,
        provisional_tokens=_provisional(tree, path, state, base),
        reason=reason,
        rows_reason=_rows_reason(path, state, rows, min(base, readable)),
        **shown,
    )


def _path(root: TreeNode, last: TreeNode) -> list[TreeNode]:
    path = []
    while last is not root:
        path.append(last)
        last = last.parent
    return path[::-1]


def _provisional(
    tree: PrecacheRadixCache, path: list[TreeNode], state: RequestState, end: int
) -> int:
    tokens = position = 0
    for node in path:
        if tree.is_read_provisionally(node, state):
            tokens += max(0, min(position + len(node.key), end) - position)
        position += len(node.key)
    return tokens


def _base_reason(
    runtime: Runtime,
    key: RadixKey,
    base: int,
    last: TreeNode,
    state: RequestState,
    others: Iterable[Req],
) -> Reason:
    for other in others:
        if (other.extra_key, other.cache_salt) == (key.extra_key, key.cache_salt):
            theirs: array[int] = other.origin_input_ids
            has_next = len(theirs) > base and theirs[base] == key.token_ids[base]
            if has_next and theirs[:base] == key.token_ids[:base]:
                return Reason.IN_FLIGHT
    for namespace in runtime.sibling_namespaces(state, key.extra_key):
        sibling = RadixKey(key.token_ids, namespace, cache_salt=key.cache_salt)
        if runtime.tree.cached_len(sibling) > base:
            return Reason.OTHER_TEAM if runtime.method.shared else Reason.OTHER_ROLE
    if runtime.tree.was_evicted(last, key, base):
        return Reason.EVICTED
    if base == 0:
        return Reason.FIRST_PROMPT
    return Reason.DIFFERS if last.children else Reason.EXTENDS


def _rows_reason(
    path: list[TreeNode], state: RequestState, rows: int, end: int
) -> RowsReason | None:
    """`end` is how far rows could have been read."""
    if rows >= end:
        return None
    if rows < min(state.lr_len, end):
        return RowsReason.LOGPROBS
    assert state.adapter is not None and state.own_key is not None
    position = 0
    for node in path:
        position += len(node.key)
        if position > rows:
            break
    if state.own_key in node.evicted_rows:
        return RowsReason.EVICTED
    if state.adapter.loaded > node.born:
        return RowsReason.LOADED_LATER
    return RowsReason.NOT_WRITTEN


class MatchLog:
    """A line in the log now and then for a prompt of which more might have been shared.

    No text of it, and no more than a line in ten seconds; it says how many went without one.
    """

    _WORTH_A_LINE = (
        Reason.DIFFERS,
        Reason.EVICTED,
        Reason.IN_FLIGHT,
        Reason.OTHER_TEAM,
        Reason.OTHER_ROLE,
    )

    def __init__(self) -> None:
        self._next = 0.0
        self._silent = 0

    def note(self, req: Req, match: Match) -> None:
        base = match.reason in self._WORTH_A_LINE
        rows = match.rows_reason not in (None, RowsReason.LOGPROBS)
        if match.prompt_tokens - match.rows_tokens < _LOG_FROM or not (base or rows):
            return
        now = time.monotonic()
        if now < self._next:
            self._silent += 1
            return
        silent, self._silent, self._next = self._silent, 0, now + _LOG_EVERY
        adapter = state_of(req).adapter
        logger.info(
            "precache: request %r, role %s: %d of %d prompt tokens read, base KV of %d (%s)%s%s",
            req.rid,
            "none" if adapter is None else repr(adapter.name),
            match.rows_tokens,
            match.prompt_tokens,
            match.base_tokens,
            match.reason.value,
            "" if match.rows_reason is None else f", rows end: {match.rows_reason.value}",
            f"; {silent} more like it since the last such line" if silent else "",
        )
