"""The prefix cache with real pools, requests and runtime; only the model is missing.

`Engine` does what SGLang's scheduler does with a request, without a forward. In its place it
notes which token of which context each slot holds, and who wrote it. So every check can ask
whether the tree and the running requests point at the right rows, not only whether the
numbers add up.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from standins import fake_lora, fake_lora_manager, quiet_imports

with quiet_imports():
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.common import (
        checkpoint_kv_cache,
        evict_from_tree_cache,
        release_kv_cache,
    )
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.runtime_context import get_context
    from sglang.srt.sampling.sampling_params import SamplingParams

    from precache_sglang import neutral as neutral_module
    from precache_sglang import runtime as runtime_module
    from precache_sglang.config import Settings
    from precache_sglang.methods import METHODS, Rows
    from precache_sglang.neutral import NeutralJob, NeutralScheduler
    from precache_sglang.prefix_cache import PrecacheRadixCache
    from precache_sglang.request import state_of

VOCAB = 1000
CONTEXT = 64
NEUTRAL = "neutral"  # feeder of base KV from an adapter-free pass, where that matters
ROLES = {"plan": 1, "action": 2, "reflect": 3}  # role -> seed of its weights


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def sglang_settings() -> Iterator[None]:
    """SGLang's record of its arguments, which releasing a request reads."""
    with quiet_imports(), get_context().override_server_args():
        yield


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
    ) -> None:
        common = 99 if METHODS[method].rows is Rows.COMMON else None
        self.loras = {role: fake_lora(seed, a_seed=common) for role, seed in ROLES.items()}
        self.manager = fake_lora_manager(self.loras)
        settings = Settings(method=method, lr_tokens=lr_slots, teams=teams or {})
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
        self.base = Shadow(self.allocator)
        self.lr = Shadow(self.runtime.lr_pool)

    # -- a request's life ----------------------------------------------------------

    def start(
        self,
        role: str | None,
        tokens: Sequence[int],
        extra_key: str | None = None,
        salt: str | None = None,
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

    def neutral_step(self) -> None:
        batch = self.runtime.neutral._build(self.runtime.backlog.jobs[0])
        if batch is not None:
            assert self.runtime.neutral.finish(batch)

    def drain(self) -> None:
        while self.runtime.backlog.jobs:
            self.neutral_step()

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
        batch = SimpleNamespace(reqs=reqs)

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
            elif self.runtime.method.neutral_base:
                assert writer == NEUTRAL
            if state.own_key is not None:
                assert self.lr.read(own[position]) == self.token(req, position, state.own_key)

    def check_tree(self) -> None:
        """Every published row is of the node's own tokens, from the right pass."""

        def visit(node: Any, before: tuple[int, ...]) -> None:
            for child in node.children.values():
                tokens = before + tuple(child.key.token_ids)
                space = (child.key.extra_key, child.key.cache_salt)
                writer = NEUTRAL if self.runtime.method.neutral_base else child.feeder
                for index, slot in enumerate(child.value.tolist()):
                    expected = (space, tokens[: len(before) + index + 1], writer)
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


class Shadow:
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


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    return lambda *args, **kwargs: Engine(monkeypatch, *args, **kwargs)


TEXT = list(range(100, 120))  # twenty tokens of some context


# -- matching ------------------------------------------------------------------------


def test_two_roles_meet_in_one_path(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    req = engine.start("action", TEXT[:15])
    state = state_of(req)
    assert (state.base_len, state.lr_len, req.prefix_len) == (10, 10, 10)
    engine.extend(req)
    counts = state.counts
    assert counts is not None
    assert (counts.shared, counts.own, counts.replayed, counts.computed) == (10, 0, 0, 5)
    engine.finish(req)
    assert len(engine.path(TEXT[:15])) == 2 and len(list(engine.tree.nodes())) == 2
    engine.check_idle()


def test_a_role_reads_what_it_fed_itself_as_its_own(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10], answer=TEXT[10:12])
    req = engine.start("plan", TEXT[:15])
    engine.extend(req)
    counts = state_of(req).counts
    assert counts is not None
    assert (counts.shared, counts.own, counts.replayed, counts.computed) == (0, 12, 0, 3)
    engine.finish(req)
    engine.check_idle()


@pytest.mark.parametrize("method", ["fullshared", "nonshared"])
def test_methods_of_complete_kv_run_without_an_lr_pool(
    make: Callable[..., Engine], method: str
) -> None:
    engine = make(method)
    assert engine.runtime.lr_pool is None
    engine.turn("plan", TEXT[:10])
    req = engine.start("action", TEXT[:15])
    assert state_of(req).base_len == (10 if method == "fullshared" else 0)
    engine.extend(req)
    engine.finish(req)
    assert engine.tree.check_integrity() == []
    engine.check_tree()


def test_roles_of_one_common_a_read_the_same_rows(make: Callable[..., Engine]) -> None:
    engine = make("baselrshared")
    engine.turn("plan", TEXT[:10])
    req = engine.start("action", TEXT[:15])
    assert state_of(req).lr_len == 10
    engine.extend(req)
    engine.finish(req)
    assert engine.tree.lr_evictable_size == 15
    engine.check_idle()


def test_own_rows_end_at_the_first_gap_while_base_goes_on(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    for end in (5, 10, 15):
        engine.turn("plan", TEXT[:end])
    middle = engine.path(TEXT[:15])[1]
    engine.tree._drop_slice(middle, engine.key_of("action"))
    req = engine.start("action", TEXT[:20])
    state = state_of(req)
    assert (state.lr_len, state.base_len, req.prefix_len) == (5, 15, 5)
    assert req.kv.cache_protected_len == 15
    engine.extend(req)
    assert engine.covered(TEXT, "action") == [(5, True), (5, True), (5, True), (5, True)]
    counts = state.counts
    assert counts is not None and (counts.replayed, counts.computed) == (10, 5)
    engine.finish(req)
    engine.check_idle()


def test_a_role_without_rows_replays_and_writes_no_base(make: Callable[..., Engine]) -> None:
    engine = make("baseshared")
    engine.turn("plan", TEXT[:10])
    in_use = engine.allocator.size - engine.allocator.available_size()
    req = engine.start("action", TEXT[:10])
    assert (state_of(req).lr_len, state_of(req).base_len) == (0, 10)
    engine.extend(req)
    assert engine.allocator.size - engine.allocator.available_size() == in_use
    engine.finish(req)
    assert engine.covered(TEXT[:10], "action") == [(10, True)]
    engine.check_idle()


def test_a_replay_may_end_within_a_chunk(make: Callable[..., Engine]) -> None:
    engine = make("baseshared")
    engine.turn("plan", TEXT[:10])
    req = engine.start("action", TEXT)
    for end in (3, 8, 13, 20):
        engine.extend(req, to=end)
        engine.check()
    assert sum(length for length, found in engine.covered(TEXT, "action") if found) == 20
    engine.finish(req)
    engine.check_idle()


@pytest.mark.parametrize("role", ["plan", "action", None])
def test_a_cached_prompt_still_computes_its_last_token(
    make: Callable[..., Engine], role: str | None
) -> None:
    """Its logits are needed. Its base KV is there: it is replayed, not written again."""
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10], answer=TEXT[10:14])
    in_use = engine.allocator.size - engine.allocator.available_size()
    req = engine.start(role, TEXT[:10])
    state = state_of(req)
    assert (req.prefix_len, state.base_len, state.lr_len) == (9, 10, 10)
    engine.extend(req)
    counts = state.counts
    assert counts is not None
    assert (counts.shared + counts.own, counts.replayed, counts.computed) == (9, 1, 0)
    assert engine.allocator.size - engine.allocator.available_size() == in_use
    engine.decode(req, 500)
    engine.finish(req)
    engine.check_idle()


