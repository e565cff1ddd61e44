"""Neutral passes: adapter-free forwards that publish base KV (schedule lp).

When an adapted turn ends, its span becomes a `NeutralJob` in the `Backlog`. The
`NeutralScheduler` runs jobs piece by piece, each piece an internal request of at most
one prefill chunk: before a request that extends the job's trajectory, otherwise when
the engine has nothing else to do. A piece publishes what it covers as it ends.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import TreeLock
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from precache_sglang.request import OwnedRows, RequestState, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.scheduler import Scheduler

    from precache_sglang.runtime import Runtime

logger = logging.getLogger(__name__)

# Without chunked prefill there is no chunk to bound a piece by.
_PIECE_WITHOUT_CHUNKING = 4096


@dataclass(eq=False)
class NeutralJob:
    """Neutral tokens owed for one finished turn.

    The turn's adapted base slots stay with the job, and its pieces are computed in
    place of them: nobody reads them any more, and the pass never waits for room. ::

        [0, start)          neutral, in the tree, locked by the job
        [start, done)       published by earlier pieces or by other jobs
        [done, end)         owed; base slots held by the job

    Attributes:
        key: The tokens ``[0, end)`` with their namespace.
        team: Whose LR rows the pass writes.
        feeder: Content of the adapter whose turn it was.
        active_key: Its slice key, left out by the pass; None if it needs no rows.
        rows: Its rows from the adapted pass, from `start` on.
        base_slots: ``[end - done]`` int64.
        lock: Holds the published prefix.
    """

    key: RadixKey
    team: str
    start: int
    end: int
    feeder: str
    active_key: str | None
    rows: OwnedRows | None
    base_slots: torch.Tensor
    lock: TreeLock | None
    done: int = field(init=False)

    def __post_init__(self) -> None:
        self.done = self.start

    def blocks(self, req: Req, tokens: array[int]) -> bool:
        """Whether `req` extends tokens that this job has not published yet."""
        if req.extra_key != self.key.extra_key or req.cache_salt != self.key.cache_salt:
            return False
        request_key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        return self.key.match(request_key) > self.done


class Backlog:
    """Jobs in the order in which their turns ended."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.jobs: deque[NeutralJob] = deque()

    def tokens(self) -> int:
        return sum(job.end - job.done for job in self.jobs)

    def held_base_slots(self) -> int:
        return sum(job.base_slots.numel() for job in self.jobs)

    def held_rows(self) -> int:
        return sum(job.rows.num_slots for job in self.jobs if job.rows is not None)

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
        self.jobs.append(
            NeutralJob(
                key=key,
                team=state.team,
                start=start,
                end=end,
                feeder=state.feeder,
                active_key=state.own_key,
                rows=rows,
                base_slots=row[start:end].to(torch.int64),
                lock=tree.lock(req.last_node),
            )
        )
        # The slots are the job's now: SGLang frees what lies behind this mark.
        req.kv.cache_protected_len = end

    def catch_up(self, job: NeutralJob) -> None:
        """Account for what the tree has by now over the job's tokens."""
        tree = self.runtime.tree
        path = tree.walk(job.key)
        published = sum(len(node.key) for node in path)
        assert published >= job.done, "a job's prefix is locked"
        if job.rows is not None and job.active_key is not None:
            tree.give_rows(path, job.active_key, job.rows, published)
        surplus = job.base_slots.numel() - (job.end - published)
        if surplus > 0:
            tree.token_to_kv_pool_allocator.free(job.base_slots[:surplus])
            job.base_slots = job.base_slots[surplus:]
        job.done = published
        if path:
            lock = tree.lock(path[-1])
            tree.unlock(job.lock)
            job.lock = lock
        if job.done == job.end:
            self._close(job)

    def purge(self, key: str) -> None:
        """An adapter was unloaded: its rows are of no use."""
        for job in self.jobs:
            if job.active_key == key and job.rows is not None:
                self.runtime.free_rows(job.rows.slots())
                job.rows = None

    def drop_rows(self) -> bool:
        """Free the rows of the oldest job that holds some; its role will replay its turn."""
        for job in self.jobs:
            if job.rows is not None and job.rows.num_slots:
                self.runtime.stats.dropped_rows += job.rows.num_slots
                self.runtime.free_rows(job.rows.slots())
                job.rows = None
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
        while self.jobs:
            self.drop_oldest()

    def forget(self) -> None:
        """The pools are being reset: nothing to free one by one."""
        self.jobs.clear()

    def _close(self, job: NeutralJob) -> None:
        if job.rows is not None:
            self.runtime.free_rows(job.rows.slots())
        self.runtime.tree.unlock(job.lock)
        self.jobs.remove(job)


