"""Prefix cache: SGLang's radix tree whose nodes also carry LR slices.

A node holds tokens, base slots and ``{slice key: LR slots}``. A slice covers its whole
node or is absent: nodes split where validity ends. Its namespace is the caller's
``extra_key`` and ``cache_salt`` plus the team, so roles of one team meet in one path.

Who owns what, besides SGLang's own rules for base slots:

===================  ======================================  ==========================
LR slots             owner                                   freed when
===================  ======================================  ==========================
of a slice           its node                                node or slice is evicted,
                                                             the adapter is unloaded
of a running pass    the request (``RequestState.rows``)     published, or released
of a finished turn   its neutral job (``NeutralJob.rows``)   published, or job dropped
of replaced base     `Retired`                               its last reader has ended
===================  ======================================  ==========================

Slices are pinned apart from base slots: a path lock protects the base of every reader,
a pin only the rows of the reader's own adapter.

A node may hold the base KV of its feeder's adapted pass as well (**own base**). Where the method
has it, a finished turn is a provisional node that its feeder reads exactly, its base slots being
the adapted ones. The neutral pass computes fresh ones, which take their place; the adapted ones
become the node's own base. That is pinned like a slice, and the first to be evicted.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from precache_sglang.backlog import Rebase
from precache_sglang.request import OwnedSlots, PromptCounts, RequestState, state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from precache_sglang.runtime import Runtime

# Evicted children that a node remembers, and tokens of each.
_MAX_EVICTED = 32
_EVICTED_TOKENS = 8


@dataclass(eq=False)
class Retired:
    """Slots that neutral ones have replaced while running requests (by id) still read them."""

    readers: set[int]
    base: torch.Tensor
    rows: torch.Tensor


class PrecacheRadixCache(RadixCache):
    """`RadixCache` with LR slices, two prefix lengths and neutral publishing."""

    def __init__(self, params: CacheInitParams, runtime: Runtime) -> None:
        self.runtime = runtime
        self.method = runtime.method
        self.stats = runtime.stats
        super().__init__(params)

    # -- nodes ---------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        _init_node(self.root_node, feeder="")
        self.num_nodes = 0
        self.provisional_tokens = 0  # that some role reads although they are not neutral
        self.owed_tokens = 0  # of turns that their own role reads exactly
        self.lr_tokens: Counter[str] = Counter()  # by slice key
        self.lr_evictable_size = 0
        self.lr_pinned_size = 0
        self.own_evictable_size = 0
        self.own_pinned_size = 0
        self.admitted: dict[int, RequestState] = {}  # users' running requests, by id
        self.retired: list[Retired] = []
        self.dead_keys: set[str] = set()
        self.runtime.backlog.forget()
        self.runtime.shadows.clear()
        self.runtime.peak_base = self.runtime.peak_rows = 0
        if self.runtime.lr_pool is not None:
            self.runtime.lr_pool.clear()

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        parent = super()._split_node(key, child, split_len)
        _init_node(parent, child.feeder)
        parent.provisional, parent.exact = child.provisional, child.exact
        parent.own_pins, parent.own_used = child.own_pins, child.own_used
        if child.own is not None:
            parent.own, child.own = child.own[:split_len].clone(), child.own[split_len:].clone()
        parent.born = child.born
        parent.evicted_rows = set(child.evicted_rows)
        self.num_nodes += 1
        for name, slots in child.slices.items():
            parent.slices[name] = slots[:split_len].clone()
            child.slices[name] = slots[split_len:].clone()
        parent.pins = dict(child.pins)
        parent.used = dict(child.used)
        return parent

    def append_leaf(
        self,
        parent: TreeNode,
        key: RadixKey,
        slots: torch.Tensor,
        feeder: str,
        provisional: bool = False,
        exact: bool = False,
    ) -> TreeNode:
        node = TreeNode()
        _init_node(node, feeder)
        node.provisional, node.exact = provisional, exact
        self.num_nodes += 1
        node.parent = parent
        node.key = key
        self._count_provisional(node, 1)
        node.value = slots.clone()
        parent.children[key.child_key(self.page_size)] = node
        parent.evicted_below.pop(key.child_key(self.page_size), None)
        self.evictable_size_ += len(key)
        self._update_leaf_status(parent)
        self._update_leaf_status(node)
        return node

    def _delete_leaf(self, node: TreeNode) -> None:
        for key in list(node.slices):
            self.drop_slice(node, key)
        if node.own is not None:
            self.drop_own(node)
        below = node.parent.evicted_below
        below[node.key.child_key(self.page_size)] = node.key.token_ids[:_EVICTED_TOKENS]
        if len(below) > _MAX_EVICTED:
            del below[next(iter(below))]
        self.num_nodes -= 1
        self._count_provisional(node, -1)
        super()._delete_leaf(node)

    def was_evicted(self, node: TreeNode, key: RadixKey, offset: int) -> bool:
        """Whether what follows in `key` from `offset` on, the end of `node`, had been cached.

        By its first few tokens, and those of the last few evicted children.
        """
        began = node.evicted_below.get(key.child_key_at(offset))
        return began is not None and key.token_ids[offset : offset + len(began)] == began

    def make_neutral(self, node: TreeNode) -> None:
        """The provisional base KV of `node` has been replaced by that of a neutral pass."""
        self._count_provisional(node, -1)
        node.provisional = False

    def _count_provisional(self, node: TreeNode, sign: int) -> None:
        if node.provisional and node.exact:
            self.owed_tokens += sign * len(node.key)
        elif node.provisional:
            self.provisional_tokens += sign * len(node.key)

    def walk(self, key: RadixKey) -> list[TreeNode]:
        """Nodes that hold the longest cached prefix of `key`, from the root down.

        Splits a node that `key` leaves half-way, so that the path ends exactly there.
        """
        path: list[TreeNode] = []
        node, offset = self.root_node, 0
        while offset < len(key):
            child = node.children.get(key.child_key_at(offset))
            if child is None:
                break
            matched = child.key.match_at(key, offset)
            if matched < len(child.key):
                child = self._split_node(child.key, child, matched)
            path.append(child)
            node, offset = child, offset + matched
            if matched < len(child.key):
                break
        return path

    def neutral_len(self, key: RadixKey) -> int:
        """Length of the longest cached prefix of `key` that is not provisional.

        Splits nothing.
        """
        return self.cached_len(key, with_provisional=False)

    def cached_len(self, key: RadixKey, with_provisional: bool = True) -> int:
        """Length of the longest cached prefix of `key`; splits nothing."""
        node, offset = self.root_node, 0
        while offset < len(key):
            child = node.children.get(key.child_key_at(offset))
            if child is None or (child.provisional and not with_provisional):
                break
            matched = child.key.match_at(key, offset)
            node, offset = child, offset + matched
            if matched < len(child.key):
                break
        return offset

    def is_neutral(self, node: TreeNode) -> bool:
        """Whether nothing on the path down to `node` is provisional."""
        while node is not self.root_node:
            if node.provisional:
                return False
            node = node.parent
        return True

    def readers(self, node: TreeNode) -> int:
        """Requests that read `node`; locks of neutral passes do not count."""
        readers: int = node.lock_ref
        for lock in self.runtime.neutral_locks():
            below = lock.node
            while below is not self.root_node and below is not node:
                below = below.parent
            readers -= below is node
        return readers

    def nodes(self) -> Iterator[TreeNode]:
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- matching ------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match a request: base KV as far as it goes, own LR rows as far as they go.

        ``device_prefix_len`` is where the request starts to compute. It is at most the
        key's limit (one token must be computed for its logits), but base KV counts to
        its true end: tokens in between are replayed, not written again.
        """
        if params.req is None or self.disable:
            return super().match_prefix(params)
        state = state_of(params.req)
        limit = len(params.key)
        key = RadixKey(params.key.token_ids, params.key.extra_key, cache_salt=params.key.cache_salt)
        now = time.monotonic()
        path = self.walk(key)
        base_len = lr_len = 0
        exact = True
        anchor = last = self.root_node
        for node in path:
            if node.provisional and not self._may_read(node, state):
                break
            exact = exact and not self.is_read_provisionally(node, state)
            last = node
            node.last_access_time = now
            if lr_len == base_len and self._readable(node, state):
                lr_len += len(node.key)
                anchor = node
                if state.own_key is not None:
                    node.used[state.own_key] = now
            base_len += len(node.key)
        state.base_len, state.lr_len, state.anchor = base_len, lr_len, anchor
        state.exact = exact
        return MatchResult(
            device_prefix_len=min(lr_len, limit),
            last_device_node=last,
            last_host_node=last,
            best_match_node=last,
            cache_protected_len=base_len,
        )

    def _may_read(self, node: TreeNode, state: RequestState) -> bool:
        """Whether a request may read the base KV of a provisional node."""
        if state.job is not None:
            return False  # a neutral pass starts where neutral base KV ends
        return not self.method.own_base or state.impatient or self._is_own(node, state)

    def is_read_provisionally(self, node: TreeNode, state: RequestState) -> bool:
        """Whether the request reads base KV of `node` that it should not, were there time."""
        return bool(node.provisional) and not self._is_own(node, state)

    def _is_own(self, node: TreeNode, state: RequestState) -> bool:
        """Whether the adapted base KV of `node` is what the request is to read."""
        return self.method.own_base and node.exact and node.feeder == state.feeder

    def first_unreadable(self, key: RadixKey, state: RequestState) -> int | None:
        """Position of the first cached token of `key` that has to be rebased before a request
        may read it; None if it may read all. Splits nothing.
        """
        node, offset = self.root_node, 0
        while offset < len(key):
            child = node.children.get(key.child_key_at(offset))
            if child is None:
                break
            if child.provisional and not self._may_read(child, state):
                return offset
            matched = child.key.match_at(key, offset)
            node, offset = child, offset + matched
            if matched < len(child.key):
                break
        return None

    def _readable(self, node: TreeNode, state: RequestState) -> bool:
        return state.own_key is None or state.own_key in node.slices

    def attach(self, req: Req) -> None:
        """Admit a matched request: pin the slices it reads and count its prompt."""
        state = state_of(req)
        if state.pinned:
            return
        state.pinned = True
        self._pin(state.anchor, state.own_key)
        state.read_node = req.last_node
        if state.job is None:
            self.admitted[id(state)] = state
            self._pin_own(state)
        if state.counts is None:
            state.counts = self._count_prompt(req, state)

    def own_slots(self, state: RequestState) -> torch.Tensor:
        """``[lr_len]`` LR slots of the request's adapter on its matched path."""
        parts: list[torch.Tensor] = []
        node = state.anchor
        while node is not self.root_node:
            parts.append(node.slices[state.own_key])
            node = node.parent
        return torch.cat(parts[::-1]) if parts else torch.empty(0, dtype=torch.int64)

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        return self.slots_read(req)[: req.prefix_len]

    def slots_read(self, req: Req) -> torch.Tensor:
        """``[base_len]`` int64 base slots that an admitted request reads on its matched path."""
        state = state_of(req)
        parts: list[torch.Tensor] = []
        node = req.last_node
        while node is not self.root_node:
            is_own = node.own is not None and self._is_own(node, state)
            parts.append(node.own if is_own else node.value)
            node = node.parent
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat(parts[::-1])

    def _count_prompt(self, req: Req, state: RequestState) -> PromptCounts:
        prompt_len = len(req.origin_input_ids)
        counts = PromptCounts()
        read = min(req.prefix_len, prompt_len)
        nodes: list[TreeNode] = []
        node = req.last_node
        while node is not self.root_node:
            nodes.append(node)
            node = node.parent
        position = 0
        for node in reversed(nodes):
            used = max(0, min(position + len(node.key), read) - position)
            if node.feeder == state.feeder:
                counts.own += used
            else:
                counts.shared += used
            position += len(node.key)
        counts.replayed = max(0, min(state.base_len, prompt_len) - read)
        counts.computed = prompt_len - read - counts.replayed
        return counts

    # -- publishing ----------------------------------------------------------

    def checkpoint(self, req: Req, *, up_to: int) -> None:
        """Publish tokens ``[0, up_to)`` of a request, as far as the method lets it.

        An adapted pass of a method with neutral base publishes nothing while it runs.
        When it ends, its own rows over cached tokens (replay) go to the tree and the
        rest of the turn becomes a neutral job.
        """
        if self.disable:
            return
        state = state_of(req)
        key = RadixKey(
            req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt
        )
        if _is_stub(req):
            return
        if state.detached:
            # Replayed rows were computed from the tree's base and are as good as any. While
            # the request runs it reads them, and the tree might evict them.
            if req.finished():
                self._attach_rows(self.walk(key), state, state.base_len)
            return
        if state.is_neutral or not self.method.neutral_base:
            self._publish(req, state, key)
        elif req.finished():
            path = self.walk(key)
            self._attach_rows(path, state, state.base_len)
            self.runtime.backlog.add_turn(req, state, key)

    def _publish(self, req: Req, state: RequestState, key: RadixKey) -> None:
        """Move the request's base slots and rows over `key` into the tree."""
        end = len(key)
        owned_from = req.kv.cache_protected_len
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        path = self.walk(key)
        matched = sum(len(node.key) for node in path)
        if matched > owned_from and not self._same_base(path, owned_from, state):
            # Two roles fed the same new tokens at once and the other was first. Its rows
            # stay; ours were computed from other base KV and must not be mixed with them.
            state.detached = True
            self.stats.conflicts += 1
            self.checkpoint(req, up_to=end)
            return
        if matched < end:
            slots = row[matched:end].to(torch.int64)
            parent = path[-1] if path else self.root_node
            # Neutral only if all before it is, and was when the request read it.
            provisional = self.method.neutral_base and not (state.exact and self.is_neutral(parent))
            path.append(self.append_leaf(parent, key[matched:], slots, state.feeder, provisional))
            if provisional:
                self.runtime.backlog.rebases.append(Rebase(key, state.team))
        if matched > owned_from:
            # The same pass was published meanwhile: keep the tree's copy, free ours.
            self.token_to_kv_pool_allocator.free_segment(
                row[owned_from:matched], start_pos=owned_from
            )
            row[owned_from:matched] = self.path_slots(path)[owned_from:matched].to(row.dtype)
        self._attach_rows(path, state, end, req)
        last = path[-1] if path else self.root_node
        if end > owned_from:  # else a chunk that ends inside the replayed prefix
            req.kv.cache_protected_len = end
            lock = self.lock(last)
            self.unlock(req.lock)
            req.lock, req.last_node = lock, last
        if (
            state.pinned
            and end > state.lr_len  # else tokens that are computed again for their logprobs
            and all(self._readable(node, state) for node in path)
        ):
            self._pin(last, state.own_key)
            self._unpin(state.anchor, state.own_key)
            state.anchor = last

    def _same_base(self, path: list[TreeNode], start: int, state: RequestState) -> bool:
        """Whether the base KV over the path from `start` on is what `state`'s pass computes."""
        neutral = self.method.neutral_base
        position = 0
        for node in path:
            position += len(node.key)
            if position > start and (node.provisional if neutral else node.feeder != state.feeder):
                return False
        return True

    def _attach_rows(
        self, path: list[TreeNode], state: RequestState, end: int, req: Req | None = None
    ) -> None:
        """Give the tree the owned rows over ``path`` up to `end`; first writer wins.

        Rows for which the node has a slice already are freed, and the request's own
        table is pointed at the tree's.
        """

        def fits(node: TreeNode) -> bool:
            return self._is_as_read(node, state)

        for key, rows in state.rows.items():
            reader = req if key == state.own_key else None
            self.give_rows(path, key, rows, end, reader, fits)

    def give_rows(
        self,
        path: list[TreeNode],
        key: str,
        rows: OwnedSlots,
        end: int,
        reader: Req | None = None,
        fits: Callable[[TreeNode], bool] = lambda node: True,
    ) -> None:
        """Attach ``rows`` (from their start up to `end`) as slices of `key` on `path`.

        Only to nodes that they fit; the others' are freed.
        """
        if key in self.dead_keys:
            return  # The adapter is gone; the owner frees them when it is released.
        now = time.monotonic()
        position = 0
        for node in path:
            start, position = position, position + len(node.key)
            if key in node.slices:
                # Slices below are of use only together with this one: it must not be older.
                node.used[key] = now
            if start < rows.start or position > end or position > rows.end:
                continue
            slots = rows.take_until(position)
            assert slots.numel() == len(node.key), "rows start at a node's edge"
            # Beside a slice that is still read, this one cannot be evicted.
            has_room = not node.pins.get(key) or self.runtime.rows_to_spare() >= slots.numel()
            if key not in node.slices and fits(node) and has_room:
                self._add_slice(node, key, slots, now)
                continue
            if reader is not None and reader.kv.holds_kv and key in node.slices:
                table = self.runtime.req_to_lr[reader.kv.req_pool_idx]
                table[start:position] = node.slices[key].to(table.dtype)
            self.runtime.free_rows(slots)

    def _is_as_read(self, node: TreeNode, state: RequestState) -> bool:
        """Whether rows of a pass that read the path down to `node` are right for it.

        Not on neutral base below provisional base: that is replaced, and these are not. Nor on
        base that was provisional when the pass read it and has been replaced since.
        """
        return bool(node.provisional) or (state.exact and self.is_neutral(node))

    def path_slots(self, path: list[TreeNode]) -> torch.Tensor:
        """``[tokens]`` int64 base slots of a path that starts below the root."""
        if not path:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat([node.value for node in path])

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """The request's row is gone: free the rows it still owns and unpin its slices."""
        state = state_of(req)
        for rows in state.rows.values():
            self.runtime.free_rows(rows.slots())
        state.rows = {}
        if state.shadow is not None:
            state.shadow.release()
        if state.pinned:
            self._unpin(state.anchor, state.own_key)
            self._unpin_own(state)
            state.pinned = False
        self._let_go(state)
        state.impatient = False
        state.tabled = False
        state.detached = False
        state.gave_way = False
        state.held_since = None

    # -- slices --------------------------------------------------------------

    def _add_slice(self, node: TreeNode, key: str, slots: torch.Tensor, now: float) -> None:
        node.slices[key] = slots.clone()
        node.used[key] = now
        node.evicted_rows.discard(key)
        if node.pins.get(key):  # by readers of a slice that this one replaces
            self.lr_pinned_size += slots.numel()
        else:
            self.lr_evictable_size += slots.numel()
        self.lr_tokens[key] += slots.numel()

    def take_slice(self, node: TreeNode, key: str) -> torch.Tensor:
        """Take a slice off its node; its slots are the caller's. Pins stay."""
        slots: torch.Tensor = node.slices.pop(key)
        node.used.pop(key, None)
        if node.pins.get(key):
            self.lr_pinned_size -= slots.numel()
        else:
            self.lr_evictable_size -= slots.numel()
        self.lr_tokens[key] -= slots.numel()
        if not self.lr_tokens[key]:
            del self.lr_tokens[key]
        return slots

    def drop_slice(self, node: TreeNode, key: str) -> int:
        assert not node.pins.get(key), "a pinned slice must not be dropped"
        slots = self.take_slice(node, key)
        self.runtime.free_rows(slots)
        return slots.numel()

    def _pin(self, node: TreeNode, key: str | None) -> None:
        if key is None:
            return
        while node is not self.root_node:
            if not node.pins.get(key):
                self.lr_evictable_size -= len(node.key)
                self.lr_pinned_size += len(node.key)
            node.pins[key] = node.pins.get(key, 0) + 1
            node = node.parent

    def _unpin(self, node: TreeNode, key: str | None) -> None:
        if key is None:
            return
        while node is not self.root_node:
            parent = node.parent
            node.pins[key] -= 1
            if not node.pins[key]:
                del node.pins[key]
                if key in node.slices:  # else it was replaced, and nothing by nothing
                    self.lr_evictable_size += len(node.key)
                    self.lr_pinned_size -= len(node.key)
                    if key in self.dead_keys:
                        self.drop_slice(node, key)
            node = parent

    def evict_rows(self, num_slots: int) -> int:
        """Evict unpinned slices, least recently used first and deepest among equals.

        Returns the number of LR slots freed, at least `num_slots` if there were so many.
        """
        heap: list[tuple[float, int, int, str, TreeNode]] = []
        stack = [(node, 1) for node in self.root_node.children.values()]
        while stack:
            node, depth = stack.pop()
            stack.extend((child, depth + 1) for child in node.children.values())
            for key in node.slices:
                if not node.pins.get(key):
                    heap.append((node.used.get(key, 0.0), -depth, node.id, key, node))
        heapq.heapify(heap)
        freed = 0
        while heap and freed < num_slots:
            *_, key, node = heapq.heappop(heap)
            freed += self.drop_slice(node, key)
            node.evicted_rows.add(key)
            self.stats.evicted_slices += 1
        self.stats.evicted_rows += freed
        return freed

    def purge(self, key: str) -> None:
        """Drop every slice of an unloaded adapter; pinned ones go when they are unpinned."""
        pinned = False
        for node in self.nodes():
            if node.feeder == key and not node.own_pins:  # nobody is left to read its own base
                self._count_provisional(node, -1)
                node.exact = False
                self._count_provisional(node, 1)
                if node.own is not None:
                    self.drop_own(node)
            if key in node.slices:
                if node.pins.get(key):
                    pinned = True
                else:
                    self.drop_slice(node, key)
        self.runtime.backlog.purge(key)
        if pinned or self.runtime.rows_in_flight(key):
            self.dead_keys.add(key)

    def revive(self, key: str) -> None:
        """The same adapter content was loaded again: its remaining slices are valid."""
        self.dead_keys.discard(key)

    # -- own base --------------------------------------------------------------

    def keep_own(self, node: TreeNode, slots: torch.Tensor) -> None:
        """Give `node` the base slots of its feeder's adapted pass as its own base."""
        assert node.own is None and slots.numel() == len(node.key)
        node.own = slots.clone()
        node.own_used = time.monotonic()
        if node.own_pins:
            self.own_pinned_size += slots.numel()
        else:
            self.own_evictable_size += slots.numel()

    def give_own(self, path: list[TreeNode], feeder: str, slots: torch.Tensor, start: int) -> None:
        """Attach the base slots of an adapted pass, from `start` on, to nodes its role fed.

        The others' are freed.
        """
        spare = []
        position = 0
        for node in path:
            first, position = position, position + len(node.key)
            if position <= start or not slots.numel():
                continue
            assert first >= start, "own base starts at a node's edge"
            mine, slots = slots[: len(node.key)], slots[len(node.key) :]
            is_missing = node.own is None and not node.provisional and node.feeder == feeder
            if is_missing and self.room_for_own(len(mine)):
                node.exact = True
                self.keep_own(node, mine)
            else:
                spare.append(mine)
        self.token_to_kv_pool_allocator.free(torch.cat([*spare, slots]))

    def drop_own(self, node: TreeNode) -> int:
        """Free the own base of `node`; its feeder reads the neutral base from now on."""
        assert not node.own_pins, "own base that somebody reads must not be dropped"
        slots, node.own = node.own, None
        self.own_evictable_size -= slots.numel()
        self.token_to_kv_pool_allocator.free(slots)
        return int(slots.numel())

    def own_size(self) -> int:
        """Tokens that have own base beside their neutral base."""
        return self.own_evictable_size + self.own_pinned_size

    def room_for_own(self, num_tokens: int) -> bool:
        """Make room within the share that own base may take; False if there is too little."""
        unused = self.token_to_kv_pool_allocator.available_size() + self.evictable_size()
        limit = int(self.runtime.settings.own_base_fraction * (unused + self.own_pinned_size))
        missing = self.own_size() + num_tokens - limit
        if missing > self.own_evictable_size:
            return False
        self.evict_own(missing)
        return True

    def evict_own(self, num_tokens: int) -> int:
        """Evict own base that nobody reads, least recently used first; tokens freed."""
        if num_tokens <= 0 or not self.own_evictable_size:
            return 0
        found = [node for node in self.nodes() if node.own is not None and not node.own_pins]
        # The deepest of a path first: a reader stops to find own base at the first gap anyway.
        found.sort(key=lambda node: (node.own_used, -node.id))
        freed = 0
        for node in found:
            if freed >= num_tokens:
                break
            freed += self.drop_own(node)
        self.stats.evicted_own += freed
        return freed

    def evict_own_of(self, req: Req) -> None:
        """Evict what the matched `req` would pin: it reads the neutral base there."""
        for node in self.own_to_pin(req):
            self.stats.evicted_own += self.drop_own(node)

    def own_to_pin(self, req: Req) -> list[TreeNode]:
        """Nodes whose own base is evictable now and will be pinned when the matched `req` runs."""
        state = state_of(req)
        nodes: list[TreeNode] = []
        node = req.last_node
        while state.job is None and node is not self.root_node:
            if node.own is not None and not node.own_pins and self._is_own(node, state):
                nodes.append(node)
            node = node.parent
        return nodes

    def _pin_own(self, state: RequestState) -> None:
        """Pin base KV of its own adapted passes that an admitted request reads."""
        state.own_spans = []
        now = time.monotonic()
        node, end = state.read_node, state.base_len
        while node is not self.root_node:
            if self._is_own(node, state) and (node.provisional or node.own is not None):
                state.own_spans.append((end - len(node.key), end))
                node.own_used = now
                self._add_own_pin(node, 1)
            end -= len(node.key)
            node = node.parent

    def _unpin_own(self, state: RequestState) -> None:
        spans, state.own_spans = state.own_spans, []
        if not spans:
            return
        node, end = state.read_node, state.base_len
        while node is not self.root_node:
            start = end - len(node.key)
            if any(first <= start and end <= last for first, last in spans):
                self._add_own_pin(node, -1)
            node, end = node.parent, start

    def _add_own_pin(self, node: TreeNode, count: int) -> None:
        was_pinned = node.own_pins > 0
        node.own_pins += count
        is_pinned = node.own_pins > 0
        if node.own is not None and was_pinned != is_pinned:
            moved = len(node.key) if is_pinned else -len(node.key)
            self.own_pinned_size += moved
            self.own_evictable_size -= moved

    # -- replacing what is read --------------------------------------------------

    def retire(self, node: TreeNode, base: torch.Tensor, rows: torch.Tensor) -> None:
        """Slots of `node` that others have taken the place of: free them once nobody reads them."""
        readers = set()
        for name, state in self.admitted.items():
            read = state.read_node
            while read is not self.root_node and read is not node:
                read = read.parent
            if read is node:
                readers.add(name)
        self._free_retired(Retired(readers, base, rows))

    def _free_retired(self, retired: Retired) -> None:
        if retired.readers:
            if retired not in self.retired:
                self.retired.append(retired)
            return
        if retired in self.retired:
            self.retired.remove(retired)
        self.token_to_kv_pool_allocator.free(retired.base)
        self.runtime.free_rows(retired.rows)

    def _let_go(self, state: RequestState) -> None:
        """A request has ended, and with it what it read."""
        if self.admitted.pop(id(state), None) is None:
            return
        for retired in list(self.retired):
            retired.readers.discard(id(state))
            self._free_retired(retired)

    # -- base slots under pressure --------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict own base, then leaves; if that is not enough, give up neutral work.

        What rides beside a turn goes first (the tokens are owed when the turn ends), the
        youngest before the others; then finished turns, oldest first.
        """
        freed = self.evict_own(params.num_tokens)
        freed += self.evict_leaves(params.num_tokens - freed)
        while freed < params.num_tokens and (given := self._give_up_neutral_work()) is not None:
            freed += given
            # Its lock is gone too: what it stood on may be evictable now.
            freed += self.evict_leaves(max(0, params.num_tokens - freed))
        return EvictResult(num_tokens_evicted=freed)

    def _give_up_neutral_work(self) -> int | None:
        """Give up one neutral pass; return the base slots freed, None if there is no pass."""
        if not self.runtime.shadows:
            return self.runtime.backlog.drop_oldest()
        shadow = self.runtime.shadows[-1]
        held = shadow.num_slots
        # Begun again it would be taken again, and its tokens computed many times.
        state_of(shadow.req).gave_way = True
        shadow.release()
        return held

    def evict_leaves(self, num_tokens: int) -> int:
        """Evict up to `num_tokens` cached tokens that nobody has locked; return how many."""
        if num_tokens <= 0:
            return 0
        before = self.num_nodes
        freed: int = super().evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted
        self.stats.evicted_base += freed
        self.stats.evicted_nodes += before - self.num_nodes
        return freed

    @property
    def num_tokens(self) -> int:
        """Tokens in the tree; `total_size` without counting them."""
        return int(self.evictable_size_ + self.protected_size_)

    def evictable_size(self) -> int:
        """Unlocked tokens, own base that nobody reads, and base slots of neutral passes beside
        running turns.
        """
        held = sum(shadow.num_slots for shadow in self.runtime.shadows)
        return int(super().evictable_size()) + self.own_evictable_size + held

    def protected_size(self) -> int:
        """Locked tokens, own base in use, and base slots that wait for their neutral pass or
        for their last reader.
        """
        held = self.own_pinned_size + self.runtime.backlog.held_base_slots()
        held += sum(retired.base.numel() for retired in self.retired)
        return int(super().protected_size()) + held

    # -- integrity -----------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Recount everything; what SGLang's idle check reports as a leak. Empty if sound."""
        problems: list[str] = []
        evictable = pinned = num_nodes = 0
        own = {True: 0, False: 0}
        provisional = {True: 0, False: 0}
        lr_tokens: Counter[str] = Counter()
        seen: list[torch.Tensor] = []
        for node in self.nodes():
            num_nodes += 1
            provisional[node.exact] += len(node.key) * node.provisional
            if node.own is not None:
                own[node.own_pins > 0] += node.own.numel()
            for key, slots in node.slices.items():
                if slots.numel() != len(node.key):
                    problems.append(f"node {node.id}: slice {key} covers {slots.numel()} tokens")
                seen.append(slots)
                lr_tokens[key] += slots.numel()
                if node.pins.get(key):
                    pinned += slots.numel()
                else:
                    evictable += slots.numel()
            for key in node.pins:
                if key not in node.slices and not self.retired:
                    problems.append(f"node {node.id}: pin on a missing slice {key}")
        is_provisional = (provisional[False], provisional[True])
        counted = (num_nodes, self.total_size(), is_provisional, lr_tokens)
        is_provisional = (self.provisional_tokens, self.owed_tokens)
        kept = (self.num_nodes, self.num_tokens, is_provisional, self.lr_tokens)
        if counted != kept:
            problems.append(f"nodes, tokens, provisional, rows: {kept}, counted {counted}")
        pool = self.runtime.lr_pool
        if pool is None:
            return problems
        if (evictable, pinned) != (self.lr_evictable_size, self.lr_pinned_size):
            problems.append(
                f"lr counters: evictable={self.lr_evictable_size} pinned={self.lr_pinned_size}, "
                f"counted evictable={evictable} pinned={pinned}"
            )
        if (own[False], own[True]) != (self.own_evictable_size, self.own_pinned_size):
            problems.append(
                f"own base counters: evictable={self.own_evictable_size} "
                f"pinned={self.own_pinned_size}, counted {own}"
            )
        held = self.runtime.rows_held()
        available = pool.available_size()
        if available + evictable + pinned + held != pool.size:
            problems.append(
                f"[lr] total={pool.size}, {available=}, {evictable=}, {pinned=}, {held=}"
            )
        if seen and torch.cat(seen).unique().numel() != evictable + pinned:
            problems.append("[lr] a slot is in two slices")
        return problems


def _is_stub(req: Req) -> bool:
    """Whether SGLang refused the request: it then runs one token that nobody sent."""
    return isinstance(req.finished_reason, FINISH_ABORT) and len(req.origin_input_ids) == 1


def _init_node(node: TreeNode, feeder: str) -> None:
    node.slices = {}  # slice key -> [len(node.key)] LR slots
    node.pins = {}  # slice key -> running readers
    node.used = {}  # slice key -> time of last use
    node.feeder = feeder  # content of the adapter that fed the tokens first; "" for none
    node.provisional = False  # base KV of an adapted pass where it is to be neutral
    node.exact = False  # its feeder's adapted base KV is what its feeder is to read
    node.own = None  # [len(node.key)] base slots of the adapted pass, beside neutral ones
    node.own_pins = 0  # running requests that read base KV of the adapted pass
    node.own_used = 0.0  # time of last use
    # For `precache_sglang.match`, which tells users why something is missing:
    node.born = time.monotonic()
    node.evicted_rows = set()  # slice keys whose slice here was evicted
    node.evicted_below = {}  # child key -> first tokens, of the last few evicted children
