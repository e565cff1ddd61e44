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
===================  ======================================  ==========================

Slices are pinned apart from base slots: a path lock protects the base of every reader,
a pin only the rows of the reader's own adapter.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
        self.provisional_tokens = 0
        self.lr_tokens: Counter[str] = Counter()  # by slice key
        self.lr_evictable_size = 0
        self.lr_pinned_size = 0
        self.dead_keys: set[str] = set()
        self.runtime.backlog.forget()
        self.runtime.shadows.clear()
        self.runtime.peak_base = self.runtime.peak_rows = 0
        if self.runtime.lr_pool is not None:
            self.runtime.lr_pool.clear()

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        parent = super()._split_node(key, child, split_len)
        _init_node(parent, child.feeder)
        self.num_nodes += 1
        parent.provisional = child.provisional
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
    ) -> TreeNode:
        node = TreeNode()
        _init_node(node, feeder)
        node.provisional = provisional
        self.num_nodes += 1
        self.provisional_tokens += len(key) * provisional
        node.parent = parent
        node.key = key
        node.value = slots.clone()
        parent.children[key.child_key(self.page_size)] = node
        self.evictable_size_ += len(key)
        self._update_leaf_status(parent)
        self._update_leaf_status(node)
        return node

    def _delete_leaf(self, node: TreeNode) -> None:
        for key in list(node.slices):
            self.drop_slice(node, key)
        self.num_nodes -= 1
        self.provisional_tokens -= len(node.key) * node.provisional
        super()._delete_leaf(node)

    def make_neutral(self, node: TreeNode) -> None:
        """The provisional base KV of `node` has been replaced by that of a neutral pass."""
        node.provisional = False
        self.provisional_tokens -= len(node.key)

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
        node, offset = self.root_node, 0
        while offset < len(key):
            child = node.children.get(key.child_key_at(offset))
            if child is None or child.provisional:
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
        anchor = last = self.root_node
        for node in path:
            if node.provisional and state.job is not None:
                break  # a neutral pass starts where neutral base KV ends
            last = node
            node.last_access_time = now
            if lr_len == base_len and self._readable(node, state):
                lr_len += len(node.key)
                anchor = node
                if state.own_key is not None:
                    node.used[state.own_key] = now
            base_len += len(node.key)
        state.base_len, state.lr_len, state.anchor = base_len, lr_len, anchor
        return MatchResult(
            device_prefix_len=min(lr_len, limit),
            last_device_node=last,
            last_host_node=last,
            best_match_node=last,
            cache_protected_len=base_len,
        )

    def _readable(self, node: TreeNode, state: RequestState) -> bool:
        return state.own_key is None or state.own_key in node.slices

    def attach(self, req: Req) -> None:
        """Admit a matched request: pin the slices it reads and count its prompt."""
        state = state_of(req)
        if state.pinned:
            return
        state.pinned = True
        self._pin(state.anchor, state.own_key)
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
            # Neutral only if all before it is.
            provisional = self.method.neutral_base and not self.is_neutral(parent)
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
        for key, rows in state.rows.items():
            reader = req if key == state.own_key else None
            self.give_rows(path, key, rows, end, reader, self._is_as_read)

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
            if key not in node.slices and fits(node):
                self._add_slice(node, key, slots, now)
                continue
            if reader is not None and reader.kv.holds_kv and key in node.slices:
                table = self.runtime.req_to_lr[reader.kv.req_pool_idx]
                table[start:position] = node.slices[key].to(table.dtype)
            self.runtime.free_rows(slots)

    def _is_as_read(self, node: TreeNode) -> bool:
        """Whether rows of a pass that read the path down to `node` stay right.

        Not on neutral base below provisional base: that is replaced, and these are not.
        """
        return node.provisional or self.is_neutral(node)

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
            state.pinned = False
        state.tabled = False
        state.detached = False
        state.gave_way = False
        state.held_since = None

    # -- slices --------------------------------------------------------------

    def _add_slice(self, node: TreeNode, key: str, slots: torch.Tensor, now: float) -> None:
        node.slices[key] = slots.clone()
        node.used[key] = now
        self.lr_evictable_size += slots.numel()
        self.lr_tokens[key] += slots.numel()

    def drop_slice(self, node: TreeNode, key: str) -> int:
        slots = node.slices.pop(key)
        node.used.pop(key, None)
        assert not node.pins.get(key), "a pinned slice must not be dropped"
        self.lr_evictable_size -= slots.numel()
        self.lr_tokens[key] -= slots.numel()
        if not self.lr_tokens[key]:
            del self.lr_tokens[key]
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
            self.stats.evicted_slices += 1
        self.stats.evicted_rows += freed
        return freed

    def purge(self, key: str) -> None:
        """Drop every slice of an unloaded adapter; pinned ones go when they are unpinned."""
        pinned = False
        for node in self.nodes():
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

    # -- base slots under pressure --------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict leaves; if that is not enough, give up neutral work.

        What rides beside a turn goes first (the tokens are owed when the turn ends), the
        youngest before the others; then finished turns, oldest first.
        """
        freed = self.evict_leaves(params.num_tokens)
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
        """Unlocked tokens, and base slots of neutral passes beside running turns."""
        held = sum(shadow.num_slots for shadow in self.runtime.shadows)
        return int(super().evictable_size()) + held

    def protected_size(self) -> int:
        """Locked tokens, and base slots that wait for their neutral pass."""
        return super().protected_size() + self.runtime.backlog.held_base_slots()

    # -- integrity -----------------------------------------------------------

    def check_integrity(self) -> list[str]:
        """Recount everything; what SGLang's idle check reports as a leak. Empty if sound."""
        problems: list[str] = []
        evictable = pinned = num_nodes = provisional = 0
        lr_tokens: Counter[str] = Counter()
        seen: list[torch.Tensor] = []
        for node in self.nodes():
            num_nodes += 1
            provisional += len(node.key) * node.provisional
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
                if key not in node.slices:
                    problems.append(f"node {node.id}: pin on a missing slice {key}")
        counted = (num_nodes, self.total_size(), provisional, lr_tokens)
        kept = (self.num_nodes, self.num_tokens, self.provisional_tokens, self.lr_tokens)
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
