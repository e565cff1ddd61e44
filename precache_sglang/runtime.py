"""What the parts of one scheduler process share: settings, roles, pools, backlog.

Created when SGLang's LoRA manager exists, completed as SGLang builds its pools and its
prefix cache. Also hands out LR slots, since that touches requests, tree and pool alike.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.utils import is_health_check_generate_req

from precache_sglang.adapter_tables import NO_ADAPTER
from precache_sglang.backlog import Backlog
from precache_sglang.config import Settings
from precache_sglang.errors import AdapterError, PatchError, UnsupportedError
from precache_sglang.lr_pool import LRPool
from precache_sglang.match import MatchLog, match_of
from precache_sglang.methods import Method, Rows
from precache_sglang.metrics import SOURCES, Exporter, History, RoleTable, Stats
from precache_sglang.neutral import NeutralScheduler
from precache_sglang.request import OwnedSlots, RequestState, state_of
from precache_sglang.roles import RoleRegistry, read_adapter, registered_names, targets_k
from precache_sglang.schedules import SCHEDULES, Schedule
from precache_sglang.shadow import NeutralSpan, Shadow, num_user_tokens

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from precache_sglang.prefix_cache import PrecacheRadixCache

logger = logging.getLogger(__name__)

_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process; None where precache is off or not built yet."""
    return _current


class _RowSpan(NamedTuple):
    """Tokens ``[first, end)`` of a pass that get rows of one adapter.

    `row` is the request's row of ``req_to_lr``; None for a pass that reads no rows.
    """

    state: RequestState
    row: int | None
    key: str
    first: int
    end: int
    column: int  # of `first` in the batch


