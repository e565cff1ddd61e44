"""What the live page shows: a bounded picture of one scheduler process.

`take_view` runs in the scheduler, between two steps; it looks at a bounded number of nodes,
whatever the size of the tree. `SharedView` runs in the HTTP process and asks for one picture a
second at most, however many pages are open.

A picture holds sizes and ids: no token, and of a tenant's key or salt a mark that only tells
tenants apart.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from precache_sglang.metrics import RESERVED
from precache_sglang.request import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from precache_sglang.backlog import NeutralJob
    from precache_sglang.roles import Adapter
    from precache_sglang.runtime import Runtime

# `GetInternalStateReq` has no field that says what is asked for, but it has an id.
VIEW_ID = "precache-view"

MAX_NODES = 300
MAX_TURNS = 40  # running ones, and as many whose neutral pass is owed
MAX_ROLES = 32
# Children of one node that are looked at, the newest ones, for a root may have a million; and
# children of all nodes together.
_MAX_CHILDREN = 1000
_MAX_LOOKS = 3000
_MAX_NAME = 80  # characters


# The next two are not made on import: servers are forked from a process that has this module.
@functools.cache
def _boot() -> str:
    """Another one after every start, so that a page sees that its server was started again."""
    return secrets.token_hex(8)


@functools.cache
def _mark_key() -> bytes:
    """No picture and no log has it."""
    return secrets.token_bytes(16)


def take_view(runtime: Runtime) -> dict[str, Any]:
    """Everything the page needs, as JSON has it."""
    names = _Names.of(runtime)
    running = runtime.running_requests()
    jobs = runtime.backlog.jobs
    return {
        "boot": _boot(),
        "time": round(time.time(), 2),
        "method": runtime.method.name,
        "schedule": runtime.schedule.name if runtime.schedule else None,
        "gauges": runtime.gauges(),
        "requests": runtime.requests(),
        "pools": _pools(runtime),
        "totals": runtime.stats.as_dict(),
        "roles": list(_roles(runtime, names)),
        "num_roles": names.num_roles,
        "tree": {
            "nodes": list(_nodes(runtime, names)),
            "running": [_running(req, names) for req in running[:MAX_TURNS]],
            "num_running": len(running),
            "owed": [_owed(job, names) for job in itertools.islice(jobs, MAX_TURNS)],
            "num_owed": len(jobs),
        },
        "history": list(runtime.history.samples),
    }


@dataclass
class _Names:
    """The roles of a picture; elsewhere in it a role is its index in this list.

    Attributes:
        entries: Loaded roles in the order of loading, then rows of `RoleTable` without one.
        num_roles: How many there are; `entries` is cut at `MAX_ROLES`.
        by_key: Slice key to the roles that read such slices.
        by_content: Adapter content to a role.
    """

    entries: list[tuple[str, Adapter | None]]
    num_roles: int
    by_key: dict[str, list[int]] = field(default_factory=dict)
    by_content: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, runtime: Runtime) -> _Names:
        loaded = {adapter.name: adapter for adapter in runtime.roles.adapters.values()}
        rest = [label for label, _ in runtime.by_role.items() if loaded.get(label) is None]
        rest += [label for label in RESERVED if label in loaded and label in runtime.by_role]
        self = cls(
            [*itertools.islice(loaded.items(), MAX_ROLES), *((label, None) for label in rest)],
            len(loaded) + len(rest),
        )
        del self.entries[MAX_ROLES:]
        for index, (_, adapter) in enumerate(self.entries):
            if adapter is not None:
                self.by_content.setdefault(adapter.content, index)
                if adapter.rows_key is not None:
                    self.by_key.setdefault(adapter.rows_key, []).append(index)
        return self

    def feeder(self, content: str) -> int | None:
        """The role of that adapter; None for no adapter, -1 for one that is not in the list."""
        return self.by_content.get(content, -1) if content else None


def _roles(runtime: Runtime, names: _Names) -> Iterator[dict[str, Any]]:
    totals = dict(runtime.by_role.items())
    for name, adapter in names.entries:
        key = None if adapter is None else adapter.rows_key
        counted = name in totals and (adapter is None or name not in RESERVED)
        yield {
            "name": name[:_MAX_NAME],
            "loaded": adapter is not None,
            "is_role": adapter is not None or name not in RESERVED,
            "team": adapter.team[:_MAX_NAME] if adapter else None,
            "has_rows": key is not None,
            "lr_bytes": runtime.tree.lr_tokens[key] * runtime.slot_bytes if key else 0,
            **(totals[name].as_dict() if counted else {}),
        }


def _pools(runtime: Runtime) -> dict[str, dict[str, int]]:
    """Who holds the slots of each pool; the rest is free."""
    tree, pool = runtime.tree, runtime.lr_pool
    allocator = tree.token_to_kv_pool_allocator
    owed = runtime.backlog.held_base_slots()
    used = allocator.size - allocator.available_size()
    base = {
        "size": allocator.size,
        "cached": tree.num_tokens - tree.provisional_tokens - tree.owed_tokens,
        "provisional": tree.provisional_tokens,
        "own": tree.own_size(),
        "owed": owed + tree.owed_tokens,
        "running": used - tree.num_tokens - tree.own_size() - owed,
    }
    if pool is None:
        return {"base": base}
    lr = {
        "size": pool.size,
        "evictable": tree.lr_evictable_size,
        "pinned": tree.lr_pinned_size,
        "owed": (held := runtime.backlog.held_rows()),
        "running": pool.size
        - pool.available_size()
        - tree.lr_evictable_size
        - tree.lr_pinned_size
        - held,
    }
    return {"base": base, "lr": lr}


def _nodes(runtime: Runtime, names: _Names) -> Iterator[dict[str, Any]]:
    """The nodes used last, each after its parent."""
    now = time.monotonic()
    teams = runtime.roles.team_names()
    serial = itertools.count()
    heap: list[tuple[float, int, TreeNode]] = []

    def look_at(children: Iterable[TreeNode]) -> None:
        for child in itertools.islice(children, min(_MAX_CHILDREN, _MAX_LOOKS - len(heap))):
            heapq.heappush(heap, (-child.last_access_time, next(serial), child))

    root = runtime.tree.root_node
    look_at(reversed(root.children.values()))
    for _ in range(MAX_NODES):
        if not heap:
            return
        _, _, node = heapq.heappop(heap)
        look_at(reversed(node.children.values()))
        found = {
            "id": node.id,
            "parent": None if node.parent is root else node.parent.id,
            "tokens": len(node.key),
            "base": _base_kind(runtime, node),
            "fed_by": names.feeder(node.feeder),
            "slices": sorted(i for key in node.slices for i in names.by_key.get(key, ())),
            "locks": node.lock_ref,
            "children": len(node.children),
            "age_s": round(max(0.0, now - node.last_access_time), 1),
        }
        if node.parent is root:
            space, _, key = (node.key.extra_key or "").partition(":")
            is_team = runtime.method.shared and space[1:].isdecimal()
            found["team"] = teams[int(space[1:])][:_MAX_NAME] if is_team else None
            found["tenant"] = _mark(key, node.key.cache_salt)
        yield found


def _base_kind(runtime: Runtime, node: TreeNode) -> str:
    """What the node's slots of the KV pool hold."""
    if node.provisional:
        return "adapted" if node.exact else "provisional"
    if not runtime.method.base_kv:
        return "full"
    return "neutral" if runtime.method.neutral_base or not node.feeder else "adapted"


