"""What we keep for each request beside SGLang's own record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from precache_sglang.backlog import NeutralJob, Rebase
    from precache_sglang.match import Match
    from precache_sglang.metrics import RoleTotals
    from precache_sglang.roles import Adapter
    from precache_sglang.shadow import Shadow


@dataclass
class OwnedSlots:
    """Slots of one pool that a pass owns, over tokens ``[start, end)``."""

    start: int
    parts: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def end(self) -> int:
        return self.start + self.num_slots

    def slots(self) -> torch.Tensor:
        """``[end - start]`` int64."""
        if len(self.parts) != 1:
            self.parts = [torch.cat(self.parts)] if self.parts else []
        return self.parts[0] if self.parts else torch.empty(0, dtype=torch.int64)

    def append(self, slots: torch.Tensor) -> None:
        self.parts.append(slots)

    def take_until(self, position: int) -> torch.Tensor:
        """Hand over the slots of ``[start, position)`` and move ``start`` there."""
        slots = self.slots()
        count = max(0, min(position, self.end) - self.start)
        taken, rest = slots[:count], slots[count:]
        self.start += count
        self.parts = [rest] if rest.numel() else []
        return taken


@dataclass
class PromptCounts:
    """Where a request's prompt tokens came from; they add up to the prompt's length.

    Attributes:
        shared: Read from the cache, first fed by another role (or by no role).
        own: Read from the cache, first fed by this role.
        replayed: Base KV read from the cache, LR rows computed again.
        computed: Computed.
    """

    shared: int = 0
    own: int = 0
    replayed: int = 0
    computed: int = 0


@dataclass
class RequestState:
    """Attached to a `Req` as ``req.precache``.

    A request's tokens, with ``P = req.kv.cache_protected_len`` and ``n`` its length::

        [0, lr_len)         base and own LR rows read from the tree (pinned)
        [lr_len, base_len)  replay: base read from the tree, own LR rows owned by the request
        [base_len, P)       published by this request: tree-owned and locked
        [P, n)              base slots and rows owned by the request

    Attributes:
        adapter: None for an adapter-free pass.
        team: The team whose namespace the request uses.
        job: The neutral job this internal request works for; None for users' requests.
        base_len, lr_len: Set by every match; see architecture.md, section 3.
        anchor: Deepest tree node whose own slice this request reads; pinned while it runs.
        tabled: The request's row of ``req_to_lr`` holds its matched slices.
        written: Slice keys the pass writes for new tokens, own key first.
        rows: Slots owned, by slice key.
        read_node: Deepest tree node whose base KV this request reads, once it is admitted.
        own_spans: Token ranges above it over which it reads base KV of its own adapted passes;
            pinned while it runs.
        impatient: It may read base KV of other roles' adapted passes (provisionally).
        exact: It reads, as the method has it, neutral base KV and own base alone.
        held_since: When it first waited for a neutral pass, on the monotonic clock.
        shadow: The neutral pass that runs beside this request; None if none does.
        gave_way: Users needed the slots of its shadow: its tokens are owed when it ends.
        detached: Another role published other base KV for tokens this request computed
            itself; it goes on with its own rows and publishes nothing more.
        counts: Where its prompt came from; None until it is admitted.
        match: Why no more of the prompt did; None until it is admitted.
        trajectory: The caller's name for what this turn belongs to; None without one.
        explain: The caller wants to see the text where the cached context ends.
        totals: Where what it does is counted; None for what no user sent.
        num_output, token_time: Output tokens counted, and when the last one was sampled.
    """

    adapter: Adapter | None
    team: str
    job: NeutralJob | Rebase | None = None
    base_len: int = 0
    lr_len: int = 0
    anchor: Any = None
    pinned: bool = False
    tabled: bool = False
    written: list[str] = field(default_factory=list)
    rows: dict[str, OwnedSlots] = field(default_factory=dict)
    read_node: Any = None
    own_spans: list[tuple[int, int]] = field(default_factory=list)
    impatient: bool = False
    exact: bool = True
    held_since: float | None = None
    shadow: Shadow | None = None
    gave_way: bool = False
    detached: bool = False
    counts: PromptCounts | None = None
    match: Match | None = None
    trajectory: str | None = None
    explain: bool = False
    totals: RoleTotals | None = None
    num_output: int = 0
    token_time: float = 0.0

    @property
    def own_key(self) -> str | None:
        return None if self.adapter is None else self.adapter.rows_key

    @property
    def feeder(self) -> str:
        """Who feeds the tokens, as recorded on tree nodes."""
        if self.job is not None:
            return self.job.feeder
        return "" if self.adapter is None else self.adapter.content

    @property
    def is_neutral(self) -> bool:
        return self.adapter is None


def state_of(req: Req) -> RequestState:
    state: RequestState = req.precache
    return state
