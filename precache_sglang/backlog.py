"""The backlog: neutral tokens owed for finished turns.

When an adapted turn ends, its span becomes a `NeutralJob`: base slots of the adapted pass,
which nobody reads any more and which the neutral pass is written in place of, and the
rows that the active adapter wrote. A piece publishes what it covers as it ends.

A job that somebody cannot wait for is published provisionally, the PreLRShared way: base KV
of the adapted pass, rows of the whole team. A `Rebase` then stands for its neutral pass,
which replaces both: in place once nobody reads them, or with slots of its own.

Where a role keeps the base KV of its own turns, every turn is published at once. Its own role
reads it exactly, the others wait for the rebase, which always takes slots of its own if it can.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from sglang.srt.mem_cache.base_prefix_cache import TreeLock
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from precache_sglang.request import OwnedSlots, RequestState
from precache_sglang.shadow import NeutralSpan

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from precache_sglang.runtime import Runtime

# Share of the KV pool that finished turns may hold while their neutral passes are owed.
_LIMIT = 0.5
# Seconds after which what is provisional is rebased beside its readers, with slots of its own.
_MAX_READ = 20.0
# Tokens that ride along are published together: each publication makes a node of the tree.
_PUBLISH_EVERY = 256
# Trajectories that are remembered.
_MAX_TRAJECTORIES = 4096


@dataclass(eq=False)
class NeutralJob:
    """Neutral tokens owed for one finished turn.

    The turn's adapted base slots stay with the job, and its pieces are computed in
    place of them: nobody reads them any more, and the pass never waits for room. ::

        [0, start)          neutral, in the tree, locked by the job
        [start, done)       published by earlier pieces or by other jobs
        [done, ahead)       computed beside others' steps, to be published
        [ahead, end)        owed; base slots from `done` on are held by the job

    Attributes:
        key: The tokens ``[0, end)`` with their namespace.
        team: Whose LR rows the pass writes.
        feeder: Content of the adapter whose turn it was.
        active_key: Its slice key, left out by the pass; None if it needs no rows.
        rows: Its rows from the adapted pass, from `start` on.
        team_rows: Rows of the rest of the team from the adapted pass, by slice key; used
            only if the job is published provisionally.
        base_slots: ``[end - done]`` int64.
        beside: Of the pass beside others' steps; holds its rows over ``[done, ahead)``.
        lock: Holds the published prefix.
        exact: The adapted base slots are what the turn's own role is to read.
        trajectory: The caller's name for what the turn belongs to; None without one.
        created: When the turn ended, on the monotonic clock.
    """

    key: RadixKey
    team: str
    start: int
    end: int
    feeder: str
    active_key: str | None
    rows: OwnedSlots | None
    base_slots: torch.Tensor
    lock: TreeLock | None
    team_rows: dict[str, OwnedSlots] = field(default_factory=dict)
    beside: RequestState | None = None
    exact: bool = False
    trajectory: str | None = None
    done: int = field(init=False)
    ahead: int = field(init=False)
    created: float = field(init=False, default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self.done = self.ahead = self.start

    def matched(self, key: RadixKey) -> int:
        """Length of what `key` has in common with this job; 0 in another namespace."""
        return _matched(self.key, key)

    def blocks(self, key: RadixKey) -> bool:
        """Whether a request with the tokens `key` extends what is not published yet."""
        return self.matched(key) > self.done

    def take(self, count: int) -> torch.Tensor:
        """The next `count` base slots, to be written in place."""
        taken, self.base_slots = self.base_slots[:count], self.base_slots[count:]
        return taken

    def all_rows(self) -> list[OwnedSlots]:
        rows = [] if self.rows is None else [self.rows]
        beside = [] if self.beside is None else self.beside.rows.values()
        return [*rows, *self.team_rows.values(), *beside]


@dataclass(eq=False)
class Rebase:
    """A path of the tree with provisional nodes. Holds nothing: they may be evicted.

    Attributes:
        key: Tokens down to the last provisional node.
        team: Whose LR rows the pass writes.
        done: What lies before is rebased, or was neutral when last looked at.
        slots: That the piece in progress, from `done` on, writes.
        replaces: These are not the tree's own but take the place of those.
    """

    key: RadixKey
    team: str
    done: int = 0
    slots: torch.Tensor | None = None
    replaces: bool = False
    created: float = field(init=False, default_factory=lambda: time.monotonic())
    # It may go over turns of several roles: each node knows its own.
    feeder: ClassVar[str] = ""
    active_key: ClassVar[None] = None

    def take(self, count: int) -> torch.Tensor:
        assert self.slots is not None and self.slots.numel() == count
        return self.slots

    def matched(self, key: RadixKey) -> int:
        return _matched(self.key, key)

    @property
    def age(self) -> float:
        return time.monotonic() - self.created


class Trajectories:
    """The trajectories that callers name, in the order in which they were last heard of.

    No more than a hint: it orders neutral work. A name is one within its namespace only, so
    that a tenant's name says nothing about another's work.
    """

    def __init__(self) -> None:
        self._heard: dict[tuple[str | None, str | None, str], int] = {}
        self._serial = itertools.count(1)

    def note(self, turn: Req | RadixKey, trajectory: str | None) -> None:
        """A turn of `trajectory` has arrived, or has ended."""
        if trajectory is None:
            return
        name = (turn.extra_key, turn.cache_salt, trajectory)
        self._heard.pop(name, None)
        self._heard[name] = next(self._serial)
        if len(self._heard) > _MAX_TRAJECTORIES:
            del self._heard[next(iter(self._heard))]

    def rank(self, job: NeutralJob) -> int:
        """The greater, the later its trajectory was heard of; 0 for one that has no name."""
        if job.trajectory is None:
            return 0
        return self._heard.get((job.key.extra_key, job.key.cache_salt, job.trajectory), 0)


class Backlog:
    """Jobs in the order in which their turns ended, then what is to be rebased."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.jobs: deque[NeutralJob] = deque()
        self.rebases: deque[Rebase] = deque()
        self.trajectories = Trajectories()
        self.made_room = False  # slots that were held have become evictable or free

    def tokens(self) -> int:
        """Neutral tokens owed; what was read provisionally by others is counted apart."""
        return sum(job.end - job.done for job in self.jobs) + self.runtime.tree.owed_tokens

    def blocking(self, key: RadixKey, state: RequestState) -> list[NeutralJob | Rebase]:
        """What a request with the tokens `key` has to wait for, in the order in which to do it."""
        jobs: list[NeutralJob | Rebase] = [job for job in self.jobs if job.blocks(key)]
        if self.runtime.method.own_base:
            position = self.runtime.tree.first_unreadable(key, state)
            if position is not None:
                jobs += (rebase for rebase in self.rebases if rebase.matched(key) > position)
        return jobs

    def held_base_slots(self) -> int:
        return sum(job.base_slots.numel() for job in self.jobs)

    def held_rows(self) -> int:
        return sum(rows.num_slots for job in self.jobs for rows in job.all_rows())

    def add_turn(self, req: Req, state: RequestState, key: RadixKey) -> None:
        """Take over the base slots and own rows that the turn computed."""
        start, end = state.base_len, len(key)
        if end <= start:
            return
        tree = self.runtime.tree
        row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        rows = None
        if state.own_key is not None and state.own_key not in tree.dead_keys:
            rows = state.rows.pop(state.own_key, None)
        team_rows = {
            key: state.rows.pop(key)
            for key in list(state.rows)
            if key != state.own_key and key not in tree.dead_keys
        }
        job = NeutralJob(
            key=key,
            team=state.team,
            start=start,
            end=end,
            feeder=state.feeder,
            active_key=state.own_key,
            rows=rows,
            base_slots=row[start:end].to(torch.int64),
            lock=tree.lock(req.last_node),
            team_rows=team_rows,
            exact=self.runtime.method.own_base and state.exact,
            trajectory=state.trajectory,
        )
        self.trajectories.note(key, state.trajectory)
        self.jobs.append(job)
        # The slots are the job's now: SGLang frees what lies behind this mark.
        req.kv.cache_protected_len = end
        if state.shadow is not None:
            state.shadow.hand_over(job)
        if job in self.jobs and (
            self.runtime.method.own_base
            # It could not go on before its prefix is rebased, and will be rebased with it.
            or (self.runtime.may_publish_provisionally and not self.runnable(job))
        ):
            self.publish_provisionally(job)
        self._trim()

    def _trim(self) -> None:
        """Keep what finished turns hold within bounds; the newest one may stay."""
        limit = int(_LIMIT * self.runtime.tree.token_to_kv_pool_allocator.size)
        while len(self.jobs) > 1 and self.held_base_slots() > limit:
            if self.runtime.may_publish_provisionally:
                self.publish_provisionally(self.jobs[0])
            else:
                self.drop_oldest()

    def oldest_age(self) -> float:
        """Seconds for which the oldest job has been owed, or provisional base been published."""
        created = [job.created for job in self.jobs] + [rebase.created for rebase in self.rebases]
        return time.monotonic() - min(created) if created else 0.0

    def next_span(self, job: NeutralJob, num_tokens: int) -> NeutralSpan:
        """The next tokens of `job`, to ride along in a step; written in place."""
        if job.beside is None:
            job.beside = RequestState(adapter=None, team=job.team, job=job)
            job.beside.written = self.runtime.roles.rows_written(
                None, job.team, leave_out=job.active_key
            )
        tree = self.runtime.tree
        start, offset = job.ahead, job.ahead - job.done
        return NeutralSpan(
            tokens=job.key.token_ids[start : start + num_tokens],
            start=start,
            prefix=torch.cat(
                (tree.path_slots(tree.walk(job.key[: job.done])), job.base_slots[:offset])
            ),
            slots=job.base_slots[offset : offset + num_tokens],
            state=job.beside,
            computed=lambda span: self._computed_beside(job, span),
        )

    def _computed_beside(self, job: NeutralJob, span: NeutralSpan) -> None:
        job.ahead = span.end
        if job.ahead == job.end or job.ahead - job.done >= _PUBLISH_EVERY:
            self.catch_up(job)

    def publish(
        self, job: NeutralJob, start: int, slots: torch.Tensor, rows: dict[str, OwnedSlots]
    ) -> None:
        """Publish neutral base KV of `job` from `start` on; first writer wins.

        Args:
            job: Nothing before its ``done`` is unpublished.
            start: At or after the job's start, and published up to there.
            slots: ``[n]`` int64, the base slots of ``[start, start + n)``; taken over.
            rows: LR rows of the rest of the team over the same tokens; taken over.
        """
        tree = self.runtime.tree
        end = min(start + slots.numel(), job.end)
        key = job.key[:end]
        path = tree.walk(key)
        published = sum(len(node.key) for node in path)
        assert published >= start, "a neutral pass's prefix is locked"
        spare = [slots[: published - start], slots[end - start :]]
        if published < end:
            parent = path[-1] if path else tree.root_node
            fresh = slots[published - start : end - start]
            path.append(tree.append_leaf(parent, key[published:], fresh, job.feeder))
        for name, owned in rows.items():
            tree.give_rows(path, name, owned, end)
            self.runtime.free_rows(owned.slots())
        rows.clear()
        tree.token_to_kv_pool_allocator.free(torch.cat(spare))
        self.catch_up(job)

    def _published(self, job: NeutralJob) -> tuple[list[TreeNode], int]:
        """The path that the tree holds of the job's tokens by now, and its length."""
        path = self.runtime.tree.walk(job.key)
        published = sum(len(node.key) for node in path)
        assert published >= job.done, "a job's prefix is locked"
        return path, published

    def runnable(self, job: NeutralJob) -> bool:
        """Whether what precedes the job is neutral: else it has to be rebased first."""
        assert job.lock is not None
        return self.runtime.tree.is_neutral(job.lock.node)

    def in_order(self) -> list[NeutralJob]:
        """The jobs in the order in which they run when no request waits for one.

        A turn of a trajectory with a name is likely to be extended, and soonest where one was
        heard of last. The others follow, oldest first.
        """
        return sorted(self.jobs, key=self.trajectories.rank, reverse=True)

    # -- provisional ---------------------------------------------------------

    def publish_provisionally(self, job: NeutralJob) -> None:
        """Publish the rest of `job` as its turn computed it, to be rebased later."""
        tree = self.runtime.tree
        self.catch_up(job)
        path, published = self._published(job)
        if job in self.jobs and published < job.end:
            slots = job.take(job.base_slots.numel())
            surplus = slots.numel() - (job.end - published)
            tree.token_to_kv_pool_allocator.free(slots[:surplus])
            parent = path[-1] if path else tree.root_node
            rest = job.key[published:]
            path.append(
                tree.append_leaf(parent, rest, slots[surplus:], job.feeder, True, job.exact)
            )
            if not job.exact:
                self.runtime.stats.provisional += len(rest)
            self.rebases.append(Rebase(job.key, job.team))
            for name, rows in job.team_rows.items():
                self.runtime.free_rows(rows.take_until(published))
                tree.give_rows(path, name, rows, job.end)
            self.catch_up(job)

    def prepare(self, rebase: Rebase, piece: Callable[[int, int], int]) -> int | None:
        """Choose the next piece of `rebase`: from its ``done`` to the position returned.

        `piece` says how many of the tokens from a start to an end to take at once, if any.

        None while it cannot go on, since somebody reads its first provisional node, or if there
        is none left.
        """
        tree = self.runtime.tree
        path = tree.walk(rebase.key)
        while path and not path[-1].provisional:
            path.pop()
        if not path:
            self.rebases.remove(rebase)  # evicted, or rebased by another turn over the same
            return None
        # Below a provisional node there may be neutral ones, of a pass that had its own copy
        # of the prefix. Computing them again, in place, changes nothing.
        first = next(index for index, node in enumerate(path) if node.provisional)
        is_read = tree.readers(path[first]) > 0
        start = sum(len(node.key) for node in path[:first])
        wants_own = path[first].exact
        if wants_own or (is_read and rebase.age > _MAX_READ):
            run = [path[first]]
            for node in path[first + 1 :]:
                if not node.provisional or node.exact != wants_own:
                    break
                run.append(node)
            end = start + piece(start, start + sum(len(node.key) for node in run))
            if end == start:
                return None
            slots = self._slots_for(rebase.key[:end], end - start, wants_own)
            if slots is not None:
                rebase.done, rebase.slots, rebase.replaces = start, slots, True
                return end
        if is_read:
            return None
        end = start + piece(start, sum(len(node.key) for node in path))
        if end == start:
            return None
        rebase.done, rebase.replaces = start, False
        rebase.slots = tree.path_slots(tree.walk(rebase.key[:end]))[start:]
        return end

    def rebase_span(self, rebase: Rebase, end: int) -> NeutralSpan:
        """The prepared piece of `rebase`, to ride along in a step."""
        tree = self.runtime.tree
        state = RequestState(adapter=None, team=rebase.team, job=rebase)
        state.written = self.runtime.roles.rows_written(None, rebase.team, leave_out=None)
        return NeutralSpan(
            tokens=rebase.key.token_ids[rebase.done : end],
            start=rebase.done,
            prefix=tree.path_slots(tree.walk(rebase.key[: rebase.done])),
            slots=rebase.take(end - rebase.done),
            state=state,
            computed=lambda span: self.rebased(rebase, span.end, state.rows),
        )

    def _slots_for(self, key: RadixKey, count: int, wants_own: bool) -> torch.Tensor | None:
        """Fresh base slots for the last `count` tokens of `key`; None where there is no room.

        Cached tokens that nobody has locked make room, like for any new token.
        """
        tree = self.runtime.tree
        if wants_own and not tree.room_for_own(count):
            return None
        allocator = tree.token_to_kv_pool_allocator
        lock = tree.lock(tree.walk(key)[-1])
        tree.evict_leaves(count - allocator.available_size())
        tree.unlock(lock)
        slots: torch.Tensor | None = allocator.alloc(count)
        return slots

    def rebased(self, rebase: Rebase, end: int, rows: dict[str, OwnedSlots]) -> None:
        """The piece ``[rebase.done, end)`` is computed: its base, and `rows`."""
        tree = self.runtime.tree
        assert rebase.slots is not None
        path = tree.walk(rebase.key[:end])
        position = 0
        for node in path:
            first, position = position, position + len(node.key)
            if not node.provisional:
                continue
            # Whoever reads what is replaced goes on reading it. What nobody reads is room that a
            # prompt in chunks may have been promised.
            old = []
            for key in [key for key in node.slices if key != node.feeder]:
                if node.pins.get(key):
                    old.append(tree.take_slice(node, key))
                else:
                    tree.drop_slice(node, key)
            adapted = node.value
            if rebase.replaces:
                node.value = rebase.slots[first - rebase.done : position - rebase.done].clone()
            tree.make_neutral(node)
            nothing = adapted[:0]
            if rebase.replaces and node.exact:
                tree.keep_own(node, adapted)
            replaced = adapted if rebase.replaces and not node.exact else nothing
            tree.retire(node, replaced, torch.cat([nothing, *old]))
        for key, owned in rows.items():
            # A role reads rows of its own turn from that turn or from a replay, never from here.
            tree.give_rows(path, key, owned, end, fits=_fed_by_others(key))
            self.runtime.free_rows(owned.slots())
        rows.clear()
        self.runtime.stats.rebased += end - rebase.done
        rebase.done, rebase.slots = end, None
        if end == len(rebase.key):
            self.rebases.remove(rebase)

    # -- accounts ------------------------------------------------------------

    def catch_up(self, job: NeutralJob) -> None:
        """Publish what is computed of the job; account for what others have published of it."""
        if job.ahead > job.done:
            assert job.beside is not None
            slots, rows = job.take(job.ahead - job.done), job.beside.rows
            job.ahead, job.beside = job.done, None
            self.publish(job, job.done, slots, rows)
            return
        tree = self.runtime.tree
        path, published = self._published(job)
        self.made_room |= published > job.done
        if job.rows is not None and job.active_key is not None:
            tree.give_rows(path, job.active_key, job.rows, published)
        surplus = job.base_slots.numel() - (job.end - published)
        if surplus > 0:
            slots = job.take(surplus)
            if job.exact:
                tree.give_own(path, job.feeder, slots, start=published - surplus)
            else:
                tree.token_to_kv_pool_allocator.free(slots)
        job.done = job.ahead = published
        if path:
            lock = tree.lock(path[-1])
            tree.unlock(job.lock)
            job.lock = lock
        if job.done == job.end:
            self._close(job)

    def purge(self, key: str) -> None:
        """An adapter was unloaded: its rows are of no use."""
        for job in self.jobs:
            for held in (job.team_rows, {} if job.beside is None else job.beside.rows):
                if (rows := held.pop(key, None)) is not None:
                    self.runtime.free_rows(rows.slots())
            if job.beside is not None and key in job.beside.written:
                job.beside.written.remove(key)  # loaded again, its rows would follow a gap
            if job.active_key == key and job.rows is not None:
                self.runtime.free_rows(job.rows.slots())
                job.rows = None

    def drop_rows(self) -> bool:
        """Free the rows of the oldest job that holds some; their roles will replay its turn."""
        for job in self.jobs:
            held = job.all_rows()
            if not any(rows.num_slots for rows in held):
                continue
            for rows in held:
                self.runtime.stats.dropped_rows += rows.num_slots
                self.runtime.free_rows(rows.slots())
            job.rows, job.team_rows = None, {}
            if job.beside is not None:
                job.beside.rows, job.beside.written = {}, []
            return True
        return False

    def drop_oldest(self) -> int | None:
        """Give up the oldest job; its span stays unpublished. Base slots freed, or None."""
        if not self.jobs:
            return None
        job = self.jobs[0]
        freed = job.base_slots.numel()
        self.runtime.stats.dropped_neutral += job.end - job.done
        self.runtime.tree.token_to_kv_pool_allocator.free(job.base_slots)
        self._close(job)
        return freed

    def clear(self) -> None:
        self.rebases.clear()
        while self.jobs:
            self.drop_oldest()

    def forget(self) -> None:
        """The pools are being reset: nothing to free one by one."""
        self.jobs.clear()
        self.rebases.clear()

    def _close(self, job: NeutralJob) -> None:
        for rows in job.all_rows():
            self.runtime.free_rows(rows.slots())
        self.runtime.tree.unlock(job.lock)
        self.jobs.remove(job)
        self.made_room = True


def _matched(mine: RadixKey, key: RadixKey) -> int:
    if (key.extra_key, key.cache_salt) != (mine.extra_key, mine.cache_salt):
        return 0
    return int(mine.match(key))


def _fed_by_others(key: str) -> Callable[[TreeNode], bool]:
    return lambda node: node.feeder != key
