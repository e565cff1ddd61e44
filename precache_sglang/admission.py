"""Prefill admission that knows replay and the LR pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from precache_sglang.request import state_of
from precache_sglang.runtime import current

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class PrecachePrefillAdder(PrefillAdder):
    """SGLang's adder, with two corrections.

    Replayed tokens are computed but need no KV slot: charging them would keep a role out
    of a pool that is full of the very context it wants to read. And a request needs LR
    slots for its own adapter.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._promised_rows = 0

    def _check_prefill_budget(
        self, req: Req, *, extend_input_len: int, total_tokens: int, **kwargs: Any
    ) -> tuple[bool, int | None]:
        total_tokens -= min(_replayed(req), extend_input_len)
        return super()._check_prefill_budget(
            req, extend_input_len=extend_input_len, total_tokens=total_tokens, **kwargs
        )

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        rows = self._rows_needed(req)
        runtime = current()
        if rows and runtime is not None:
            # Slices that the request will pin are no longer evictable for it.
            pinned = state_of(req).lr_len
            if rows + pinned > runtime.rows_available() - self._promised_rows:
                return AddReqResult.NO_TOKEN
        result = super().add_one_req(req, *args, **kwargs)
        if self.can_run_list and self.can_run_list[-1] is req:
            self._promised_rows += rows + (state_of(req).lr_len if rows else 0)
        return result

    def _commit_prefill_admission(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super()._commit_prefill_admission(req, *args, **kwargs)
        replayed = min(_replayed(req), req.extend_len)
        self.memory_budget.total_offset -= replayed
        self.memory_budget.current_offset -= replayed

    def _rows_needed(self, req: Req) -> int:
        runtime = current()
        state = state_of(req)
        if runtime is None or runtime.lr_pool is None or state.own_key is None:
            return 0
        return max(0, len(req.full_untruncated_fill_ids) - state.lr_len)


def _replayed(req: Req) -> int:
    return max(0, state_of(req).base_len - req.prefix_len)