class Runtime:
    """See the module's docstring.

    Attributes:
        lr_pool: None for methods that store complete KV.
        req_to_lr: ``[rows, context]`` int32: LR slots of a request's own adapter by
            position, beside SGLang's ``req_to_token``.
        req_to_adapter: ``[rows]`` int32: a request's row of the adapter tables, for
            backends that keep such tables; -1 for none.
        write_slots: ``[blocks, tokens]`` int64: where the forward in progress stores the
            rows of its tokens; None if it stores none.
        schedule: When neutral passes run; None where the method has none.
        shadows: Neutral passes beside running turns, oldest first.
        by_role: What each role did; ``stats`` has the sums.
        kernels: ``"torch"`` or ``"triton"``: which attention serves.
        spans: Neutral tokens in the step that is being prepared or run.
    """

    tree: PrecacheRadixCache
    req_to_lr: torch.Tensor
    req_to_adapter: torch.Tensor
    neutral: NeutralScheduler

    def __init__(self, settings: Settings, method: Method, lora_manager: LoRAManager) -> None:
        global _current
        self.settings = settings
        self.method = method
        self.schedule: Schedule | None = (
            SCHEDULES[settings.schedule] if method.neutral_base else None
        )
        self.stats = Stats()
        self.match_log = MatchLog()
        self.by_role = RoleTable(settings.metrics_roles)
        self.history = History()
        self.backlog = Backlog(self)
        self.shadows: list[Shadow] = []
        self.neutral_spans: list[NeutralSpan] = []
        self.num_user_tokens = 0
        self.lora_manager = lora_manager
        self.lr_pool: LRPool | None = None
        self.write_slots: torch.Tensor | None = None
        self._captured_slots: torch.Tensor | None = None
        self._extend_layout: list[tuple[int, Req]] | None = None
        self._stored_layers = 0
        self.peak_base = 0
        self.peak_rows = 0
        self.kernels = settings.kernels
        self.scheduler: Scheduler | None = None
        self.exporter: Exporter | None = None
        # The batch that slots are handed out for. After a decode step, a prompt's last chunk is
        # in no other place: SGLang has let go of it, and does not know the new batch yet.
        self._prepared: list[Req] = []
        model_config = lora_manager.base_hf_config
        self.num_layers: int = model_config.num_hidden_layers
        self.dtype = lora_manager.dtype
        self.device = str(lora_manager.device)
        head_dim = getattr(model_config, "head_dim", None) or (
            model_config.hidden_size // model_config.num_attention_heads
        )
        self.kv_size: int = model_config.num_key_value_heads * head_dim
        wanted_targets = set(lora_manager.target_modules or ())
        self.roles = RoleRegistry(
            method=method,
            teams=settings.teams,
            width=lora_manager.max_lora_rank,
            has_k=any(targets_k(lora) for lora in lora_manager.loras.values())
            or "k_proj" in _raw_target_modules()
            or (not lora_manager.loras and "qkv_proj" in wanted_targets),
        )
        self.num_startup_adapters = len(lora_manager.loras)
        _current = self
        self.sync_adapters()

    # -- sizes ---------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        return LRPool.bytes_per_slot(
            self.num_layers, self.roles.width, self.roles.has_k, self.dtype
        )

    @property
    def rows_per_token(self) -> int:
        """LR slots per KV slot when ``--precache-lr-tokens`` is not given."""
        if not self.method.base_kv:
            return 0
        if self.method.rows is Rows.COMMON:
            return 1
        return self.num_startup_adapters or self.lora_manager.max_loras_per_batch - 1

    def bytes_per_token(self) -> int:
        """LR bytes that come with every KV slot."""
        return 0 if self.settings.lr_tokens else self.rows_per_token * self.slot_bytes

    def fixed_bytes(self) -> int:
        """LR bytes that do not depend on the size of the KV pool."""
        if not self.method.base_kv or not self.settings.lr_tokens:
            return 0
        return self.settings.lr_tokens * self.slot_bytes

    def build_pools(self, runner: ModelRunner) -> None:
        """Allocate the LR pool once SGLang's own pools exist."""
        pool = runner.req_to_token_pool.req_to_token
        self.req_to_lr = torch.zeros_like(pool)
        self.req_to_adapter = torch.full_like(pool[:, 0], NO_ADAPTER)
        if not self.method.base_kv:
            return
        size = self.settings.lr_tokens or runner.max_total_num_tokens * self.rows_per_token
        self.lr_pool = LRPool(
            size, self.num_layers, self.roles.width, self.roles.has_k, self.dtype, self.device
        )
        runner.token_to_kv_pool.mem_usage += self.lr_pool.nbytes / (1 << 30)
        logger.info(
            "precache: LR pool of %d slots, width %d%s, %.1f MiB",
            size,
            self.roles.width,
            ", keys too" if self.roles.has_k else "",
            self.lr_pool.nbytes / (1 << 20),
        )

    # -- roles ---------------------------------------------------------------

    def sync_adapters(self) -> None:
        """Bring the registry in line with what SGLang has loaded.

        Raises:
            AdapterError: if a new adapter cannot be served; it is not registered then.
        """
        names = registered_names(self.lora_manager)
        for lora_id in list(self.roles.adapters):
            if lora_id not in names:
                dropped = self.roles.remove(lora_id)
                if dropped is not None:
                    self.tree.purge(dropped)
        for lora_id, name in names.items():
            if lora_id in self.roles.adapters:
                continue
            lora = self.lora_manager.loras[lora_id]
            if lora.config.hf_config.get("use_rslora"):
                # SGLang 0.5.23 scales by alpha / r whatever the adapter says.
                lora.scaling = lora.config.lora_alpha / lora.config.r**0.5
            adapter = read_adapter(
                lora_id,
                name,
                lora,
                self.lora_manager.memory_pool,
                self.roles,
                torch.device(self.device),
                self.dtype,
                self.kv_size,
            )
            self.roles.add(adapter)
            self.by_role.of(name)
            if adapter.rows_key is not None and hasattr(self, "tree"):
                self.tree.revive(adapter.rows_key)

    def new_state(self, lora_id: str | None) -> RequestState:
        if lora_id is None:
            return RequestState(adapter=None, team=self.roles.base_team())
        adapter = self.roles.adapters.get(lora_id)
        if adapter is None:
            raise AdapterError(f"No adapter with id {lora_id!r} is loaded; load it first.")
        return RequestState(adapter=adapter, team=adapter.team)

    def namespace(self, state: RequestState, extra_key: str | None) -> str:
        """The tree namespace of a request.

        Our prefix ends at the first colon and the caller's key follows it verbatim, so
        no value of the caller's can name another team or adapter.
        """
        if not self.method.shared:
            mine = state.adapter.content if state.adapter else "none"
        else:
            mine = f"t{self.roles.team_names().index(state.team)}"
        return f"{mine}:{extra_key or ''}"

    def sibling_namespaces(self, state: RequestState, namespace: str) -> Iterator[str]:
        """Namespaces of the same tenant under other teams (without sharing: other roles)."""
        mine, _, callers = namespace.partition(":")
        if self.method.shared:
            teams = range(len(self.roles.team_names()))
            siblings = {f"t{index}" for index in teams}
        else:
            siblings = {adapter.content for adapter in self.roles.adapters.values()} | {"none"}
        yield from (f"{sibling}:{callers}" for sibling in sorted(siblings - {mine}))

    @property
    def extending(self) -> bool:
        """Whether an extend batch is being allocated."""
        return self._extend_layout is not None

    def request_error(self, req: Req) -> str | None:
        """Why a request cannot be served, or None."""
        state = state_of(req)
        if (req.sampling_params.beam_width or 1) > 1:
            return "beam search is not supported by precache-sglang; leave it out of the request."
        tokens = req.origin_input_ids
        if not tokens:
            return "The prompt has no tokens; send at least one."
        if not (min(tokens) >= 0 and max(tokens) < req.vocab_size):
            # SGLang would index the embedding with it, which ends the process.
            bad = next(token for token in tokens if not 0 <= token < req.vocab_size)
            return f"input_ids holds {bad}; this model's tokens are 0 to {req.vocab_size - 1}."
        for name, value, least, most in (
            ("top_logprobs_num", req.logprob.top_logprobs_num, 0, req.vocab_size),
            *(
                ("token_ids_logprob", token, 0, req.vocab_size - 1)
                for token in req.logprob.token_ids_logprob or ()
            ),
        ):
            # The size of a tensor, and indices, where tokens are sampled.
            if not least <= value <= most:
                return f"{name} is {value}; it has to be from {least} to {most}."
        if self.lr_pool is None or state.own_key is None:
            return None
        needed = len(req.origin_input_ids) + 1
        if needed > self.lr_pool.size:
            return (
                f"The prompt needs {needed} low-rank slots for its own adapter, but the pool has "
                f"{self.lr_pool.size} (--precache-lr-tokens). Start with a larger pool or send a "
                "shorter prompt."
            )
        return None

    def limit_output(self, req: Req) -> None:
        """Bound an answer by the LR pool, as SGLang bounds it by the KV pool."""
        if self.lr_pool is None or state_of(req).own_key is None:
            return
        params = req.sampling_params
        limit = self.lr_pool.size - len(req.origin_input_ids)
        if params.max_new_tokens is None or params.max_new_tokens > limit:
            params.max_new_tokens = limit

    # -- LR slots ------------------------------------------------------------

    def free_rows(self, slots: torch.Tensor) -> None:
        if self.lr_pool is not None:
            self.lr_pool.free(slots)

    def rows_available(self) -> int:
        """LR slots free now or after evicting slices."""
        assert self.lr_pool is not None
        return self.lr_pool.available_size() + self.tree.lr_evictable_size

    def running_states(self) -> Iterator[RequestState]:
        """States of all passes that may own LR slots: users' requests, and beside them."""
        yield from (shadow.state for shadow in self.shadows)
        yield from (span.state for span in self.neutral_spans if span.state.job is not None)
        yield from map(state_of, self._running_reqs())

    def _running_reqs(self) -> Iterator[Req]:
        """Requests in a batch or between the chunks of their prompt; internal ones, too."""
        scheduler = self.scheduler
        if scheduler is None:
            return
        seen: set[int] = set()
        reqs = [*scheduler.running_batch.reqs]
        for batch in (scheduler.last_batch, scheduler.cur_batch_for_debug):
            reqs += batch.reqs if batch is not None else []
        if scheduler.chunked_req is not None:
            reqs.append(scheduler.chunked_req)
        reqs += self._prepared
        for req in reqs:
            if id(req) not in seen:
                seen.add(id(req))
                yield req

    def _others(self, req: Req, batch: list[Req]) -> Iterator[Req]:
        """Users' requests that run, or stand before `req` in `batch`."""
        before = itertools.takewhile(lambda other: other is not req, batch)
        for other in itertools.chain(self._running_reqs(), before):
            if other is not req and not other.finished() and state_of(other).job is None:
                yield other

    def running_requests(self) -> list[Req]:
        """Users' requests that run."""
        return [
            req for req in self._running_reqs() if state_of(req).job is None and not req.finished()
        ]

    @property
    def may_publish_provisionally(self) -> bool:
        """Whether a request may use a turn whose neutral pass is not done."""
        return self.method.neutral_base and self.settings.max_neutral_wait_ms >= 0

    def neutral_locks(self) -> Iterator[TreeLock]:
        """Tree locks of neutral passes, which read nothing between their steps."""
        jobs = (job.lock for job in self.backlog.jobs)
        shadows = (shadow.lock for shadow in self.shadows)
        yield from (lock for lock in (*jobs, *shadows) if lock is not None)

    def rows_held(self) -> int:
        """LR slots owned by running requests and by the backlog."""
        owned = sum(
            rows.num_slots for state in self.running_states() for rows in state.rows.values()
        )
        retired = sum(retired.rows.numel() for retired in self.tree.retired)
        return owned + retired + self.backlog.held_rows()

    def rows_in_flight(self, key: str) -> bool:
        return any(key in state.rows for state in self.running_states())

    def optional_rows(self, states: Iterator[RequestState]) -> int:
        """LR slots of other roles that running requests could do without."""
        return sum(
            rows.num_slots
            for state in states
            for key, rows in state.rows.items()
            if key != state.own_key
        )

    def can_decode(self, reqs: list[Req]) -> bool:
        """Whether the next token of every request finds an LR slot for its own adapter."""
        if self.lr_pool is None:
            return True
        needed = sum(state_of(req).own_key is not None for req in reqs)
        # SGLang aborts a last request that does not fit, but a chunk can wait.
        promised = self._promised_rows() if len(reqs) > 1 else 0
        return self.make_room_for_rows(needed + promised)

    def make_room_for_rows(self, num_slots: int) -> bool:
        """Whether users' tokens find so many LR slots, at the cost of rows that are not owed."""
        while num_slots > self.rows_available() + self.optional_rows(self.running_states()):
            # Rows of finished turns come second to a user's answer.
            if not self.backlog.drop_rows():
                return False
        return True

    def rows_to_spare(self) -> int:
        """LR slots free now or after evicting slices, less those promised to a prompt in chunks."""
        return self.rows_available() - self._promised_rows()

    def _promised_rows(self) -> int:
        chunked = None if self.scheduler is None else self.scheduler.chunked_req
        return 0 if chunked is None else self.own_rows_needed(chunked)

    def own_rows_needed(self, req: Req) -> int:
        """LR slots of its own adapter that the rest of the prompt of `req` will take."""
        state = state_of(req)
        if self.lr_pool is None or state.own_key is None:
            return 0
        # Beyond `lr_len`, a chunk's predecessors have theirs already.
        return max(0, len(req.full_untruncated_fill_ids) - max(req.prefix_len, state.lr_len))

    def _take(self, num_slots: int, required: bool) -> torch.Tensor | None:
        """Slots from the pool, evicting slices if need be; None if there are too few."""
        pool = self.lr_pool
        assert pool is not None
        if not required and num_slots > self.rows_available():
            return None  # slices would be evicted for nothing
        missing = num_slots - pool.available_size()
        if missing > 0:
            missing -= self.tree.evict_rows(missing)
        if missing > 0 and required:
            self._drop_optional_rows()
            # What was promised to a prompt in chunks may have gone to a turn that has ended.
            while pool.available_size() < num_slots and self.backlog.drop_rows():
                pass
        return pool.alloc(num_slots)

    def _drop_optional_rows(self) -> None:
        for state in self.running_states():
            for key in [key for key in state.rows if key != state.own_key]:
                self._stop_writing(state, key)

    def _stop_writing(self, state: RequestState, key: str) -> None:
        rows = state.rows.pop(key, None)
        if rows is not None:
            self.stats.dropped_rows += rows.num_slots
            self.free_rows(rows.slots())
        if key in state.written:
            state.written.remove(key)

    # -- one batch -----------------------------------------------------------

    def before_extend(self, batch: ScheduleBatch) -> None:
        """Pin what the batch reads, before anything can be evicted for it."""
        for req in batch.reqs:
            first = not state_of(req).pinned
            self.tree.attach(req)
            if first and state_of(req).job is None and not req.retracted_stain:
                self._count_prompt(req)
                match = match_of(self, req, self._others(req, batch.reqs))
                state_of(req).match = match
                self.match_log.note(req, match)

    def _count_prompt(self, req: Req) -> None:
        # What SGLang has refused runs one token that nobody sent.
        if is_health_check_generate_req(req) or isinstance(req.to_finish, FINISH_ABORT):
            return
        state = state_of(req)
        assert state.counts is not None
        state.totals = self.by_role.of(state.adapter.name if state.adapter else None)
        state.totals.requests += 1
        for totals in (self.stats, state.totals):
            for source in SOURCES:
                setattr(totals, source, getattr(totals, source) + getattr(state.counts, source))

    @contextmanager
    def extend_layout(self, batch: ScheduleBatch) -> Iterator[None]:
        """Within, `base_slots` knows which tokens of `batch` need no fresh KV slot."""
        self._extend_layout = [
            (
                max(0, min(state_of(req).base_len, req.extend_end) - req.prefix_len),
                req,
            )
            for req in batch.reqs
        ]
        try:
            yield
        finally:
            self._extend_layout = None

    def base_slots(self, alloc: Any, num_tokens: int) -> torch.Tensor:
        """KV slots for an extend batch.

        Replayed tokens get slot 0, whose writes nobody reads: their base KV is in the
        tree. A neutral piece is written in place of the turn's own slots.

        Args:
            alloc: Takes a number and returns that many fresh slots.
            num_tokens: Tokens that the batch computes.

        Returns:
            ``[num_tokens]`` int64.
        """
        layout = self._extend_layout
        assert layout is not None
        parts: list[torch.Tensor | int] = []
        fresh = 0
        for replayed, req in layout:
            new = req.extend_len - replayed
            parts.append(torch.zeros(replayed, dtype=torch.int64, device=self.device))
            job = state_of(req).job
            if job is not None:
                parts.append(job.take(new))
            else:
                parts.append(new)
                fresh += new
        slots = alloc(fresh) if fresh else torch.empty(0, dtype=torch.int64, device=self.device)
        out: list[torch.Tensor] = []
        for part in parts:
            if isinstance(part, int):
                out.append(slots[:part])
                slots = slots[part:]
            else:
                out.append(part)
        result = torch.cat(out)
        assert result.numel() == num_tokens
        return result

    def after_extend(self, batch: ScheduleBatch) -> None:
        """Point replayed positions at the tree's base and hand out LR slots."""
        table = self.tree.req_to_token_pool.req_to_token
        for req in batch.reqs:
            state = state_of(req)
            end = min(state.base_len, req.extend_end)
            if end > req.prefix_len:
                shared = self.tree.slots_read(req)
                table[req.kv.req_pool_idx, req.prefix_len : end] = shared[req.prefix_len : end].to(
                    table.dtype
                )
            if not state.tabled:
                state.tabled = True
                state.written = self.roles.rows_written(
                    state.adapter,
                    state.team,
                    leave_out=state.job.active_key if state.job else None,
                    whole_team=self.may_publish_provisionally,
                )
                if state.own_key is not None:
                    self.req_to_lr[req.kv.req_pool_idx, : state.lr_len] = self.tree.own_slots(
                        state
                    ).to(table.dtype)
                if self.roles.tables is not None:
                    self.req_to_adapter[req.kv.req_pool_idx] = self.roles.tables.row_of(
                        state.adapter
                    )
        self._assign_rows(batch, [(req, req.prefix_len, req.extend_end) for req in batch.reqs])

    def after_decode(self, batch: ScheduleBatch) -> None:
        """Hand out LR slots for the token that each request feeds in this step."""
        self._assign_rows(
            batch,
            [(req, req.kv.kv_committed_len - 1, req.kv.kv_committed_len) for req in batch.reqs],
        )

    def _assign_rows(self, batch: ScheduleBatch, spans: list[tuple[Req, int, int]]) -> None:
        self._note_peaks()
        self._prepared = list(batch.reqs)
        batch.precache_write_slots = self._allot(
            [(state_of(req), req.kv.req_pool_idx, start, end) for req, start, end in spans]
        )
        self._prepared = []

    def add_neutral_spans(self, batch: ScheduleBatch, spans: list[NeutralSpan]) -> None:
        """Let neutral tokens ride along in the forward of `batch`, behind its own tokens."""
        batch.precache_neutral_spans = spans
        if not spans:
            return
        self._note_peaks()
        mine = batch.precache_write_slots
        theirs = self._allot([(span.state, None, span.start, span.end) for span in spans])
        if mine is None and theirs is None:
            return
        parts = (
            (mine, num_user_tokens(batch)),
            (theirs, sum(len(span.tokens) for span in spans)),
        )
        batch.precache_write_slots = torch.cat(
            [self._no_write_slots(count) if part is None else part for part, count in parts], dim=1
        )

    def _no_write_slots(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(
            (len(self.roles.blocks), num_tokens), dtype=torch.int64, device=self.device
        )

    def _allot(self, spans: list[tuple[RequestState, int | None, int, int]]) -> torch.Tensor | None:
        """LR slots for the tokens of ``(state, row, start, end)``, own rows first.

        Rows of other roles are worth having but not owed: without room they are left
        out for the rest of the pass, as if they had been evicted at once.

        Returns:
            ``[blocks, tokens of all spans]`` int64, or None if nothing is to be written.
        """
        if self.lr_pool is None:
            return None
        own: list[_RowSpan] = []
        rest: list[_RowSpan] = []
        column = 0
        for state, row, start, end in spans:
            for key in list(state.written):
                is_own = key == state.own_key
                if key not in self.roles.blocks and not is_own:
                    # Unloaded. Were it loaded again, its rows would go on behind a gap.
                    self._stop_writing(state, key)
                    continue
                first = max(start, state.lr_len if is_own else state.base_len)
                if first < end and key in self.roles.blocks:
                    span = _RowSpan(state, row, key, first, end, column + first - start)
                    (own if is_own else rest).append(span)
            column += end - start
        if not own and not rest:
            return None
        write_slots = self._no_write_slots(column)
        needed = sum(span.end - span.first for span in own)
        slots = self._take(needed, required=True)
        if slots is None:
            raise RuntimeError(
                f"The low-rank pool has no room for {needed} slots "
                f"(--precache-lr-tokens {self.lr_pool.size}); admission should have "
                "prevented this."
            )
        for span in own:
            mine, slots = slots[: span.end - span.first], slots[span.end - span.first :]
            self._place(write_slots, span, mine)
            table = self.req_to_lr[span.row]
            table[span.first : span.end] = mine.to(table.dtype)
        for span in rest:
            if span.key not in span.state.written:
                continue
            found = self._take(span.end - span.first, required=False)
            if found is None:
                self.stats.dropped_rows += span.end - span.first
                self._stop_writing(span.state, span.key)
            else:
                self._place(write_slots, span, found)
        return write_slots

    def _place(self, write_slots: torch.Tensor, span: _RowSpan, slots: torch.Tensor) -> None:
        block = self.roles.blocks[span.key]
        write_slots[block, span.column : span.column + slots.numel()] = slots
        rows = span.state.rows
        if span.key not in rows:
            rows[span.key] = OwnedSlots(span.first)
        rows[span.key].append(slots)

    def _note_peaks(self) -> None:
        allocator = self.tree.token_to_kv_pool_allocator
        self.peak_base = max(self.peak_base, allocator.size - allocator.available_size())
        if self.lr_pool is not None:
            in_use = self.lr_pool.size - self.lr_pool.available_size()
            self.peak_rows = max(self.peak_rows, in_use)

    # -- forward -------------------------------------------------------------

    def store_rows(self, layer: int, x: torch.Tensor, write_rows: Callable[..., None]) -> None:
        """Store the LR rows of one layer's input. `x`: ``[tokens, hidden]``."""
        slots = self.write_slots
        if slots is None:
            return
        pool = self.lr_pool
        assert pool is not None
        self._stored_layers += 1
        rows_k = None if pool.k is None else pool.k[layer]
        write_rows(x, self.roles.stack_of(layer, len(slots)), slots, pool.v[layer], rows_k)

    def hold_write_slots(self, max_tokens: int) -> None:
        """Make room for the write slots of captured steps, whose address must not change."""
        self._graph_slots = torch.zeros(
            (self.roles.fixed_blocks, max_tokens), dtype=torch.int64, device=self.device
        )

    def begin_capture(self, num_tokens: int) -> None:
        """What is captured from here on stores rows where `begin_replay` says."""
        self._captured_slots = self.write_slots = self._graph_slots[:, :num_tokens].zero_()

    def end_capture(self) -> None:
        """SGLang's dummy forwards after capturing store nothing."""
        if self.write_slots is self._captured_slots:
            self.write_slots = None

    def begin_replay(self, num_tokens: int) -> None:
        """Let a captured step of `num_tokens` tokens, padding included, store this step's rows."""
        held = self._graph_slots[:, :num_tokens].zero_()
        if self.write_slots is not None:
            blocks, tokens = self.write_slots.shape
            held[:blocks, :tokens] = self.write_slots
            self._stored_layers = self.num_layers  # the hooks ran when the graph was captured

    def begin_forward(self, batch: ScheduleBatch, forward_batch: ForwardBatch) -> None:
        """Note what the forward of `batch` stores, and append its neutral tokens."""
        self.write_slots = getattr(batch, "precache_write_slots", None)
        self._stored_layers = 0
        self.neutral_spans = getattr(batch, "precache_neutral_spans", [])
        self.num_user_tokens = 0
        if not self.neutral_spans:
            return
        self.num_user_tokens = len(forward_batch.input_ids)
        tokens = [token for span in self.neutral_spans for token in span.tokens]
        positions = [torch.arange(span.start, span.end) for span in self.neutral_spans]
        for name, more in (
            ("input_ids", torch.tensor(tokens)),
            ("positions", torch.cat(positions)),
            ("out_cache_loc", torch.cat([span.slots for span in self.neutral_spans])),
        ):
            users = getattr(forward_batch, name)
            setattr(forward_batch, name, torch.cat((users, more.to(users))))
        # Tokens beyond this number pass for padding, which attention leaves out.
        forward_batch.global_num_token_non_padded_cpu = len(forward_batch.input_ids)

    def end_forward(self) -> None:
        """Hand what the spans computed to those who sent them."""
        spans, self.neutral_spans = self.neutral_spans, []
        for span in spans:
            self.stats.neutral += len(span.tokens)
            self.stats.neutral_beside += len(span.tokens)
            span.computed(span)

    def require_rows_stored(self, batch: ScheduleBatch) -> None:
        """Check that the forward of `batch` stored the rows that were allotted to it.

        Raises:
            PatchError: if it did not, or not in every layer: some hook is in place but is
                passed by. Publishing would hand out rows that nobody wrote.
        """
        expected = 0 if getattr(batch, "precache_write_slots", None) is None else self.num_layers
        if self._stored_layers != expected:
            raise PatchError(
                f"the forward stored low-rank rows in {self._stored_layers} of {expected} layers; "
                "SGLang ran it past a hook of ours. Use --precache-method off and report this."
            )

    # -- reports -------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """What is so now, for `state` and for Prometheus. Cheap: nothing is counted here."""
        tree, pool = self.tree, self.lr_pool
        allocator = tree.token_to_kv_pool_allocator
        return {
            "backlog_tokens": self.backlog.tokens(),
            "backlog_age_s": round(self.backlog.oldest_age(), 3),
            "provisional_tokens": tree.provisional_tokens,
            "own_base_tokens": tree.own_size(),
            "shadow_tokens": sum(shadow.num_slots for shadow in self.shadows),
            "tree_nodes": tree.num_nodes,
            "base_tokens": tree.num_tokens,
            "base_tokens_in_use": allocator.size - allocator.available_size(),
            "base_pool_tokens": allocator.size,
            "lr_slots_in_use": pool.size - pool.available_size() if pool else 0,
            "lr_pool_slots": pool.size if pool else 0,
        }

    def lr_bytes_by_role(self) -> dict[str, int]:
        """Bytes of rows in the tree by row of `by_role`. Roles with common rows count them each."""
        sizes: dict[str, int] = {}
        for adapter in self.roles.adapters.values():
            label = self.by_role.label(adapter.name)
            tokens = self.tree.lr_tokens[adapter.rows_key or ""]
            sizes[label] = sizes.get(label, 0) + tokens * self.slot_bytes
        return sizes

    def state(self) -> dict[str, Any]:
        """The body of ``GET /precache/state``."""
        tree, pool = self.tree, self.lr_pool
        kv_pool = tree.token_to_kv_pool_allocator.get_kvcache()
        gauges = self.gauges()
        token_bytes = 2 * self.kv_size * self.num_layers * self.dtype.itemsize
        rows_of_requests = tree.req_to_token_pool
        return {
            "method": self.method.name,
            "kernels": self.kernels,
            "schedule": self.schedule.name if self.schedule else None,
            "teams": self._team_names(),
            **gauges,
            "base_bytes": gauges["base_tokens"] * token_bytes,
            "base_pool_bytes": sum(b.nbytes for b in (*kv_pool.k_buffer, *kv_pool.v_buffer)),
            "peak_base_bytes": max(self.peak_base, gauges["base_tokens_in_use"]) * token_bytes,
            "lr": {
                adapter.name: {
                    "tokens": (tokens := tree.lr_tokens[adapter.rows_key or ""]),
                    "bytes": tokens * self.slot_bytes,
                    "rank": adapter.rank,
                    "team": adapter.team,
                }
                for adapter in self.roles.adapters.values()
            },
            "lr_pool_bytes": pool.nbytes if pool else 0,
            "lr_slots_evictable": tree.lr_evictable_size,
            "lr_slots_pinned": tree.lr_pinned_size,
            "peak_lr_bytes": self.peak_rows * self.slot_bytes if pool else 0,
            "roles": {name: row.as_dict() for name, row in self.by_role.items()},
            **self.requests(),
            "request_rows_in_use": rows_of_requests.size - rows_of_requests.available_size(),
            "step_cost_us": self.neutral.cost.prices() if self.scheduler else {},
            "problems": tree.check_integrity(),
            **{f"total_{name}": value for name, value in self.stats.as_dict().items()},
        }

    def requests(self) -> dict[str, int]:
        """Users' requests that run, and that wait (for a neutral pass or for room)."""
        queue = () if self.scheduler is None else self.scheduler.waiting_queue
        return {"running_requests": len(self.running_requests()), "waiting_requests": len(queue)}

    def _team_names(self) -> dict[str, list[str]]:
        teams: dict[str, list[str]] = {}
        for adapter in self.roles.adapters.values():
            teams.setdefault(adapter.team, []).append(adapter.name)
        return teams


def _raw_target_modules() -> set[str]:
    """``--lora-target-modules`` as the operator wrote it."""
    from sglang.srt.runtime_context import get_server_args

    return set(get_server_args().lora_target_modules or ())


def create(lora_manager: LoRAManager) -> Runtime | None:
    """Build this process's runtime, or return None where precache is off."""
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    if settings is None or settings.policy is None:
        return None
    num_adapters = len(lora_manager.loras)
    if lora_manager.max_loras_per_batch < num_adapters + 1:
        raise UnsupportedError(
            f"--max-loras-per-batch {lora_manager.max_loras_per_batch} with {num_adapters} "
            "adapters: adapter-free passes occupy one slot more; start with --max-loras-per-batch "
            f"{num_adapters + 1}."
        )
    return Runtime(settings, settings.policy, lora_manager)
