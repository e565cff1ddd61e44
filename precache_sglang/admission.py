"""Prefill admission that knows replay and the LR pool."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.radix_cache import RadixKey

from precache_sglang.request import state_of
from precache_sglang.runtime import current

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from precache_sglang.runtime import Runtime


class PrecachePrefillAdder(PrefillAdder):
    """SGLang's adder, with four corrections.

    Replayed tokens are computed but need no KV slot: charging them would keep a role out
    of a pool that is full of the very context it wants to read. A request needs LR slots
    for its own adapter. Own base and rows that it will read are no room for anything once
    it runs. And of two roles that bring the same new tokens, one feeds them and the other
    reads them one step later, where the first one's pass is what counts.

    A chunk whose slots have gone to others all the same waits until these end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._promised_rows = 0
        self._is_parked = False

    def _check_prefill_budget(
        self, req: Req, *, extend_input_len: int, total_tokens: int, **kwargs: Any
    ) -> tuple[bool, int | None]:
        total_tokens -= min(_replayed(req), extend_input_len)
        check = partial(
            super()._check_prefill_budget, req, extend_input_len=extend_input_len, **kwargs
        )
        fits: tuple[bool, int | None] = check(total_tokens=total_tokens + _own_to_pin(req))
        if not fits[0] and (fits := check(total_tokens=total_tokens))[0]:
            # It reads neutral base instead, as if its own had been evicted a moment ago.
            self.tree_cache.evict_own_of(req)
        return fits

    def add_chunked_req(self, req: Req) -> Req | None:
        # All its rows were promised when its first chunk was admitted; keep the promise
        # before others that join this step.
        needed = self._rows_needed(req)
        self._promised_rows += needed
        runtime = current()
        if runtime is not None and (short := self._missing(req, needed, runtime)) is not None:
            self._is_parked = True
            if self.running_batch.is_empty():
                _give_up(req, runtime, short)
            return req
        rest: Req | None = super().add_chunked_req(req)
        return rest

    def _missing(self, req: Req, num_rows: int, runtime: Runtime) -> str | None:
        """The flag of the pool that has no room for the next chunk of `req`, if one has none."""
        limit = self.rem_chunk_tokens or num_rows
        if num_rows and not runtime.make_room_for_rows(min(num_rows, limit)):
            assert runtime.lr_pool is not None
            return f"--precache-lr-tokens {runtime.lr_pool.size}"
        # SGLang makes the chunk as small as need be, but of at least one token.
        left = len(req.full_untruncated_fill_ids) - req.prefix_len - _replayed(req)
        while left > 0 and self.rem_total_tokens <= 0:
            if runtime.backlog.drop_oldest() is None:
                return f"--max-total-tokens {self.token_to_kv_pool_allocator.size}"
        return None

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        if self._is_parked:
            return AddReqResult.NO_TOKEN  # SGLang counts a chunk for every step with a prompt
        if self._fed_in_this_step(req):
            return AddReqResult.CONTINUE  # stays in the queue; those behind it may run
        runtime = current()
        # Slices that the request will pin are no longer evictable, for it and for others.
        rows = self._rows_needed(req) + self._rows_to_pin(req)
        if rows and runtime is not None and rows > runtime.rows_available() - self._promised_rows:
            return AddReqResult.NO_TOKEN
        result = super().add_one_req(req, *args, **kwargs)
        if self.can_run_list and self.can_run_list[-1] is req:
            self._promised_rows += rows
        return result

    def _commit_prefill_admission(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super()._commit_prefill_admission(req, *args, **kwargs)
        change = _own_to_pin(req) - min(_replayed(req), req.extend_len)
        self.memory_budget.total_offset += change
        self.memory_budget.current_offset += change

    def _fed_in_this_step(self, req: Req) -> bool:
        """Whether another role is about to publish tokens that `req` would compute too."""
        runtime = current()
        if runtime is None or not runtime.method.shared or runtime.method.neutral_base:
            return False
        mine = state_of(req)
        key = RadixKey(req.full_untruncated_fill_ids)
        return any(
            state_of(other).feeder != mine.feeder
            and (other.extra_key, other.cache_salt) == (req.extra_key, req.cache_salt)
            and key.match(RadixKey(other.full_untruncated_fill_ids)) > mine.base_len
            for other in self.can_run_list
        )

    def _rows_needed(self, req: Req) -> int:
        runtime = current()
        return 0 if runtime is None else runtime.own_rows_needed(req)

    def _rows_to_pin(self, req: Req) -> int:
        """Rows that are evictable now and will be pinned when the request runs."""
        runtime = current()
        state = state_of(req)
        if runtime is None or runtime.lr_pool is None or state.own_key is None:
            return 0
        rows = 0
        node = state.anchor
        # A pin reaches up to the root: above the first one nothing is evictable.
        while node is not runtime.tree.root_node and not node.pins.get(state.own_key):
            rows += len(node.key)
            node = node.parent
        return rows


def _give_up(req: Req, runtime: Runtime, short: str) -> None:
    """End a prompt in chunks for whose next chunk nobody will ever make room."""
    assert runtime.scheduler is not None
    req.discard_output_reason = FINISH_ABORT(
        f"No room for the rest of the prompt beside what it reads ({short}). Start with a larger "
        "pool, or try again.",
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
        err_type="ServiceUnavailable",
    )
    runtime.scheduler._pending_chunked_abort_req = req


def _replayed(req: Req) -> int:
    return max(0, state_of(req).base_len - req.prefix_len)


def _own_to_pin(req: Req) -> int:
    """Tokens of own base that are evictable until `req` runs."""
    runtime = current()
    if runtime is None:
        return 0
    return sum(len(node.key) for node in runtime.tree.own_to_pin(req))