def _mark(extra_key: str, salt: str | None) -> str | None:
    """Tells tenants apart and says nothing else about what they sent."""
    if not extra_key and not salt:
        return None
    named = f"{len(extra_key)} {extra_key} {salt or ''}".encode(errors="surrogatepass")
    return hashlib.blake2b(named, key=_mark_key(), digest_size=2).hexdigest()


def _running(req: Req, names: _Names) -> dict[str, Any]:
    state = state_of(req)
    return {
        "node": req.last_node.id,
        "role": names.feeder(state.feeder),
        "prompt": len(req.origin_input_ids),
        "output": len(req.output_ids),
        "beside": state.shadow.num_slots if state.shadow else 0,
    }


def _owed(job: NeutralJob, names: _Names) -> dict[str, Any]:
    assert job.lock is not None
    return {
        "node": job.lock.node.id,
        "role": names.feeder(job.feeder),
        "tokens": job.end - job.done,
        "age_s": round(time.monotonic() - job.created, 1),
    }


class SharedView:
    """One picture for all who look: at most one a second is taken, and one at a time.

    Args:
        take: Asks the scheduler.
    """

    def __init__(self, take: Callable[[], Awaitable[Any]], every: float = 1.0) -> None:
        self._take = take
        self._every = every
        self._task: asyncio.Task[Any] | None = None
        self._taken = 0.0

    async def get(self, timeout: float) -> Any:
        """The last picture if it is not older than a second, else the next one.

        Raises:
            TimeoutError: if the scheduler has not answered by then; it may be in a long step.
                What was asked for goes to whoever comes next.
        """
        if self._task is None or (
            self._task.done() and time.monotonic() - self._taken >= self._every
        ):
            self._task = asyncio.create_task(self._ask())
        return await asyncio.wait_for(asyncio.shield(self._task), timeout)

    async def _ask(self) -> Any:
        try:
            return await self._take()
        finally:
            self._taken = time.monotonic()
