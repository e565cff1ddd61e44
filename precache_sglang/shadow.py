"""Neutral tokens that ride along in the steps of users' requests.

A `NeutralSpan` stands behind the users' tokens of one forward. SGLang knows
nothing of it: it has no request, no row in the batch, no logits; it costs its tokens. The
attention backend gives it its own slots to read and write, and whoever sent it (a `Shadow`
or the backlog) takes over what it computed.

A `Shadow` is the neutral pass of a turn that still runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import TreeLock
from sglang.srt.mem_cache.radix_cache import RadixKey

from precache_sglang.request import OwnedSlots, RequestState, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from precache_sglang.backlog import NeutralJob
    from precache_sglang.runtime import Runtime


@dataclass(eq=False)
class NeutralSpan:
    """Neutral tokens ``[start, start + n)`` of one trajectory in one forward.

    Attributes:
        tokens: ``n`` token ids.
        prefix: ``[start]`` int64 slots of the neutral base KV before them.
        slots: ``[n]`` int64 slots that their base KV is written to.
        state: Of an adapter-free pass; collects the LR rows that the forward writes.
        computed: Called with the span after the forward.
    """

    tokens: Sequence[int]
    start: int
    prefix: torch.Tensor
    slots: torch.Tensor
    state: RequestState
    computed: Callable[[NeutralSpan], None]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def num_user_tokens(batch: ScheduleBatch) -> int:
    """Tokens that SGLang knows of in the step of `batch`; its ``input_ids`` may come later."""
    if batch.forward_mode.is_extend():
        return int(batch.extend_num_tokens)
    return len(batch.reqs)


class Shadow:
    """The neutral pass beside one running turn.

    The turn's own base slots are being read, so the pass has slots of its own. They are
    published when the turn ends, together with the rows that the turn wrote. ::

        [0, first)      neutral, in the tree, locked by the shadow
        [first, done)   computed; base slots and the rest of the team's rows held here

    Without computed tokens, `first` moves on with what others publish meanwhile.
    """

    def __init__(self, runtime: Runtime, req: Req) -> None:
        state = state_of(req)
        self.runtime = runtime
        self.req = req
        self.state = RequestState(adapter=None, team=state.team)
        self.state.written = runtime.roles.rows_written(None, state.team, leave_out=state.own_key)
        self.prefix = torch.empty(0, dtype=torch.int64, device=runtime.device)
        self.lock: TreeLock | None = None
        self.owned = OwnedSlots(start=0)  # base slots of ``[first, done)``
        state.shadow = self
        runtime.shadows.append(self)

    @property
    def first(self) -> int:
        return self.prefix.numel()

    @property
    def num_slots(self) -> int:
        return self.owned.num_slots

    @property
    def done(self) -> int:
        return self.owned.end

    def tokens(self, start: int, end: int) -> array[int]:
        """Tokens ``[start, end)`` of the turn so far."""
        prompt = self.req.origin_input_ids
        known: array[int] = prompt[start:end]
        if end > len(prompt):
            known = known + self.req.output_ids[max(0, start - len(prompt)) : end - len(prompt)]
        return known

    def covers(self, req: Req, tokens: array[int], start: int) -> bool:
        """Whether this pass holds or will hold neutral base KV of `tokens` beyond `start`."""
        if (req.extra_key, req.cache_salt) != (self.req.extra_key, self.req.cache_salt):
            return False
        end = min(len(tokens), len(self.req.origin_input_ids) + len(self.req.output_ids))
        return end > start and self.tokens(0, start + 1) == tokens[: start + 1]

    def follow(self, end: int) -> None:
        """Start behind what the tree holds of ``[0, end)`` by now, if nothing is computed yet."""
        if self.num_slots:
            return
        tree = self.runtime.tree
        key = RadixKey(self.tokens(0, end), self.req.extra_key, cache_salt=self.req.cache_salt)
        published = tree.neutral_len(key)
        if published <= self.first and self.lock is not None:
            return
        path = tree.walk(key[:published]) if published else []
        self.prefix = tree.path_slots(path)
        self.owned.start = published
        lock = tree.lock(path[-1] if path else tree.root_node)
        if self.lock is not None:
            tree.unlock(self.lock)
        self.lock = lock

    def next_span(self, num_tokens: int, slots: torch.Tensor) -> NeutralSpan:
        start = self.done
        return NeutralSpan(
            tokens=self.tokens(start, start + num_tokens),
            start=start,
            prefix=torch.cat([self.prefix, *self.owned.parts]),
            slots=slots,
            state=self.state,
            computed=self._computed,
        )

    def _computed(self, span: NeutralSpan) -> None:
        self.owned.append(span.slots)

    def hand_over(self, job: NeutralJob) -> None:
        """The turn ended as `job`: publish what is computed of it."""
        if self.num_slots:
            slots = self.owned.take_until(self.done)
            self.runtime.backlog.publish(job, self.first, slots, self.state.rows)
        self.release()

    def release(self) -> None:
        """Give back what the shadow holds; the turn goes on without it, or is gone."""
        if self.num_slots:
            self.runtime.tree.token_to_kv_pool_allocator.free(self.owned.slots())
        self.owned = OwnedSlots(start=self.first)
        for rows in self.state.rows.values():
            self.runtime.free_rows(rows.slots())
        self.state.rows = {}
        if self.lock is not None:
            self.runtime.tree.unlock(self.lock)
            self.lock = None
        state_of(self.req).shadow = None
        self.runtime.shadows.remove(self)
