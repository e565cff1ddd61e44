"""Decides which step of the scheduler computes neutral tokens, and how many.

What is owed for finished turns (the backlog) runs piece by piece, each piece an internal
request of at most one prefill chunk: before a request that extends the job's trajectory,
otherwise when the engine has nothing else to do, trajectories that callers name first
(`Backlog.in_order`). Under schedules that say so, neutral
tokens also ride along in the steps of users' requests (`precache_sglang.shadow`).
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from precache_sglang.backlog import NeutralJob, Rebase
from precache_sglang.request import RequestState, state_of
from precache_sglang.shadow import NeutralSpan, Shadow, num_user_tokens
from precache_sglang.step_cost import Load, StepCost

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.scheduler import Scheduler

    from precache_sglang.runtime import Runtime

# Tokens of a neutral step, if so many are owed.
_LEAST_PIECE = 32
# Without chunked prefill there is no chunk to bound a piece by.
_PIECE_WITHOUT_CHUNKING = 4096
# Seconds after which what is owed gets steps of its own, however many users there are, and
# the share of the time that these steps may take.
_MAX_AGE = 20.0
_AGED_SHARE = 0.03
# By how much neutral spans may lengthen users' steps, on the whole. Where decoding waits for
# memory, tokens beside it cost next to nothing, and this is many of them.
_STEP_SHARE = 0.03
# Seconds for which an idle engine waits for a request before it starts a neutral step that the
# request would have to wait for: an agent's next turn follows at once.
_LINGER = 0.03


class NeutralScheduler:
    """Decides in front of SGLang's scheduler whether a step goes to a neutral pass."""

    def __init__(self, scheduler: Scheduler, runtime: Runtime) -> None:
        self.scheduler = scheduler
        self.runtime = runtime
        self.backlog = runtime.backlog
        self._serial = itertools.count()
        self._batch: ScheduleBatch | None = None  # the neutral batch of the last step
        self._under_pressure = False
        self.cost = StepCost()
        # Start, load, and whether it decodes, of the step that runs.
        self._step: tuple[float, Load, bool] | None = None
        self._credit = 0.0  # seconds for which spans may lengthen steps
        self._last_user_step = 0.0  # when the last step for users ended
        self._aged_after = 0.0  # when the next step for what is aged may start

    def next_batch(
        self,
        original: Callable[..., NextBatchPlan],
        running_batch: ScheduleBatch,
        last_batch: ScheduleBatch | None,
    ) -> NextBatchPlan:
        """One scheduling decision; `original` is SGLang's."""
        self._note_step()
        plan = self._next_batch(original, running_batch, last_batch)
        batch = plan.batch_to_run
        if batch is None:
            return plan
        spans: list[NeutralSpan] = []
        if batch is not self._batch:
            spans = list(self._neutral_spans(batch, plan.running_batch))
            self.runtime.add_neutral_spans(batch, spans)
        positions = [*_positions(batch), *((span.start, span.end) for span in spans)]
        decodes = not batch.forward_mode.is_extend()
        self._step = (time.monotonic(), Load.of(positions), decodes)
        return plan

    def _note_step(self) -> None:
        """The step that was decided last is over: learn what it cost."""
        if self._step is None:
            return
        now = time.monotonic()
        start, load, decodes = self._step
        self._step = None
        self.cost.observe(load, now - start, decodes)
        if self._batch is None:
            self._last_user_step = now

    def _next_batch(
        self,
        original: Callable[..., NextBatchPlan],
        running_batch: ScheduleBatch,
        last_batch: ScheduleBatch | None,
    ) -> NextBatchPlan:
        """Whose step it is.

        Requests that wait for a neutral pass are taken out of the queue that SGLang
        sees. Neutral steps and steps of other users alternate, so that neither waits
        for more than one bounded step of the other.
        """
        scheduler = self.scheduler
        after_neutral = last_batch is not None and last_batch is self._batch
        self._batch = None
        if after_neutral:
            last_batch = None
        if self.backlog.made_room:
            # SGLang would look at its queue again only once a running request has left.
            self.backlog.made_room = running_batch.batch_is_full = False
        if not self.backlog.jobs and not self.backlog.rebases:
            self._under_pressure = False
            return original(scheduler, running_batch=running_batch, last_batch=last_batch)

        self._admit_ready_grammars()
        held, wanted = self._held_requests()
        others = (
            not running_batch.is_empty()
            or (last_batch is not None and not last_batch.is_empty())
            or scheduler.chunked_req is not None
            or len(held) < len(scheduler.waiting_queue)
        )
        now = time.monotonic()
        aged = self.backlog.oldest_age() > _MAX_AGE and now >= self._aged_after
        if (wanted or self._under_pressure or aged) and not (after_neutral and others):
            running_batch, last_batch = self._merged(running_batch, last_batch), None
            if aged and not wanted:
                batch = self._build_oldest()
                self._aged_after = now + self._pause_after(batch)
            else:
                first = [] if wanted is None else [wanted]
                batch = self._build_first([*first, *self.backlog.in_order()])
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
        if plan.batch_to_run is None and not self._request_arrives():
            batch = self._build_any()
            if batch is not None:
                return _plan(batch, plan.running_batch)
        return plan

    def _pause_after(self, batch: ScheduleBatch | None) -> float:
        """Seconds until what is aged may take a step again; a while if nothing could go on."""
        seconds = self.cost.seconds(Load.of([] if batch is None else _positions(batch)))
        return seconds / _AGED_SHARE

    def _request_arrives(self) -> bool:
        """Whether a request comes right after the last step for users.

        Where a turn waits for its neutral pass anyway, there is nothing to be gained.
        """
        left = _LINGER - (time.monotonic() - self._last_user_step)
        if left <= 0 or not self.runtime.may_publish_provisionally:
            return False
        sleeper = self.scheduler.idle_sleeper
        if isinstance(sleeper, IdleSleeper):
            return bool(sleeper.poller.poll(left * 1e3))
        return True  # SGLang asks again at once

    # -- beside users' requests ------------------------------------------------

    def _neutral_spans(
        self, batch: ScheduleBatch, running_batch: ScheduleBatch
    ) -> Iterator[NeutralSpan]:
        """Neutral tokens that join the step of `batch`, as the schedule has it."""
        schedule = self.runtime.schedule
        if schedule is None or not schedule.beside or not batch.reqs:
            return
        if schedule.lockstep:
            yield from self._lockstep_spans(batch)
        else:
            yield from self._leftover_spans(batch, running_batch)

    def _lockstep_spans(self, batch: ScheduleBatch) -> Iterator[NeutralSpan]:
        """The tokens that every turn of `batch` feeds in this step."""
        wanted = []
        # Turns that are behind, since their slots were taken from them, catch up in bounds.
        budget = max(self._piece(), num_user_tokens(batch))
        for shadow, end in self._shadows(batch.reqs, batch):
            count = min(end - shadow.done, budget)
            if count > 0:
                wanted.append((shadow, count))
                budget -= count
        missing = sum(count for _, count in wanted) - self._free_slots()
        if missing > 0:
            missing -= self.runtime.tree.evict_own(missing)
            self.runtime.tree.evict_leaves(missing)
        for shadow, count in wanted:
            slots = self._take_slots(count)
            if slots is not None:  # else these tokens are owed when the turn ends
                yield shadow.next_span(count, slots)

    def _leftover_spans(
        self, batch: ScheduleBatch, running_batch: ScheduleBatch
    ) -> Iterator[NeutralSpan]:
        """What the step has time for: the backlog in its order, then running turns, oldest first.

        A span reads its whole context, as a user's row does, however few tokens it brings.
        So it waits until it is worth it: until the time that steps leave over, which adds up,
        is enough for many tokens, or for the last ones of a turn.
        """
        step = self.cost.seconds(Load.of(_positions(batch)))
        self._credit += _STEP_SHARE * step
        if batch.forward_mode.is_extend():
            return  # somebody waits for a first token
        # As much as a span over a running turn's context takes that is just worth it.
        self._credit = min(self._credit, 2 * step)
        room = self._piece() - num_user_tokens(batch)
        jobs = self.backlog.in_order()
        for index, job in enumerate(jobs):
            if job.ahead == job.done:
                self.backlog.catch_up(job)
            if job not in self.backlog.jobs or not self.backlog.runnable(job):
                continue
            before = (other for other in jobs[:index] if other in self.backlog.jobs)
            if any(other.matched(job.key) > job.ahead for other in before):
                continue  # what that one publishes need not be computed again
            count = self._affordable(job.ahead, job.end, room, is_last=True)
            if count:
                room -= count
                self._pay(job.ahead, count)
                yield self.backlog.next_span(job, count)
        if self.runtime.method.own_base:  # turns that ended are nodes, not jobs
            span = self._rebase_span(room)
            if span is not None:
                room -= len(span.tokens)
                yield span
        reqs = batch.reqs if batch is running_batch else [*running_batch.reqs, *batch.reqs]
        for shadow, end in self._shadows(reqs, batch):
            is_last = shadow.req in batch.reqs and _ends_with_this_step(shadow.req)
            count = self._affordable(shadow.done, end, room, is_last)
            slots = self._take_slots(count) if count else None
            if slots is not None:
                room -= count
                self._pay(shadow.done, count)
                yield shadow.next_span(count, slots)

    def _rebase_span(self, room: int) -> NeutralSpan | None:
        """What there is credit for of the oldest finished turn that can go on."""
        for rebase in list(self.backlog.rebases):
            end = self.backlog.prepare(
                rebase, lambda start, end: self._affordable(start, end, room, is_last=True)
            )
            if end is not None:
                self._pay(rebase.done, end - rebase.done)
                return self.backlog.rebase_span(rebase, end)
        return None

    def _affordable(self, start: int, end: int, room: int, is_last: bool) -> int:
        """Tokens from `start` on that there is credit for; 0 if it is not worth it."""
        count = self.cost.longest(start, min(end, start + room), self._credit)
        load = Load.of([(start, start + count)])
        is_worth = self.cost.is_worth(load) or (is_last and start + count == end)
        return count if count > 0 and is_worth else 0

    def _pay(self, start: int, count: int) -> None:
        self._credit -= self.cost.added(Load.of([(start, start + count)]))

    def _shadows(self, reqs: list[Req], batch: ScheduleBatch) -> Iterator[tuple[Shadow, int]]:
        """Shadows of running turns, and how far each turn has fed by the end of this step.

        A turn whose tokens an earlier pass is computing lets it: what that one publishes
        need not be computed again.
        """
        extending = batch.reqs if batch.forward_mode.is_extend() else []
        in_batch = {id(req) for req in extending}
        ends = {
            id(req): req.extend_end if id(req) in in_batch else req.kv.kv_committed_len
            for req in reqs
        }
        for req in reqs:
            state = state_of(req)
            if (
                state.shadow is None
                and not state.gave_way
                and state.adapter is not None
                and not req.finished()
                and self.runtime.tree.is_neutral(req.last_node)
            ):
                Shadow(self.runtime, req)
        for shadow in list(self.runtime.shadows):
            end = ends.get(id(shadow.req))
            if end is None or shadow.req.finished():
                continue
            shadow.follow(end)
            if shadow.done < end and not self._computed_elsewhere(shadow, end):
                yield shadow, end

    def _computed_elsewhere(self, shadow: Shadow, end: int) -> bool:
        if shadow.num_slots:
            return False
        tokens = shadow.tokens(0, end)
        key = _key_of(shadow.req, tokens)
        if any(job.blocks(key) for job in self.backlog.jobs):
            return True
        for other in self.runtime.shadows:
            if other is shadow:
                return False
            if other.covers(shadow.req, tokens, shadow.first):
                return True
        return False

    def _piece(self) -> int:
        return self.scheduler.chunked_prefill_size or _PIECE_WITHOUT_CHUNKING

    def _own_piece(self, start: int, end: int) -> int:
        """Tokens from `start` on of a neutral step, which whoever arrives has to wait for."""
        end = min(end, start + self._piece())
        if not self.runtime.may_publish_provisionally:
            return end - start
        wait = self.runtime.settings.max_neutral_wait_ms * 1e-3
        # Less than the constant part, or than what reading the context takes, would be a waste.
        least = max(self.cost.fixed, 2 * self.cost.added(Load(context=start)))
        count = self.cost.longest(start, end, max(wait - self.cost.fixed, least))
        return max(count, min(_LEAST_PIECE, end - start))

    def _free_slots(self) -> int:
        return int(self.scheduler.token_to_kv_pool_allocator.available_size())

    def _take_slots(self, count: int) -> torch.Tensor | None:
        slots: torch.Tensor | None = self.scheduler.token_to_kv_pool_allocator.alloc(count)
        return slots

    # -- steps of their own ----------------------------------------------------

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

    def _held_requests(self) -> tuple[list[Req], NeutralJob | Rebase | None]:
        """Waiting requests that extend the backlog, and the job the first one needs first."""
        keys = [(req, _key_of(req, _tokens_of(req))) for req in self.scheduler.waiting_queue]
        for req, key in keys:
            for held in [job for job in self.backlog.jobs if job.blocks(key)]:
                self.backlog.catch_up(held)
            blocking = self.backlog.blocking(key, state_of(req))
            if blocking and self._loses_patience(req, key, blocking):
                state_of(req).impatient = True
                for job in blocking:
                    if isinstance(job, NeutralJob):
                        self.backlog.publish_provisionally(job)
        # Only now: what one request could not wait for, those before it need not wait for.
        waits = [
            (req, blocking)
            for req, key in keys
            if (blocking := self.backlog.blocking(key, state_of(req)))
        ]
        return [req for req, _ in waits], waits[0][1][0] if waits else None

    def _loses_patience(self, req: Req, key: RadixKey, jobs: Sequence[NeutralJob | Rebase]) -> bool:
        """Whether `req` is to go on without the neutral passes of `jobs`.

        It does not start to wait if the wait would be too long by what steps have cost.
        """
        if not self.runtime.may_publish_provisionally:
            return False
        if isinstance(jobs[0], NeutralJob) and not self.backlog.runnable(jobs[0]):
            return True  # what has to be rebased first may be read for as long as others like
        state = state_of(req)
        now = time.monotonic()
        if state.held_since is None:
            state.held_since = now
        # Jobs over the same tokens publish for each other.
        owed = (min(job.done for job in jobs), max(job.matched(key) for job in jobs))
        wait = now - state.held_since + self.cost.seconds(Load.of([owed]))
        return wait >= self.runtime.settings.max_neutral_wait_ms * 1e-3

    def _build_any(self) -> ScheduleBatch | None:
        """A piece of whatever can go on: of the backlog, or of what is to be rebased."""
        return self._build_first([*self.backlog.in_order(), *self.backlog.rebases])

    def _build_oldest(self) -> ScheduleBatch | None:
        """A piece of what has been owed, or been provisional, for longest and can go on."""
        owed: list[NeutralJob | Rebase] = [*self.backlog.jobs, *self.backlog.rebases]
        return self._build_first(sorted(owed, key=lambda work: work.created))

    def _build_first(self, owed: Sequence[NeutralJob | Rebase]) -> ScheduleBatch | None:
        """The next piece of the first of `owed` that can go on; None without a free row."""
        if self.scheduler.req_to_token_pool.available_size() == 0:
            return None  # before anything is taken for the piece
        for work in owed:
            if isinstance(work, Rebase):
                end = self.backlog.prepare(work, self._own_piece)
                if end is not None:
                    return self._batch_of(work, end)
            elif work in self.backlog.jobs:
                self.backlog.catch_up(work)  # others may have published all of it
                if work in self.backlog.jobs and self.backlog.runnable(work):
                    return self._batch_of(work, work.done + self._own_piece(work.done, work.end))
        return None

    def _batch_of(self, job: NeutralJob | Rebase, end: int) -> ScheduleBatch:
        """A batch of one internal request that computes the neutral tokens up to `end`."""
        scheduler = self.scheduler
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
        if isinstance(job, Rebase):
            self.backlog.rebased(job, req.extend_end, state_of(req).rows)
            req.kv.cache_protected_len = req.extend_end  # the tree's own slots, in place
            release_kv_cache(req, self.runtime.tree, checkpoint=False)
        else:
            release_kv_cache(req, self.runtime.tree, checkpoint=True)
            self.backlog.catch_up(job)
        batch.reqs = []
        return True


def _tokens_of(req: Req) -> array[int]:
    tokens: array[int] = req.origin_input_ids
    return tokens + req.output_ids if req.output_ids else tokens


def _key_of(req: Req, tokens: array[int]) -> RadixKey:
    return RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)


def _positions(batch: ScheduleBatch) -> list[tuple[int, int]]:
    """``(start, end)`` of the tokens that each request of `batch` feeds in this step."""
    if batch.forward_mode.is_extend():
        return [(req.prefix_len, req.extend_end) for req in batch.reqs]
    return [(req.kv.kv_committed_len - 1, req.kv.kv_committed_len) for req in batch.reqs]


def _ends_with_this_step(req: Req) -> bool:
    """Whether the token that `req` samples now is its last by its length; else nobody knows."""
    limit = req.sampling_params.max_new_tokens
    return limit is not None and len(req.output_ids) + 1 >= limit


def _plan(batch: ScheduleBatch, running_batch: ScheduleBatch) -> NextBatchPlan:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)
