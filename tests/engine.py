"""The prefix cache with real pools, requests and runtime; only the model is missing.

`Engine` does what SGLang's scheduler does with a request, without a forward. In its place it
notes which token of which context each slot holds, and who wrote it. So every check can ask
whether the tree and the running requests point at the right rows, not only whether the
numbers add up.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins import fake_lora, fake_lora_manager, quiet_imports

with quiet_imports():
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.common import (
        checkpoint_kv_cache,
        evict_from_tree_cache,
        release_kv_cache,
    )
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.sampling.sampling_params import SamplingParams

    from precache_sglang import neutral as neutral_module
    from precache_sglang import runtime as runtime_module
    from precache_sglang.config import Settings
    from precache_sglang.methods import METHODS, Rows
    from precache_sglang.neutral import NeutralScheduler
    from precache_sglang.prefix_cache import PrecacheRadixCache
    from precache_sglang.request import state_of

VOCAB = 1000
CONTEXT = 64
NEUTRAL = "neutral"  # feeder of base KV from an adapter-free pass, where that matters
ROLES = {"plan": 1, "action": 2, "reflect": 3}  # role -> seed of its weights


class Engine:
    """One scheduler process without a model."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        method: str = "prelrshared",
        base_slots: int = 200,
        lr_slots: int = 400,
        num_requests: int = 16,
        piece: int | None = None,
        teams: dict[str, list[str]] | None = None,
        schedule: str = "lp",
        max_neutral_wait_ms: int = -1,
        own_base_fraction: float = 0.5,
    ) -> None:
        common = 99 if METHODS[method].rows is Rows.COMMON else None
        self.loras = {role: fake_lora(seed, a_seed=common) for role, seed in ROLES.items()}
        self.manager = fake_lora_manager(self.loras)
        settings = Settings(
            method=method,
            schedule=schedule,
            lr_tokens=lr_slots,
            teams=teams or {},
            max_neutral_wait_ms=max_neutral_wait_ms,
            own_base_fraction=own_base_fraction,
        )
        monkeypatch.setattr(runtime_module, "_current", None)
        self.runtime = runtime_module.Runtime(settings, METHODS[method], self.manager)
        self.rows = ReqToTokenPool(num_requests, CONTEXT, "cpu", enable_memory_saver=False)
        self.allocator = TokenToKVPoolAllocator(
            base_slots, torch.int64, "cpu", None, need_sort=False
        )
        self.runtime.build_pools(
            SimpleNamespace(
                req_to_token_pool=self.rows,
                max_total_num_tokens=base_slots,
                token_to_kv_pool=SimpleNamespace(mem_usage=0.0),
            )
        )
        self.tree = PrecacheRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
            ),
            self.runtime,
        )
        self.runtime.tree = self.tree
        self.running: list[Req] = []
        scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=self.running),
            waiting_queue=[],
            last_batch=None,
            cur_batch_for_debug=None,
            chunked_req=None,
            chunked_prefill_size=piece,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            model_config=SimpleNamespace(vocab_size=VOCAB),
            enable_overlap=False,
            spec_algorithm=None,
        )
        self.runtime.scheduler = scheduler
        self.runtime.neutral = NeutralScheduler(scheduler, self.runtime)
        monkeypatch.setattr(
            neutral_module, "ScheduleBatch", SimpleNamespace(init_new=self._neutral_batch)
        )
        self._serial = itertools.count()
        # slot -> (namespace, tokens up to it, who wrote it); present while it is allocated
        self.base = Content(self.allocator)
        self.lr = Content(self.runtime.lr_pool)

    # -- a request's life ----------------------------------------------------------

    def start(
        self,
        role: str | None,
        tokens: Sequence[int],
        extra_key: str | None = None,
        salt: str | None = None,
        impatient: bool = False,
    ) -> Req:
        """Admit a request: match and lock."""
        req = Req(
            f"request-{next(self._serial)}",
            "",
            array("q", tokens),
            SamplingParams(max_new_tokens=CONTEXT),
            vocab_size=VOCAB,
            cache_salt=salt,
        )
        req.precache = self.runtime.new_state(role)
        req.precache.impatient = impatient
        req.extra_key = self.runtime.namespace(req.precache, extra_key)
        self.admit(req)
        return req

    def admit(self, req: Req) -> None:
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)

    def extend(self, req: Req, to: int | None = None) -> None:
        """One prefill step, up to position `to` or to the prompt's end, and its checkpoint."""
        req.extend_end = len(req.full_untruncated_fill_ids) if to is None else to
        batch = SimpleNamespace(reqs=[req])
        self._allocate(batch)
        if req not in self.running:
            self.running.append(req)
        self._forward(batch, [(req, req.prefix_len, req.extend_end)])
        self._beside(batch, req.extend_len, is_extend=True)
        checkpoint_kv_cache(req, self.tree)

    def decode(self, req: Req, token: int) -> None:
        """Feed `token`, which the step before has sampled."""
        req.output_ids.append(token)
        position = req.kv.kv_committed_len
        self.rows.req_to_token[req.kv.req_pool_idx, position] = self._take_base(1).to(torch.int32)
        req.kv.kv_committed_len += 1
        req.kv.kv_allocated_len += 1
        batch = SimpleNamespace(reqs=[req])
        self.runtime.after_decode(batch)
        self._forward(batch, [(req, position, position + 1)])
        self._beside(batch, 1, is_extend=False)

    def finish(self, req: Req, last: int = 999) -> None:
        """End a request; `last` is the sampled token that has no KV."""
        req.output_ids.append(last)
        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.tree, checkpoint=True)
        self.running.remove(req)

    def abort(self, req: Req) -> None:
        release_kv_cache(req, self.tree, checkpoint=False)
        if req in self.running:
            self.running.remove(req)

    def retract(self, req: Req) -> None:
        self.abort(req)
        req.reset_for_retract()

    def turn(
        self,
        role: str | None,
        tokens: Sequence[int],
        answer: Sequence[int] = (),
        **kwargs: Any,
    ) -> Req:
        """A whole request, from admission to its end."""
        req = self.start(role, tokens, **kwargs)
        self.extend(req)
        for token in answer:
            self.decode(req, token)
        self.finish(req)
        return req

    def neutral_step(self) -> bool:
        """A step of the engine when nothing else is to be done. Whether there was one."""
        batch = self.runtime.neutral._build_any()
        if batch is not None:
            assert self.runtime.neutral.finish(batch)
        return batch is not None

    def drain(self) -> None:
        while self.neutral_step():
            pass

    def unload(self, role: str) -> None:
        del self.manager.loras[role], self.manager.lora_refs[role]
        self.runtime.sync_adapters()

    def load(self, role: str) -> None:
        self.manager.loras[role] = self.loras[role]
        self.manager.lora_refs[role] = SimpleNamespace(lora_name=role)
        self.runtime.sync_adapters()

    # -- what SGLang does in between -----------------------------------------------

    def _take_base(self, num_slots: int) -> torch.Tensor:
        evict_from_tree_cache(self.tree, num_slots)
        slots = self.allocator.alloc(num_slots)
        assert slots is not None, "the test needs a larger pool"
        return slots

    def _allocate(self, batch: Any) -> None:
        (req,) = batch.reqs
        self.runtime.before_extend(batch)
        with self.runtime.extend_layout(batch):
            fresh = not req.kv.holds_kv
            self.rows.alloc([req])
            table = self.rows.req_to_token[req.kv.req_pool_idx]
            if fresh:
                prefix = self.tree.prefix_device_indices(req)
                table[: req.prefix_len] = prefix.to(torch.int32)
            slots = self.runtime.base_slots(self._take_base, req.extend_len)
            table[req.prefix_len : req.extend_end] = slots.to(torch.int32)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end
        self.runtime.after_extend(batch)

    def _neutral_batch(self, reqs: list[Req], *_: Any) -> Any:
        batch = SimpleNamespace(
            reqs=reqs,
            forward_mode=SimpleNamespace(is_extend=lambda: True),
            is_empty=lambda: not reqs,
        )

        def prepare_for_extend() -> None:
            self._allocate(batch)
            self._forward(batch, [(reqs[0], reqs[0].prefix_len, reqs[0].extend_end)])

        batch.prepare_for_extend = prepare_for_extend
        return batch

    def _forward(self, batch: Any, spans: list[tuple[Req, int, int]]) -> None:
        write_slots = batch.precache_write_slots
        column = 0
        for req, start, end in spans:
            state = state_of(req)
            row = self.rows.req_to_token[req.kv.req_pool_idx].tolist()
            for position in range(start, end):
                if position >= state.base_len:
                    self.base.write(row[position], self.token(req, position, self.feeder(req)))
                if write_slots is not None:
                    for key, block in self.runtime.roles.blocks.items():
                        slot = int(write_slots[block, column])
                        if slot:
                            self.lr.write(slot, self.token(req, position, key))
                column += 1
            self.check_reads(req, end)

    def _beside(self, batch: Any, num_tokens: int, is_extend: bool) -> None:
        """The step's neutral tokens, as the schedule has it."""
        batch.extend_num_tokens = num_tokens
        batch.forward_mode = SimpleNamespace(is_extend=lambda: is_extend)
        runtime = self.runtime
        running = SimpleNamespace(reqs=[req for req in self.running if req not in batch.reqs])
        spans = list(runtime.neutral._neutral_spans(batch, running))
        runtime.add_neutral_spans(batch, spans)
        runtime.neutral_spans = spans
        column = num_tokens
        for span in spans:
            (space, tokens) = self._span_context(span)
            assert tokens[span.start : span.end] == tuple(span.tokens)
            for position, slot in enumerate(span.prefix.tolist()):
                assert self.base.read(slot) == (space, tokens[: position + 1], NEUTRAL)
            for position in range(span.start, span.end):
                before = tokens[: position + 1]
                self.base.write(int(span.slots[position - span.start]), (space, before, NEUTRAL))
                if batch.precache_write_slots is not None:
                    for key, block in runtime.roles.blocks.items():
                        if lr_slot := int(batch.precache_write_slots[block, column]):
                            self.lr.write(lr_slot, (space, before, key))
                column += 1
        runtime.end_forward()

    def _span_context(self, span: Any) -> tuple[Any, tuple[int, ...]]:
        if (job := span.state.job) is not None:
            return (job.key.extra_key, job.key.cache_salt), tuple(job.key.token_ids)
        (req,) = [s.req for s in self.runtime.shadows if s.state is span.state]
        return (req.extra_key, req.cache_salt), tuple(req.origin_input_ids + req.output_ids)

    def feeder(self, req: Req) -> str:
        state = state_of(req)
        return NEUTRAL if state.is_neutral and self.runtime.method.neutral_base else state.feeder

    @staticmethod
    def token(req: Req, position: int, writer: str) -> tuple[Any, ...]:
        tokens = tuple(req.origin_input_ids) + tuple(req.output_ids)
        return (req.extra_key, req.cache_salt), tokens[: position + 1], writer

    # -- checks --------------------------------------------------------------------

    def check_reads(self, req: Req, end: int) -> None:
        """Every row that the request attends to is of its own context."""
        state = state_of(req)
        base = self.rows.req_to_token[req.kv.req_pool_idx].tolist()
        own = self.runtime.req_to_lr[req.kv.req_pool_idx].tolist()
        for position in range(end):
            space, tokens, writer = self.base.read(base[position])
            assert (space, tokens) == self.token(req, position, "")[:2]
            if position >= state.base_len:
                assert writer in (self.feeder(req), NEUTRAL)
            elif self.runtime.method.neutral_base and state.job is not None:
                assert writer == NEUTRAL, "a neutral pass attends to neutral base KV alone"
            elif self.runtime.method.own_base and not state.impatient:
                assert writer in (self.feeder(req), NEUTRAL), "adapted base KV of another role"
            if state.own_key is not None:
                assert self.lr.read(own[position]) == self.token(req, position, state.own_key)

    def check_tree(self) -> None:
        """Every published row is of the node's own tokens, from the right pass."""

        def visit(node: Any, before: tuple[int, ...]) -> None:
            for child in node.children.values():
                tokens = before + tuple(child.key.token_ids)
                space = (child.key.extra_key, child.key.cache_salt)
                neutral = self.runtime.method.neutral_base and not child.provisional
                writer = NEUTRAL if neutral else child.feeder
                if child.provisional and child.feeder == "":
                    writer = NEUTRAL  # adapter-free, but over provisional base KV
                for index, slot in enumerate(child.value.tolist()):
                    expected = (space, tokens[: len(before) + index + 1], writer)
                    assert self.base.read(slot) == expected
                for index, slot in enumerate([] if child.own is None else child.own.tolist()):
                    expected = (space, tokens[: len(before) + index + 1], child.feeder)
                    assert self.base.read(slot) == expected
                for key, slots in child.slices.items():
                    for index, slot in enumerate(slots.tolist()):
                        expected = (space, tokens[: len(before) + index + 1], key)
                        assert self.lr.read(slot) == expected
                visit(child, tokens)

        visit(self.tree.root_node, ())

    def check(self) -> None:
        """Nothing is lost, nothing owned twice, every row where it belongs."""
        assert self.tree.check_integrity() == []
        owned = sum(
            max(0, req.kv.kv_allocated_len - req.kv.cache_protected_len) for req in self.running
        )
        assert (
            self.allocator.available_size()
            + self.tree.evictable_size()
            + self.tree.protected_size()
            + owned
            == self.allocator.size
        )
        self.check_tree()
        for req in self.running:
            self.check_reads(req, req.kv.kv_committed_len)
        for job in self.runtime.backlog.jobs:
            assert job.base_slots.numel() == job.end - job.done

    def check_idle(self) -> None:
        """At rest every slot is free, evictable, or held for a neutral pass."""
        assert self.running == []
        self.check()
        if not self.runtime.backlog.jobs:
            assert self.tree.protected_size() == 0
        assert not self.tree.admitted and not self.tree.retired
        assert not any(node.own_pins for node in self.tree.nodes())
        assert self.runtime.shadows == []
        assert self.tree.lr_pinned_size == 0
        assert all(not node.pins for node in self.tree.nodes())
        assert self.rows.available_size() == self.rows.size

    # -- looking around --------------------------------------------------------------

    def key_of(self, role: str) -> str:
        key = self.runtime.roles.adapters[role].rows_key
        assert key is not None
        return key

    def path(self, tokens: Sequence[int], role: str | None = None) -> list[Any]:
        """Nodes over `tokens` in the namespace of `role`; splits where they end."""
        space = self.runtime.namespace(self.runtime.new_state(role), None)
        return self.tree.walk(RadixKey(array("q", tokens), space))

    def covered(self, tokens: Sequence[int], role: str) -> list[tuple[int, bool]]:
        """(length, has a slice of `role`) of the nodes over `tokens`."""
        key = self.key_of(role)
        return [(len(node.key), key in node.slices) for node in self.path(tokens, role)]


class Content:
    """What each allocated slot of a pool holds. Refuses to free what is not allocated."""

    def __init__(self, pool: Any) -> None:
        self.content: dict[int, Any] = {}
        if pool is None:
            return
        alloc, free, clear = pool.alloc, pool.free, pool.clear

        def tracked_alloc(num_slots: int) -> torch.Tensor | None:
            slots = alloc(num_slots)
            if slots is not None:
                self.content.update(dict.fromkeys(slots.tolist()))
            return slots

        def tracked_free(slots: torch.Tensor) -> None:
            for slot in slots.tolist():
                assert slot in self.content, f"slot {slot} is freed twice"
                del self.content[slot]
            free(slots)

        def tracked_clear() -> None:
            self.content.clear()
            clear()

        pool.alloc, pool.free, pool.clear = tracked_alloc, tracked_free, tracked_clear

    def write(self, slot: int, what: Any) -> None:
        assert slot in self.content, f"slot {slot} is written without an owner"
        self.content[slot] = what

    def read(self, slot: int) -> Any:
        assert slot in self.content, f"slot {slot} is read without an owner"
        return self.content[slot]