class NeutralScheduler:
    """Decides in front of SGLang's scheduler whether a step goes to a neutral pass."""

    def __init__(self, scheduler: Scheduler, runtime: Runtime) -> None:
        self.scheduler = scheduler
        self.runtime = runtime
        self.backlog = runtime.backlog
        self._serial = itertools.count()
        self._batch: ScheduleBatch | None = None  # the neutral batch of the last step
        self._under_pressure = False

    def next_batch(
        self,
        original: Callable[..., NextBatchPlan],
        running_batch: ScheduleBatch,
        last_batch: ScheduleBatch | None,
    ) -> NextBatchPlan:
        """One scheduling decision; `original` is SGLang's.

        Requests that wait for a neutral pass are taken out of the queue that SGLang
        sees. Neutral steps and steps of other users alternate, so that neither waits
        for more than one bounded step of the other.
        """
        scheduler = self.scheduler
        after_neutral = last_batch is not None and last_batch is self._batch
        if after_neutral:
            last_batch = self._batch = None
        if not self.backlog.jobs:
            return original(scheduler, running_batch=running_batch, last_batch=last_batch)

        self._admit_ready_grammars()
        held, wanted = self._held_requests()
        others = (
            not running_batch.is_empty()
            or (last_batch is not None and not last_batch.is_empty())
            or scheduler.chunked_req is not None
            or len(held) < len(scheduler.waiting_queue)
        )
        urgent = wanted or (self.backlog.jobs[0] if self._under_pressure else None)
        if urgent is not None and not (after_neutral and others):
            running_batch, last_batch = self._merged(running_batch, last_batch), None
            batch = self._build(urgent)
            if batch is not None:
                return _plan(batch, running_batch)

        queue = scheduler.waiting_queue
        scheduler.waiting_queue = [req for req in queue if req not in held]
        try:
            plan = original(scheduler, running_batch=running_batch, last_batch=last_batch)
        finally:
            left = scheduler.waiting_queue
            still = set(map(id, left))
            scheduler.waiting_queue = [req for req in queue if req in held or id(req) in still] + [
                req for req in left if req not in queue
            ]
        # Something waits, and not for a neutral pass: the slots that the backlog holds
        # may be what it waits for. A finished pass turns them into evictable nodes.
        self._under_pressure = len(scheduler.waiting_queue) > len(held)
        if plan.batch_to_run is None and self.backlog.jobs:
            batch = self._build(self.backlog.jobs[0])
            if batch is not None:
                return _plan(batch, plan.running_batch)
        return plan

    def _merged(
        self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None
    ) -> ScheduleBatch:
        """The running batch with the requests of SGLang's last prefill step.

        This is how SGLang's own next step begins. Done ahead of a neutral step, which
        takes the place of the last batch: an abort or a flush that arrives meanwhile looks
        for requests in these two batches.
        """
        if last_batch is None or not last_batch.forward_mode.is_extend():
            return running_batch
        size = last_batch.batch_size()
        chunked = (self.scheduler.chunked_req, last_batch.chunked_req)
        last_batch.filter_batch(reqs_to_exclude=[req for req in chunked if req is not None])
        if last_batch.batch_size() < size:
            running_batch.batch_is_full = False
        if last_batch.is_empty() or last_batch is running_batch:
            return running_batch
        if running_batch.is_empty():
            return last_batch
        running_batch.merge_batch(last_batch)
        return running_batch

    def _admit_ready_grammars(self) -> None:
        # SGLang does this inside its own step, after we have sorted out who waits.
        grammars = self.scheduler.grammar_manager
        if grammars.has_waiting_grammars():
            for req in grammars.get_ready_grammar_requests():
                self.scheduler._add_request_to_queue(req)

    def _held_requests(self) -> tuple[list[Req], NeutralJob | None]:
        """Waiting requests that extend the backlog, and the job the first one needs first."""
        held: list[Req] = []
        wanted: NeutralJob | None = None
        for req in self.scheduler.waiting_queue:
            tokens = req.origin_input_ids + req.output_ids
            job = next((job for job in self.backlog.jobs if job.blocks(req, tokens)), None)
            if job is not None:
                held.append(req)
                wanted = wanted or job
        return held, wanted

    def _build(self, job: NeutralJob) -> ScheduleBatch | None:
        """The next piece of `job` as a batch of its own, or None if no row is free."""
        scheduler = self.scheduler
        if scheduler.req_to_token_pool.available_size() == 0:
            return None
        self.backlog.catch_up(job)
        if job not in self.backlog.jobs:  # others had published all of it
            return self._build(self.backlog.jobs[0]) if self.backlog.jobs else None
        piece = scheduler.chunked_prefill_size or _PIECE_WITHOUT_CHUNKING
        end = min(job.done + piece, job.end)
        req = Req(
            f"precache-neutral-{next(self._serial)}",
            "",
            job.key.token_ids[:end],
            SamplingParams(max_new_tokens=0, temperature=0.0),
            lora_id=None,
            extra_key=job.key.extra_key,
            cache_salt=job.key.cache_salt,
            vocab_size=scheduler.model_config.vocab_size,
        )
        req.sampling_params.normalize(None)
        req.precache = RequestState(adapter=None, team=job.team, job=job)
        req.init_next_round_input(self.runtime.tree)
        req.extend_end = end
        req.lock = self.runtime.tree.lock(req.last_node)
        batch = ScheduleBatch.init_new(
            [req],
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            self.runtime.tree,
            scheduler.model_config,
            scheduler.enable_overlap,
            scheduler.spec_algorithm,
        )
        batch.prepare_for_extend()
        self._batch = batch
        return batch

    def finish(self, batch: ScheduleBatch) -> bool:
        """Publish a neutral batch's piece. False if `batch` is not a neutral batch.

        Nothing of it goes to the output, to usage or to the logs of requests.
        """
        if self._batch is None or batch is not self._batch:
            return False
        (req,) = batch.reqs
        job = state_of(req).job
        assert job is not None
        stats = self.runtime.stats
        stats.neutral += req.extend_end - req.prefix_len
        stats.neutral_steps += 1
        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.runtime.tree, checkpoint=True)
        batch.reqs = []
        self.backlog.catch_up(job)
        return True


def take_base_slots(job: NeutralJob, count: int) -> torch.Tensor:
    """The next `count` of the job's base slots, to be written in place."""
    taken, job.base_slots = job.base_slots[:count], job.base_slots[count:]
    return taken


def _plan(batch: ScheduleBatch, running_batch: ScheduleBatch) -> NextBatchPlan:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
