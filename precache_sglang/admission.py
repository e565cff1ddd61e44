"""Prefill admission that knows replay and the LR pool."""

from __future__ import annotations

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
    """SGLang's adder, with three corrections.

    Replayed tokens are computed but need no KV slot: charging them would keep a role out
    of a pool that is full of the very context it wants to read. A request needs LR slots
    for its own adapter. And of two roles that bring the same new tokens, one feeds them
    and the other reads them one step later, where the first one's pass is what counts.

    A chunk whose rows have gone to others all the same waits until these end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._promised_rows = 0
        self._is_parked = False

    def _check_prefill_budget(
        self, req: Req, *, extend_input_len: int, total_tokens: int, **kwargs: Any
    ) -> tuple[bool, int | None]:
        total_tokens -= min(_replayed(req), extend_input_len)
        return super()._check_prefill_budget(
            req, extend_input_len=extend_input_len, total_tokens=total_tokens, **kwargs
        )

    def add_chunked_req(self, req: Req) -> Req | None:
        # All its rows were promised when its first chunk was admitted; keep the promise
        # before others that join this step.
        needed = self._rows_needed(req)
        self._promised_rows += needed
        runtime = current()
        now = min(needed, self.rem_chunk_tokens or needed)
        if now and runtime is not None and not runtime.make_room_for_rows(now):
            self._is_parked = True
            if self.running_batch.is_empty():
                _give_up(req, runtime)
            return req
        rest: Req | None = super().add_chunked_req(req)
        return rest

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
        replayed = min(_replayed(req), req.extend_len)
        self.memory_budget.total_offset -= replayed
        self.memory_budget.current_offset -= replayed

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


def _give_up(req: Req, runtime: Runtime) -> None:
    """End a prompt in chunks whose next rows nobody will ever make room for."""
    assert runtime.scheduler is not None and runtime.lr_pool is not None
    req.discard_output_reason = FINISH_ABORT(
        "No room for the prompt's low-rank rows beside those it reads "
        f"(--precache-lr-tokens {runtime.lr_pool.size}). Start with a larger pool, or try again.",
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
        err_type="ServiceUnavailable",
    )
    runtime.scheduler._pending_chunked_abort_req = req


def _replayed(req: Req) -> int:
    return max(0, state_of(req).base_len - req.prefix_len)