@pytest.mark.parametrize("num_cached", [1, 9, 10])
@pytest.mark.parametrize("limit", [0, 1, 5, 9])
def test_a_match_never_starts_beyond_its_limit(
    make: Callable[..., Engine], num_cached: int, limit: int
) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:num_cached])
    req = engine.start("plan", TEXT[:10])
    engine.tree.unlock(req.lock)
    key = RadixKey(req.full_untruncated_fill_ids, req.extra_key, limit=limit)
    result = engine.tree.match_prefix(MatchPrefixParams(key=key, req=req))
    assert result.device_prefix_len == min(limit, num_cached)
    assert result.cache_protected_len == num_cached


def test_an_adapter_of_neither_k_nor_v_needs_no_slices(make: Callable[..., Engine]) -> None:
    engine = make("baseshared")
    engine.loras["mlp"] = fake_lora(targets=("o_proj",))
    engine.load("mlp")
    engine.turn("plan", TEXT[:10])
    req = engine.start("mlp", TEXT[:15])
    assert (state_of(req).base_len, state_of(req).lr_len) == (10, 10)
    engine.extend(req)
    engine.finish(req)
    assert engine.tree.lr_evictable_size == 10, "its pass writes no rows"
    engine.check_idle()


def test_namespaces_and_salts_never_meet(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared", teams={"a": ["plan", "action"], "b": ["reflect"]})
    engine.turn("plan", TEXT[:10])
    callers: list[tuple[str | None, dict[str, str]]] = [
        ("plan", {"extra_key": "x"}),
        ("plan", {"salt": "x"}),
        ("plan", {"extra_key": "x", "salt": "x"}),
        ("plan", {"extra_key": "t0:"}),
        ("plan", {"extra_key": "t1:"}),
        ("reflect", {}),
        ("reflect", {"extra_key": "t0:"}),
        (None, {"salt": "y"}),
    ]
    for role, names in callers:
        req = engine.start(role, TEXT[:10], **names)
        assert state_of(req).base_len == 0, (role, names)
        engine.extend(req)
        engine.finish(req)
    # Whoever comes again finds exactly its own.
    for role, names in [("action", {}), (None, {}), *callers]:
        req = engine.start(role, TEXT[:10], **names)
        assert state_of(req).base_len == 10
        engine.extend(req)
        engine.finish(req)
    engine.check_idle()


# -- splitting -----------------------------------------------------------------------


def test_a_split_node_splits_its_slices(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    (node,) = engine.path(TEXT[:10])
    whole = {key: slots.tolist() for key, slots in node.slices.items()}
    assert len(whole) == 3
    engine.turn("action", [*TEXT[:4], 1, 2])
    upper, lower = engine.path(TEXT[:10])
    assert (len(upper.key), len(lower.key)) == (4, 6)
    for key, slots in whole.items():
        assert upper.slices[key].tolist() == slots[:4]
        assert lower.slices[key].tolist() == slots[4:]
    engine.check_idle()


def test_a_split_keeps_pins_and_feeder(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    reader = engine.start("action", TEXT[:12])
    engine.extend(reader)
    engine.turn("reflect", [*TEXT[:4], 1, 2])  # splits the node that `reader` has pinned
    upper, lower = engine.path(TEXT[:10])
    key = engine.key_of("action")
    assert upper.pins == lower.pins == {key: 1}
    assert upper.feeder == lower.feeder == engine.runtime.roles.adapters["plan"].content
    assert engine.tree.lr_pinned_size == 12
    engine.check()
    engine.finish(reader)
    engine.check_idle()


# -- publishing ----------------------------------------------------------------------


def test_the_same_role_twice_keeps_one_copy(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    first, second = engine.start("plan", TEXT[:10]), engine.start("plan", TEXT[:12])
    for req in (first, second):  # both were admitted before either had published
        engine.extend(req)
    row = engine.rows.req_to_token[second.kv.req_pool_idx]
    upper, _ = engine.path(TEXT[:12])
    assert row[:10].tolist() == upper.value.tolist(), "the second reads the first one's rows"
    rows = engine.runtime.req_to_lr[second.kv.req_pool_idx]
    assert rows[:10].tolist() == upper.slices[engine.key_of("plan")].tolist()
    assert engine.allocator.size - engine.allocator.available_size() == 12
    assert engine.tree.runtime.stats.conflicts == 0
    engine.check()
    engine.decode(second, 7)
    engine.finish(first)
    engine.finish(second)
    engine.check_idle()


def test_the_first_of_two_roles_wins_and_the_other_goes_on_alone(
    make: Callable[..., Engine],
) -> None:
    engine = make("prelrshared")
    first, second = engine.start("plan", TEXT[:10]), engine.start("action", TEXT[:12])
    engine.extend(first)
    (node,) = engine.path(TEXT[:10])
    base, slices = node.value.tolist(), {k: s.tolist() for k, s in node.slices.items()}
    engine.extend(second)
    assert state_of(second).detached and engine.runtime.stats.conflicts == 1
    engine.decode(second, 7)
    engine.check()
    engine.finish(second)
    (node,) = engine.path(TEXT[:12])
    assert node.value.tolist() == base
    assert {key: slots.tolist() for key, slots in node.slices.items()} == slices
    engine.finish(first)
    engine.check_idle()


def test_a_request_that_lost_a_race_keeps_reading_rows_nobody_else_may_take(
    make: Callable[..., Engine],
) -> None:
    """Its replayed rows join the tree, where a turn of the same role may have been first."""
    engine = make("baseshared")
    engine.turn("plan", TEXT[:10])
    loser = engine.start("action", TEXT)
    twin = engine.start("action", TEXT[:10])
    winner = engine.start("plan", TEXT)
    engine.extend(twin)  # publishes action's rows over the first ten tokens
    engine.extend(winner)  # publishes the ten tokens that `loser` is about to compute
    engine.extend(loser)
    assert state_of(loser).detached
    engine.finish(twin)
    engine.finish(winner)
    engine.check()
    engine.tree.evict_rows(1000)
    engine.check()
    engine.decode(loser, 7)
    engine.finish(loser)
    engine.check_idle()


def test_a_request_that_lost_a_race_pins_what_it_gave_away(make: Callable[..., Engine]) -> None:
    engine = make("baseshared")
    engine.turn("plan", TEXT[:10])
    loser, winner = engine.start("action", TEXT), engine.start("plan", TEXT)
    engine.extend(winner)
    engine.finish(winner)
    engine.extend(loser)
    assert state_of(loser).detached
    engine.tree.evict_rows(1000)
    engine.check()
    engine.decode(loser, 7)
    engine.finish(loser)
    engine.check_idle()


def test_an_aborted_request_leaves_what_it_had_published(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    req = engine.start("plan", TEXT)
    engine.extend(req, to=8)
    engine.extend(req, to=13)
    engine.abort(req)
    assert sum(len(node.key) for node in engine.path(TEXT)) == 13
    engine.check_idle()


def test_an_aborted_request_of_a_neutral_method_leaves_nothing(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared")
    req = engine.start("plan", TEXT)
    engine.extend(req, to=8)
    engine.abort(req)
    assert engine.path(TEXT) == [] and not engine.runtime.backlog.jobs
    engine.check_idle()
    assert engine.allocator.available_size() == engine.allocator.size


def test_a_retracted_request_matches_again(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    req = engine.start("plan", TEXT[:10])
    engine.extend(req)
    engine.decode(req, 7)
    engine.decode(req, 8)
    engine.retract(req)
    engine.check_idle()
    engine.admit(req)
    assert (state_of(req).base_len, req.prefix_len) == (10, 10)
    engine.extend(req)
    engine.decode(req, 9)
    engine.check()
    engine.finish(req)
    assert sum(len(node.key) for node in engine.path([*TEXT[:10], 7, 8, 9])) == 13
    engine.check_idle()


# -- slices under pressure -------------------------------------------------------------


def test_slices_are_evicted_alone_least_recently_used_first(make: Callable[..., Engine]) -> None:
    engine = make("baseshared")
    engine.turn("plan", TEXT[:10])
    engine.turn("plan", [1, 2, 3, 4])
    engine.turn("plan", TEXT[:10])  # uses the first ones again
    assert engine.tree.evict_rows(1) == 4
    assert engine.covered([1, 2, 3, 4], "plan") == [(4, False)]
    assert engine.covered(TEXT[:9], "plan") == [(9, True)]
    assert engine.runtime.stats.evicted_slices == 1 and engine.runtime.stats.evicted_rows == 4
    assert engine.tree.total_size() == 14, "base stays"
    engine.check_idle()


@pytest.mark.parametrize("matched_again", [False, True])
@pytest.mark.parametrize("method", ["baseshared", "prelrshared", "rebaseshared"])
def test_the_deepest_slice_of_a_path_goes_first(
    make: Callable[..., Engine], method: str, matched_again: bool
) -> None:
    """Rows below a gap are of no use to their role, so a path is given up from its end."""
    engine = make(method)
    for end in (5, 10, 15):
        engine.turn("plan", TEXT[:end])
        engine.drain()
    if matched_again:
        engine.turn("plan", TEXT[:15])
    while engine.tree.lr_evictable_size:
        for role in ROLES:
            found = [found for _, found in engine.covered(TEXT[:15], role)]
            assert found == sorted(found, reverse=True), f"{role} has a slice below a gap"
        engine.tree.evict_rows(1)
    engine.check_idle()


def test_pinned_slices_survive(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    reader = engine.start("action", TEXT[:12])
    engine.extend(reader)
    assert engine.tree.lr_pinned_size == 12
    # Rows of the other two roles over the ten, and what `reader` wrote for them over two.
    assert engine.tree.evict_rows(1000) == 24
    assert engine.covered(TEXT[:12], "action") == [(10, True), (2, True)]
    assert engine.covered(TEXT[:12], "plan") == [(10, False), (2, False)]
    engine.check()
    engine.finish(reader)
    assert engine.tree.evict_rows(1000) == 12
    engine.check_idle()


def test_two_readers_pin_twice(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    readers = [engine.start("action", TEXT[:10]) for _ in range(2)]
    for reader in readers:
        engine.extend(reader)
    engine.finish(readers[0])
    assert engine.tree.lr_pinned_size == 10
    engine.finish(readers[1])
    assert engine.tree.lr_pinned_size == 0
    engine.check_idle()


def test_evicting_base_frees_the_slices_of_the_leaf(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    engine.turn("plan", TEXT[:15])
    assert engine.tree.lr_evictable_size == 45
    freed = engine.tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted
    assert freed == 5 and engine.runtime.stats.evicted_base == 5
    assert engine.tree.lr_evictable_size == 30
    engine.check_idle()
    engine.tree.evict(EvictParams(num_tokens=1000))
    assert engine.runtime.lr_pool is not None
    assert engine.runtime.lr_pool.available_size() == engine.runtime.lr_pool.size
    engine.check_idle()


def test_rows_of_other_roles_give_way_to_a_requests_own(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared", lr_slots=32)
    first = engine.start("plan", TEXT[:8])
    engine.extend(first, to=8)
    engine.tree.evict_rows(1000)  # leaves plan's eight, which are pinned
    for token in range(8):
        engine.decode(first, token)  # 24 rows: the pool is full
    assert engine.runtime.can_decode([first])
    engine.decode(first, 8)
    state = state_of(first)
    assert list(state.rows) == [engine.key_of("plan")] == state.written
    assert engine.runtime.stats.dropped_rows == 16
    engine.check()
    engine.finish(first)
    engine.check_idle()


# -- adapters that come and go -----------------------------------------------------------


def test_unloading_an_adapter_drops_its_slices_and_nothing_else(
    make: Callable[..., Engine],
) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    key = engine.key_of("action")
    engine.unload("action")
    (node,) = engine.path(TEXT[:10])
    assert set(node.slices) == {engine.key_of("plan"), engine.key_of("reflect")}
    assert key not in engine.tree.dead_keys
    assert engine.tree.lr_evictable_size == 20
    engine.check_idle()


def test_pinned_slices_of_an_unloaded_adapter_go_when_they_are_unpinned(
    make: Callable[..., Engine],
) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    key = engine.key_of("action")
    reader = engine.start("action", TEXT[:12])
    engine.extend(reader)
    engine.unload("action")
    assert [key in node.slices for node in engine.path(TEXT[:12])] == [True, True]
    engine.check()
    engine.abort(reader)
    assert [key in node.slices for node in engine.path(TEXT[:12])] == [False, False]
    engine.check_idle()


def test_rows_in_flight_of_an_unloaded_adapter_are_never_published(
    make: Callable[..., Engine],
) -> None:
    engine = make("prelrshared")
    writer = engine.start("plan", TEXT[:10])
    engine.extend(writer)
    engine.decode(writer, 7)  # owns rows of action that are not in the tree yet
    key = engine.key_of("action")
    engine.unload("action")
    engine.decode(writer, 8)
    engine.finish(writer)
    assert all(key not in node.slices for node in engine.tree.nodes())
    engine.check_idle()


def test_an_adapter_loaded_again_finds_no_rows_in_the_wrong_place(
    make: Callable[..., Engine],
) -> None:
    """A turn that ran on without it has a gap; rows after the gap must not move into it."""
    engine = make("prelrshared")
    writer, other = engine.start("plan", TEXT[:10]), engine.start("plan", TEXT[:10])
    engine.extend(writer)
    engine.extend(other)
    for token in (7, 8):
        engine.decode(writer, token)
    engine.unload("action")
    engine.decode(writer, 9)
    engine.load("action")
    for token in (10, 11):
        engine.decode(writer, token)
    for token in (7, 8, 9, 10):  # the same tokens, so that a node ends within `writer`'s span
        engine.decode(other, token)
    engine.finish(other)
    node = engine.path([*TEXT[:10], 7, 8, 9, 10])[-1]
    engine.tree._drop_slice(node, engine.key_of("action"))
    engine.finish(writer)
    engine.check_idle()
    assert engine.runtime.stats.dropped_rows == 2


@pytest.mark.parametrize("role", ["plan", None])
def test_a_pass_that_outlives_every_other_adapter_writes_no_rows_for_them_later(
    make: Callable[..., Engine], role: str | None
) -> None:
    engine = make("prelrshared")
    writer = engine.start(role, TEXT[:10])
    engine.extend(writer)
    engine.decode(writer, 7)
    gone = [name for name in ROLES if name != role]
    for name in gone:
        engine.unload(name)
    engine.decode(writer, 8)
    for name in gone:
        engine.load(name)
    engine.decode(writer, 9)
    assert set(state_of(writer).rows) <= {engine.key_of("plan")}
    engine.check()
    engine.finish(writer)
    engine.check_idle()


def test_slices_that_are_still_pinned_serve_the_adapter_loaded_again(
    make: Callable[..., Engine],
) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    reader = engine.start("action", TEXT[:12])
    engine.extend(reader)
    engine.unload("action")
    engine.load("action")
    engine.finish(reader)
    assert engine.covered(TEXT[:12], "action") == [(10, True), (2, True)]
    engine.check_idle()


def test_another_file_under_the_same_name_reads_no_rows_of_the_old_one(
    make: Callable[..., Engine],
) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    engine.unload("action")
    engine.loras["action"] = fake_lora(seed=77)
    engine.load("action")
    req = engine.start("action", TEXT[:12])
    assert (state_of(req).lr_len, state_of(req).base_len) == (0, 10)
    engine.extend(req)
    engine.finish(req)
    engine.check_idle()


# -- the backlog -------------------------------------------------------------------------


def one_job(engine: Engine) -> NeutralJob:
    (job,) = engine.runtime.backlog.jobs
    return job


def test_a_finished_turn_keeps_its_base_slots_and_own_rows_as_a_job(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10], answer=TEXT[10:12])
    job = one_job(engine)
    assert (job.start, job.done, job.end) == (0, 0, 12)
    assert job.rows is not None and (job.rows.start, job.rows.end) == (0, 12)
    assert engine.path(TEXT[:12]) == [], "adapted base is never published"
    assert engine.tree.protected_size() == engine.runtime.backlog.held_base_slots() == 12
    assert engine.allocator.available_size() == engine.allocator.size - 12
    engine.check_idle()


def test_a_neutral_pass_publishes_base_in_place_with_the_rows_of_all_roles(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10], answer=TEXT[10:12])
    slots = one_job(engine).base_slots.tolist()
    engine.drain()
    (node,) = engine.path(TEXT[:12])
    assert node.value.tolist() == slots
    assert set(node.slices) == {engine.key_of(role) for role in ROLES}
    assert engine.tree.protected_size() == 0
    engine.check_idle()


def test_a_neutral_pass_may_take_several_pieces(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", piece=5)
    engine.turn("plan", TEXT[:10], answer=TEXT[10:12])
    job = one_job(engine)
    for done in (5, 10):
        engine.neutral_step()
        assert (job.done, job.base_slots.numel()) == (done, 12 - done)
        assert job.lock is not None and job.lock.node.lock_ref == 1
        assert engine.covered(TEXT[:done], "plan") == [(5, True)] * (done // 5)
        engine.check()
    engine.neutral_step()
    assert not engine.runtime.backlog.jobs
    engine.check_idle()


def test_a_job_starts_where_the_turn_found_neutral_base(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10])
    engine.drain()
    engine.turn("action", TEXT[:15])
    job = one_job(engine)
    assert (job.start, job.end) == (10, 15)
    assert job.lock is not None and job.lock.node.lock_ref == 1
    engine.drain()
    assert engine.covered(TEXT[:15], "action") == [(10, True), (5, True)]
    engine.check_idle()


def test_a_turn_over_cached_tokens_alone_owes_nothing(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10])
    engine.drain()
    engine.turn("action", TEXT[:10])
    assert not engine.runtime.backlog.jobs
    engine.check_idle()


def test_a_turn_that_replays_gives_its_rows_to_the_tree(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10])
    engine.drain()
    (node,) = engine.path(TEXT[:10])
    engine.tree._drop_slice(node, engine.key_of("action"))
    engine.turn("action", TEXT[:15])
    assert engine.covered(TEXT[:10], "action") == [(10, True)]
    rows = one_job(engine).rows
    assert rows is not None and (rows.start, rows.end) == (10, 15)
    engine.check_idle()
    engine.drain()
    engine.check_idle()


def test_what_others_published_of_a_job_frees_its_surplus(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:12])
    job = one_job(engine)
    engine.turn(None, TEXT[:7])  # a request without an adapter is a neutral pass, too
    assert engine.covered(TEXT[:7], "plan") == [(7, True)]
    engine.runtime.backlog.catch_up(job)
    assert (job.done, job.base_slots.numel()) == (7, 5)
    assert job.rows is not None and (job.rows.start, job.rows.num_slots) == (7, 5)
    assert job.lock is not None and len(job.lock.node.key) == 7
    engine.check_idle()
    engine.drain()
    engine.check_idle()


def test_a_job_that_others_published_whole_is_closed(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:12])
    job = one_job(engine)
    engine.turn(None, TEXT[:15])
    engine.runtime.backlog.catch_up(job)
    assert not engine.runtime.backlog.jobs
    assert engine.tree.protected_size() == 0
    engine.check_idle()


def test_two_turns_over_the_same_tokens_publish_them_once(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    reqs = [engine.start(role, TEXT[:10]) for role in ("plan", "action")]
    for req in reqs:
        engine.extend(req)
        engine.decode(req, 7)
    for req in reqs:
        engine.finish(req)
    assert len(engine.runtime.backlog.jobs) == 2
    engine.check_idle()
    engine.drain()
    assert engine.allocator.available_size() == engine.allocator.size - 11
    engine.check_idle()


def test_dropping_the_oldest_job_frees_its_slots_and_lock(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10])
    engine.drain()
    engine.turn("plan", TEXT[:15])
    engine.turn("plan", [1, 2, 3])
    job = engine.runtime.backlog.jobs[0]
    assert engine.runtime.backlog.drop_oldest() == 5
    assert job not in engine.runtime.backlog.jobs
    assert engine.path(TEXT[:10])[-1].lock_ref == 0
    assert engine.runtime.stats.dropped_neutral == 5
    engine.check_idle()
    assert engine.runtime.backlog.drop_oldest() == 3
    assert engine.runtime.backlog.drop_oldest() is None
    engine.check_idle()


def test_base_slots_of_the_backlog_are_given_up_when_nothing_else_can_be_evicted(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", base_slots=30)
    engine.turn(None, [1, 2, 3, 4, 5])
    engine.turn("plan", TEXT[:10])
    engine.turn("plan", [50, 51, 52])
    freed = engine.tree.evict(EvictParams(num_tokens=5)).num_tokens_evicted
    assert freed == 5 and len(engine.runtime.backlog.jobs) == 2, "published nodes go first"
    engine.tree.evict(EvictParams(num_tokens=4))
    assert [job.end for job in engine.runtime.backlog.jobs] == [3], "then the oldest job"
    engine.check_idle()


def test_evicting_reaches_the_prefix_that_a_dropped_job_held(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", base_slots=30)
    engine.turn(None, TEXT[:10])
    engine.turn("plan", TEXT[:15])
    freed = engine.tree.evict(EvictParams(num_tokens=12)).num_tokens_evicted
    assert freed == 15
    engine.check_idle()


def test_unloading_the_active_adapter_frees_its_rows_and_keeps_the_job(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10])
    job = one_job(engine)
    key = engine.key_of("plan")
    engine.unload("plan")
    assert job.rows is None and job.base_slots.numel() == 10
    engine.check_idle()
    engine.drain()
    (node,) = engine.path(TEXT[:10])
    assert key not in node.slices and len(node.slices) == 2
    engine.check_idle()


def test_a_job_that_lost_its_rows_leaves_its_role_to_replay(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared")
    engine.turn("plan", TEXT[:10])
    engine.unload("plan")
    engine.load("plan")
    engine.drain()
    engine.check_idle()
    req = engine.start("plan", TEXT[:12])
    assert (state_of(req).lr_len, state_of(req).base_len) == (0, 10)
    engine.extend(req)
    engine.finish(req)
    engine.check_idle()


def test_a_job_blocks_requests_that_extend_its_tokens(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", piece=5)
    engine.turn("plan", TEXT[:10])
    job = one_job(engine)

    def blocked(tokens: list[int], **names: Any) -> bool:
        req = engine.start("action", tokens, **names)
        engine.tree.unlock(req.lock)
        return job.blocks(req, req.full_untruncated_fill_ids)

    assert blocked(TEXT[:12]) and blocked(TEXT[:10]) and blocked(TEXT[:1])
    assert not blocked([1, 2, 3])
    assert not blocked(TEXT[:12], salt="x")
    assert not blocked(TEXT[:12], extra_key="x")
    engine.neutral_step()
    assert blocked(TEXT[:12]), "five tokens are still owed"
    assert not blocked(TEXT[:5]), "these are published"


# -- flush and integrity -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["prelrshared", "rebaseshared"])
def test_a_reset_leaves_an_empty_tree_and_free_pools(
    make: Callable[..., Engine], method: str
) -> None:
    engine = make(method)
    engine.turn("plan", TEXT[:10])
    engine.turn(None, TEXT[:5])
    engine.runtime.backlog.clear()  # as flushing does, before SGLang resets tree and pools
    engine.tree.reset()
    engine.allocator.clear()
    assert engine.runtime.lr_pool is not None
    assert engine.runtime.lr_pool.available_size() == engine.runtime.lr_pool.size
    assert list(engine.tree.nodes()) == [] and not engine.runtime.backlog.jobs
    engine.check_idle()
    engine.turn("plan", TEXT[:10])
    engine.check_idle()


def leak_a_slot(engine: Engine) -> None:
    assert engine.runtime.lr_pool is not None
    engine.runtime.lr_pool.alloc(1)


def free_a_slot_twice(engine: Engine) -> None:
    assert engine.runtime.lr_pool is not None
    node = engine.path(TEXT[:10])[0]
    engine.runtime.lr_pool.free(node.slices[engine.key_of("plan")][:1])


def shorten_a_slice(engine: Engine) -> None:
    node = engine.path(TEXT[:10])[0]
    node.slices[engine.key_of("plan")] = node.slices[engine.key_of("plan")][:-1]


def put_a_slot_in_two_slices(engine: Engine) -> None:
    node = engine.path(TEXT[:10])[0]
    node.slices[engine.key_of("plan")][0] = node.slices[engine.key_of("action")][0]


def count_too_many_evictable(engine: Engine) -> None:
    engine.tree.lr_evictable_size += 1


def count_too_many_pinned(engine: Engine) -> None:
    engine.tree.lr_pinned_size += 1


def pin_without_a_slice(engine: Engine) -> None:
    engine.path(TEXT[:10])[0].pins["nobody"] = 1


@pytest.mark.parametrize(
    ("damage", "report"),
    [
        (leak_a_slot, "[lr] total=400"),
        (free_a_slot_twice, "[lr] total=400"),
        (shorten_a_slice, "covers 9 tokens"),
        (put_a_slot_in_two_slices, "a slot is in two slices"),
        (count_too_many_evictable, "lr counters: evictable=31"),
        (count_too_many_pinned, "lr counters: evictable=30 pinned=1"),
        (pin_without_a_slice, "pin on a missing slice nobody"),
    ],
)
def test_damage_is_reported(
    make: Callable[..., Engine], damage: Callable[[Engine], None], report: str
) -> None:
    engine = make("prelrshared")
    engine.turn("plan", TEXT[:10])
    assert engine.tree.check_integrity() == []
    damage(engine)
    assert any(report in problem for problem in engine.tree.check_integrity())


# -- anything at all -----------------------------------------------------------------------


class Operations:
    """Random operations on an engine whose pools are too small for them."""

    WEIGHTS: ClassVar = {
        "start": 8,
        "extend": 8,
        "decode": 16,
        "finish": 4,
        "abort": 1,
        "retract": 1,
        "neutral": 4,
        "evict": 1,
        "evict_rows": 1,
        "swap": 1,
    }

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.prefilling: list[Req] = []
        self.decoding: list[Req] = []
        self.retracted: list[Req] = []

    def step(self) -> None:
        (name,) = self.random.choices(list(self.WEIGHTS), list(self.WEIGHTS.values()))
        getattr(self, name)()

    def pick(self, reqs: list[Req]) -> Req | None:
        return self.random.choice(reqs) if reqs else None

    def has_room(self, req: Req, num_base: int, num_rows: int) -> bool:
        engine = self.engine
        base = engine.allocator.available_size() + engine.tree.evictable_size()
        base += engine.runtime.backlog.held_base_slots()
        if state_of(req).own_key is None:
            return num_base <= base
        rows = engine.runtime.rows_available()
        rows += engine.runtime.optional_rows(engine.runtime.running_states())
        return num_base <= base and num_rows <= rows

    def context(self) -> list[int]:
        """Two alternatives every four tokens, so that contexts share some of their prefix."""
        tokens: list[int] = []
        for part in range(self.random.randrange(1, 6)):
            first = 100 * part + 10 * self.random.randrange(2)
            tokens += range(first, first + 4)
        return tokens[: self.random.randrange(1, len(tokens) + 1)]

    def start(self) -> None:
        if len(self.prefilling) + len(self.decoding) >= 6:
            return
        if self.retracted and self.random.random() < 0.5:
            req = self.retracted.pop()
            role = state_of(req).adapter
            if role is not None and role.lora_id not in self.engine.runtime.roles.adapters:
                return
            self.engine.admit(req)
        else:
            roles = [*self.engine.runtime.roles.adapters, None]
            req = self.engine.start(
                self.random.choice(roles),
                self.context(),
                salt=self.random.choice([None, None, None, "x"]),
            )
        # Pin at once, as the step that admits a request does.
        self.engine.runtime.before_extend(SimpleNamespace(reqs=[req]))
        self.prefilling.append(req)
        self.extend(req)

    def extend(self, req: Req | None = None) -> None:
        req = req or self.pick(self.prefilling)
        if req is None:
            return
        end = len(req.full_untruncated_fill_ids)
        to = min(end, req.prefix_len + self.random.randrange(1, 9))
        if not self.has_room(req, to - req.prefix_len, to - req.prefix_len):
            self.abort(req)
            return
        self.engine.extend(req, to=to)
        if to == end:
            self.prefilling.remove(req)
            self.decoding.append(req)

    def decode(self) -> None:
        req = self.pick(self.decoding)
        if req is None or req.kv.kv_committed_len + 1 >= CONTEXT:
            return
        if self.has_room(req, 1, 1) and self.engine.runtime.can_decode([req]):
            self.engine.decode(req, self.random.randrange(2))

    def finish(self) -> None:
        req = self.pick(self.decoding)
        if req is not None:
            self.decoding.remove(req)
            self.engine.finish(req)

    def abort(self, req: Req | None = None) -> None:
        req = req or self.pick(self.prefilling + self.decoding)
        if req is None:
            return
        for reqs in (self.prefilling, self.decoding):
            if req in reqs:
                reqs.remove(req)
        if req.kv.holds_kv:
            self.engine.abort(req)
        else:  # admitted, but it never got a row
            self.engine.tree.unlock(req.lock)
            self.engine.tree.on_release(req, checkpointed=False)

    def retract(self) -> None:
        req = self.pick(self.decoding)
        if req is not None:
            self.decoding.remove(req)
            self.engine.retract(req)
            self.retracted.append(req)

    def neutral(self) -> None:
        if self.engine.runtime.backlog.jobs:
            self.engine.neutral_step()

    def evict(self) -> None:
        self.engine.tree.evict(EvictParams(num_tokens=self.random.randrange(1, 5)))

    def evict_rows(self) -> None:
        self.engine.tree.evict_rows(self.random.randrange(1, 5))

    def swap(self) -> None:
        """Unload an adapter, or load it again. SGLang waits for an adapter's requests."""
        role = self.random.choice(list(ROLES))
        engine = self.engine
        if role not in engine.runtime.roles.adapters:
            engine.load(role)
        elif not any(
            adapter is not None and adapter.lora_id == role
            for adapter in (state_of(r).adapter for r in self.prefilling + self.decoding)
        ):
            engine.unload(role)

    def end(self) -> None:
        for req in [*self.prefilling, *self.decoding]:
            self.abort(req)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", ["baseshared", "baselrshared", "prelrshared", "rebaseshared"])
def test_no_slot_is_lost_or_shared_whatever_happens(
    make: Callable[..., Engine], method: str, seed: int
) -> None:
    engine = make(method, base_slots=90, lr_slots=120, piece=6)
    operations = Operations(engine, seed)
    for _ in range(400):
        operations.step()
        engine.check()
    operations.end()
    engine.check_idle()
    engine.runtime.backlog.clear()
    engine.tree.evict(EvictParams(num_tokens=1000))
    assert engine.allocator.available_size() == engine.allocator.size
    assert engine.runtime.lr_pool is not None
    assert engine.runtime.lr_pool.available_size() == engine.runtime.lr_pool.size
