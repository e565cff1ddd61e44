"""The prefix cache, driven as SGLang's scheduler drives it; see `engine`."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from engine import CONTEXT, NEUTRAL, ROLES, Engine
from standins import fake_lora, quiet_imports

with quiet_imports():
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from precache_sglang import backlog as backlog_module
    from precache_sglang import neutral as neutral_module
    from precache_sglang.backlog import NeutralJob
    from precache_sglang.request import state_of
    from precache_sglang.schedules import SCHEDULES
    from precache_sglang.step_cost import Load

pytestmark = pytest.mark.usefixtures("one_thread")

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
    engine.tree.drop_slice(middle, engine.key_of("action"))
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


def test_rows_of_other_roles_do_not_evict_slices_for_nothing(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared", lr_slots=40)
    engine.turn("plan", TEXT[:8])  # 24 slots
    engine.turn("action", [7, *TEXT[:13]])  # 14 of its own do; twice 14 more do not fit
    assert len(engine.covered(TEXT[:8], "plan")) == 1
    assert all(covered for _, covered in engine.covered([7, *TEXT[:13]], "action"))
    left = engine.runtime.lr_pool.available_size()
    evicted = engine.runtime.stats.evicted_rows
    assert left + evicted <= 14 + 8, "no more than what somebody took"
    engine.check_idle()


def test_slots_promised_to_a_prompt_in_chunks_come_back_from_a_turn_that_ended(
    make: Callable[..., Engine],
) -> None:
    """Its turn took what was free for rows of the team, and nobody is left to evict."""
    engine = make("rebaseshared", lr_slots=24, max_neutral_wait_ms=0)
    short, long = engine.start("plan", TEXT[:4]), engine.start("action", [7, *TEXT[4:19]])
    engine.extend(short)
    engine.extend(long, to=4)
    engine.finish(short)
    assert one_job(engine).all_rows()
    for end in (8, 12, 16):
        engine.extend(long, to=end)
        engine.check()
    engine.finish(long)
    engine.drain()
    engine.check_idle()


def test_a_last_chunk_takes_the_rows_that_its_prompt_wrote_for_others(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", lr_slots=26, max_neutral_wait_ms=0)
    long = engine.start("plan", TEXT[:12])
    engine.extend(long, to=8)
    assert engine.runtime.lr_pool.available_size() == 2
    # After a decode step of others, SGLang's scheduler has let go of it.
    scheduler = engine.runtime.scheduler
    scheduler.running_batch = SimpleNamespace(reqs=[])
    engine.extend(long)
    scheduler.running_batch = SimpleNamespace(reqs=engine.running)
    assert list(state_of(long).rows) == [engine.key_of("plan")]
    assert engine.runtime.stats.dropped_rows == 16
    engine.check()
    engine.finish(long)
    engine.drain()
    engine.check_idle()


def test_decoding_leaves_what_a_prompt_in_chunks_was_promised(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared", lr_slots=20)
    first, long = engine.start("plan", TEXT[:4]), engine.start("action", [7, *TEXT[4:15]])
    second = engine.start("reflect", [8, 9])
    for req in (first, second):
        engine.extend(req)
    engine.extend(long, to=4)
    engine.runtime.scheduler.chunked_req = long
    assert engine.runtime.can_decode([first, second])
    for req in (first, second):
        engine.decode(req, 0)
    assert not engine.runtime.can_decode([first, second]), "eight slots are left, all promised"
    assert engine.runtime.can_decode([first]), "alone it would be aborted: the chunk can wait"
    engine.extend(long, to=8)
    engine.extend(long)
    engine.runtime.scheduler.chunked_req = None
    engine.finish(first)
    engine.finish(second)
    engine.finish(long)
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
    engine.tree.drop_slice(node, engine.key_of("action"))
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
    engine.tree.drop_slice(node, engine.key_of("action"))
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


def test_any_number_of_turns_over_the_same_tokens_is_closed_by_one_pass(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", base_slots=4000, lr_slots=4000)
    for _ in range(450):
        engine.turn("plan", TEXT[:4])
    assert len(engine.runtime.backlog.jobs) == 450
    assert engine.neutral_step()
    assert not engine.neutral_step()
    assert engine.runtime.backlog.jobs == deque()
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
        tokens = req.full_untruncated_fill_ids
        return job.blocks(RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt))

    assert blocked(TEXT[:12]) and blocked(TEXT[:10]) and blocked(TEXT[:1])
    assert not blocked([1, 2, 3])
    assert not blocked(TEXT[:12], salt="x")
    assert not blocked(TEXT[:12], extra_key="x")
    engine.neutral_step()
    assert blocked(TEXT[:12]), "five tokens are still owed"
    assert not blocked(TEXT[:5]), "these are published"


# -- beside running turns ----------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["db", "auto"])
def test_a_pass_beside_the_turn_leaves_nothing_owed(
    make: Callable[..., Engine], schedule: str
) -> None:
    engine = make("rebaseshared", schedule=schedule)
    engine.turn("plan", TEXT[:8], answer=TEXT[8:12])
    assert engine.runtime.backlog.jobs == deque()
    for role in ROLES:
        assert all(covered for _, covered in engine.covered(TEXT[:12], role))
    assert sum(length for length, _ in engine.covered(TEXT[:12], "plan")) == 12
    assert engine.runtime.stats.neutral_beside == 12
    engine.check_idle()


def test_a_pass_in_lockstep_is_as_far_as_its_turn(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", schedule="db")
    req = engine.start("plan", TEXT[:9])
    for end in (4, 8, 9):
        engine.extend(req, to=end)
        assert state_of(req).shadow.done == end
    engine.decode(req, 7)
    assert state_of(req).shadow.done == 10
    engine.finish(req)
    engine.check_idle()


def test_what_does_not_fit_beside_the_turn_is_owed_after_it(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", schedule="auto", base_slots=16)
    engine.turn("plan", TEXT[:12], answer=TEXT[12:13])  # four slots for its neutral pass
    (job,) = engine.runtime.backlog.jobs
    engine.check()
    assert (job.start, job.done, job.end) == (0, 4, 13) or job.done < 13
    engine.drain()
    assert all(covered for _, covered in engine.covered(TEXT[:13], "action"))
    engine.check_idle()


def test_a_user_gets_the_slots_that_a_pass_beside_a_turn_holds(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", schedule="db", base_slots=24)
    first = engine.start("plan", TEXT[:9])
    engine.extend(first)
    assert state_of(first).shadow.num_slots == 9
    second = engine.start("action", [1, 2, 3, 4, 5, 6, 7, 8])
    engine.extend(second)  # of six free slots
    assert state_of(first).shadow is None
    engine.finish(second)
    engine.drain()
    # Computed once beside and once after the turn, and not again with every step.
    before = engine.runtime.stats.neutral_beside
    for token in (1, 2, 3):
        engine.decode(first, token)
    assert engine.runtime.stats.neutral_beside == before
    engine.check()
    engine.finish(first)
    engine.drain()
    assert all(covered for _, covered in engine.covered([*TEXT[:9], 1, 2], "action"))
    engine.check_idle()


def test_turns_over_the_same_new_tokens_have_one_pass_beside_them(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", schedule="db")
    first, second = engine.start("plan", TEXT[:9]), engine.start("action", TEXT[:9])
    engine.extend(first)
    engine.extend(second)
    assert state_of(first).shadow.done == 9
    assert state_of(second).shadow.done == 0
    engine.finish(first)
    engine.decode(second, 7)
    assert (state_of(second).shadow.first, state_of(second).shadow.done) == (9, 10)
    engine.finish(second)
    assert engine.runtime.stats.neutral == 10
    assert engine.runtime.backlog.jobs == deque()
    engine.check_idle()


@pytest.mark.parametrize("end", ["abort", "retract"])
def test_a_turn_that_is_given_up_takes_its_pass_with_it(
    make: Callable[..., Engine], end: str
) -> None:
    engine = make("rebaseshared", schedule="db")
    req = engine.start("plan", TEXT[:9])
    engine.extend(req)
    getattr(engine, end)(req)
    assert engine.runtime.shadows == []
    assert engine.allocator.available_size() == engine.allocator.size
    engine.check_idle()


def rider(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, each: int) -> Engine:
    """An engine that owes plan's turn over ``TEXT[:12]``, and lets `each` tokens ride a step."""
    engine = make("rebaseshared", schedule="auto", base_slots=60, max_neutral_wait_ms=0)
    engine.runtime.schedule = SCHEDULES["lp"]
    engine.turn("plan", TEXT[:12])
    engine.runtime.schedule = SCHEDULES["auto"]
    cost = engine.runtime.neutral.cost
    monkeypatch.setattr(cost, "longest", lambda start, end, _: min(each, end - start))
    monkeypatch.setattr(cost, "is_worth", lambda _: True)
    return engine


def test_the_backlog_rides_beside_the_steps_of_others(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rider(make, monkeypatch, each=5)
    job = one_job(engine)
    other = engine.start("action", [1, 2, 3], extra_key="else")
    engine.extend(other)
    assert job.ahead == 0, "somebody waited for a first token"
    engine.decode(other, 4)
    engine.decode(other, 5)
    assert (job.done, job.ahead, job.end) == (0, 10, 12)
    assert not engine.path(TEXT[:12]), "published as one node, not step by step"
    engine.check()
    engine.decode(other, 6)
    assert [(len(node.key), node.provisional) for node in engine.path(TEXT[:12])] == [(12, False)]
    assert all(engine.covered(TEXT[:12], role) == [(12, True)] for role in ROLES)
    assert job not in engine.runtime.backlog.jobs
    engine.finish(other)
    engine.drain()
    engine.check_idle()


def test_rides_are_paid_for_by_the_steps_of_users(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", schedule="auto", base_slots=90)
    engine.runtime.schedule = SCHEDULES["lp"]
    engine.turn("plan", range(100, 140))
    engine.runtime.schedule = SCHEDULES["auto"]
    scheduler, other = engine.runtime.neutral, engine.start("action", [1, 2, 3], extra_key="else")
    engine.extend(other)
    users = riders = 0.0
    for token in range(20):
        before = engine.runtime.backlog.jobs[0].ahead if engine.runtime.backlog.jobs else 40
        engine.decode(other, token)
        after = engine.runtime.backlog.jobs[0].ahead if engine.runtime.backlog.jobs else 40
        users += scheduler.cost.seconds(Load.of([(3 + token, 4 + token)]))
        riders += scheduler.cost.added(Load.of([(before, after)])) if after > before else 0.0
    engine.finish(other)
    assert 0 < riders <= 1.1 * neutral_module._STEP_SHARE * users
    engine.drain()
    engine.check_idle()


@pytest.mark.parametrize("end", ["own step", "provisional", "dropped", "rows dropped", "unloaded"])
def test_a_job_that_is_half_computed_beside_others_is_kept_or_dropped_whole(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    engine = rider(make, monkeypatch, each=5)
    job = one_job(engine)
    engine.turn("action", [1, 2, 3], answer=[4], extra_key="else")
    ahead = job.ahead
    assert (job.done, ahead, job.end) == (0, 5, 12)
    if end == "own step":
        engine.neutral_step()
    elif end == "provisional":
        engine.runtime.backlog.publish_provisionally(job)
        nodes = [(len(node.key), node.provisional) for node in engine.path(TEXT[:12])]
        assert nodes == [(ahead, False), (12 - ahead, True)]
    elif end == "dropped":
        engine.runtime.backlog.drop_oldest()
    elif end == "rows dropped":
        while engine.runtime.backlog.drop_rows():
            pass
    else:
        engine.unload("reflect")
    engine.check()
    engine.drain()
    engine.check_idle()


def test_jobs_over_the_same_tokens_ride_once(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rider(make, monkeypatch, each=5)
    engine.runtime.schedule = SCHEDULES["lp"]
    engine.turn("reflect", TEXT[:12])
    engine.runtime.schedule = SCHEDULES["auto"]
    first, second = engine.runtime.backlog.jobs
    engine.turn("action", [1, 2, 3], answer=[4], extra_key="else")
    assert (first.ahead, second.ahead) == (5, 0)
    engine.drain()
    engine.check_idle()


def test_rows_of_an_adapter_that_comes_back_do_not_follow_a_gap(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rider(make, monkeypatch, each=5)
    other = engine.start("action", [1, 2, 3], extra_key="else")
    engine.extend(other)
    engine.decode(other, 4)
    engine.unload("reflect")
    engine.load("reflect")
    engine.decode(other, 5)
    engine.decode(other, 6)
    engine.finish(other)
    assert engine.covered(TEXT[:12], "reflect") == [(12, False)]
    assert engine.covered(TEXT[:12], "action") == [(12, True)]
    engine.drain()
    engine.check_idle()


# -- provisional ---------------------------------------------------------------------------


def provisional(make: Callable[..., Engine], **kwargs: Any) -> Engine:
    """An engine in which plan's turn over ``TEXT[:12]`` was published provisionally."""
    engine = make("rebaseshared", max_neutral_wait_ms=0, **kwargs)
    engine.turn("plan", TEXT[:10], answer=TEXT[10:12])
    engine.runtime.backlog.publish_provisionally(one_job(engine))
    assert not engine.runtime.backlog.jobs
    return engine


def test_a_provisional_turn_has_the_rows_of_the_whole_team(make: Callable[..., Engine]) -> None:
    engine = provisional(make)
    for role in ROLES:
        assert engine.covered(TEXT[:12], role) == [(12, True)]
    (node,) = engine.path(TEXT[:12])
    assert node.provisional
    req = engine.start("action", TEXT[:15])
    assert (state_of(req).base_len, req.prefix_len) == (12, 12)
    engine.extend(req)
    engine.finish(req)
    engine.check()


def test_rebasing_is_in_place_and_waits_for_readers(make: Callable[..., Engine]) -> None:
    engine = provisional(make)
    (node,) = engine.path(TEXT[:12])
    slots, own = node.value.clone(), node.slices[engine.key_of("plan")].clone()
    req = engine.start("action", TEXT[:15])
    engine.extend(req)
    assert not engine.neutral_step(), "somebody reads it"
    engine.finish(req)
    engine.drain()
    (node, after) = engine.path(TEXT[:15])
    assert not node.provisional and not after.provisional
    assert node.value.equal(slots)
    assert node.slices[engine.key_of("plan")].equal(own), "the active rows stay"
    assert all(engine.covered(TEXT[:12], role) == [(12, True)] for role in ROLES)
    assert engine.runtime.backlog.rebases == deque()
    engine.check_idle()


def test_what_follows_a_provisional_turn_is_provisional_too(make: Callable[..., Engine]) -> None:
    engine = provisional(make)
    engine.turn("action", TEXT[:16])
    assert not engine.runtime.backlog.jobs, "it could only wait for the rebase"
    nodes = engine.path(TEXT[:16])
    assert [(len(node.key), node.provisional) for node in nodes] == [(12, True), (4, True)]
    engine.drain()
    assert not any(node.provisional for node in engine.path(TEXT[:16]))
    engine.check_idle()


def test_an_adapter_free_turn_over_provisional_base_is_provisional(
    make: Callable[..., Engine],
) -> None:
    engine = provisional(make)
    engine.turn(None, TEXT[:16])
    assert [node.provisional for node in engine.path(TEXT[:16])] == [True, True]
    engine.drain()
    assert [node.provisional for node in engine.path(TEXT[:16])] == [False, False]
    engine.check_idle()


def test_neutral_base_below_a_provisional_turn_waits_for_its_readers(
    make: Callable[..., Engine],
) -> None:
    """A pass with a copy of its own goes on where another turn was published provisionally."""
    engine = make("rebaseshared", schedule="db", max_neutral_wait_ms=0)
    long = engine.start("plan", TEXT[:12])
    engine.extend(long)
    assert state_of(long).shadow.done == 12
    engine.runtime.schedule = SCHEDULES["lp"]
    engine.turn("action", TEXT[:8])
    engine.runtime.backlog.publish_provisionally(one_job(engine))
    engine.finish(long)
    nodes = [(len(node.key), node.provisional) for node in engine.path(TEXT[:12])]
    assert nodes == [(8, True), (4, False)]
    engine.turn("reflect", TEXT[:15])  # behind provisional base: provisional
    reader = engine.start("action", TEXT[:9])
    engine.extend(reader)
    assert not engine.neutral_step(), "somebody reads where it would begin"
    engine.check()
    engine.finish(reader)
    engine.drain()
    assert not any(node.provisional for node in engine.tree.nodes())
    assert engine.runtime.backlog.rebases == deque()
    engine.check_idle()


def test_rows_replayed_over_provisional_base_do_not_outlive_it(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", schedule="db", max_neutral_wait_ms=0)
    long = engine.start("plan", TEXT[:12])
    engine.extend(long)
    engine.runtime.schedule = SCHEDULES["lp"]
    engine.turn("action", TEXT[:8])
    engine.runtime.backlog.publish_provisionally(one_job(engine))
    engine.finish(long)
    provisional, neutral = engine.path(TEXT[:12])
    reflect = engine.key_of("reflect")
    engine.tree.drop_slice(neutral, reflect)
    engine.turn("reflect", TEXT[:13])
    assert provisional.provisional and reflect in provisional.slices
    assert reflect not in neutral.slices
    engine.drain()
    engine.turn("reflect", TEXT[:13])
    assert reflect in neutral.slices
    engine.drain()
    engine.check_idle()


def test_a_role_that_lost_the_rows_of_its_own_turn_replays_it(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", max_neutral_wait_ms=0)
    engine.turn("plan", TEXT[:12])
    while engine.runtime.backlog.drop_rows():
        pass
    engine.runtime.backlog.publish_provisionally(one_job(engine))
    engine.drain()
    assert engine.covered(TEXT[:12], "plan") == [(12, False)]
    assert engine.covered(TEXT[:12], "action") == [(12, True)]
    engine.check_idle()


def test_a_long_turn_is_rebased_piece_by_piece(make: Callable[..., Engine]) -> None:
    engine = provisional(make, piece=5)
    assert engine.neutral_step()
    assert [(len(n.key), n.provisional) for n in engine.path(TEXT[:12])] == [(5, False), (7, True)]
    engine.check()
    engine.drain()
    assert not any(node.provisional for node in engine.path(TEXT[:12]))
    engine.check_idle()


def test_evicted_provisional_nodes_are_no_longer_to_be_rebased(
    make: Callable[..., Engine],
) -> None:
    engine = provisional(make)
    engine.tree.evict(EvictParams(num_tokens=100))
    engine.drain()
    assert engine.runtime.backlog.rebases == deque()
    assert engine.allocator.available_size() == engine.allocator.size
    engine.check_idle()


def test_a_half_done_job_keeps_its_neutral_part(make: Callable[..., Engine]) -> None:
    engine = make("rebaseshared", max_neutral_wait_ms=0, piece=5)
    engine.turn("plan", TEXT[:12])
    engine.neutral_step()
    engine.runtime.backlog.publish_provisionally(one_job(engine))
    assert [(len(n.key), n.provisional) for n in engine.path(TEXT[:12])] == [(5, False), (7, True)]
    for role in ROLES:
        assert engine.covered(TEXT[:12], role) == [(5, True), (7, True)]
    engine.drain()
    engine.check_idle()


@pytest.mark.parametrize("wait", [-1, 0])
def test_a_backlog_beyond_its_limit_gives_up_its_oldest_turn(
    make: Callable[..., Engine], wait: int
) -> None:
    engine = make("rebaseshared", base_slots=30, max_neutral_wait_ms=wait)
    engine.turn("plan", TEXT[:10])
    engine.turn("action", [1, 2, 3, 4, 5, 6])
    (job,) = engine.runtime.backlog.jobs
    assert list(job.key.token_ids) == [1, 2, 3, 4, 5, 6]
    stats = engine.runtime.stats
    assert (stats.dropped_neutral, stats.provisional) == ((10, 0) if wait < 0 else (0, 10))
    assert len(engine.path(TEXT[:10])) == (0 if wait < 0 else 1)
    engine.drain()
    engine.check_idle()


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


# -- own base ------------------------------------------------------------------------------


def reads(engine: Engine, role: str | None, tokens: list[int]) -> list[str]:
    """Who wrote the base KV that a request of `role` over `tokens` reads, token by token."""
    req = engine.start(role, tokens)
    engine.extend(req)
    row = engine.rows.req_to_token[req.kv.req_pool_idx].tolist()
    writers = [engine.base.read(slot)[2] for slot in row[: state_of(req).base_len]]
    engine.abort(req)
    return writers


def own_turn(make: Callable[..., Engine], **kwargs: Any) -> Engine:
    """An engine in which plan's turn over ``TEXT[:12]`` has ended."""
    engine = make("rebaseown", **kwargs)
    engine.turn("plan", TEXT[:10], answer=TEXT[10:12])
    return engine


def content(engine: Engine, role: str) -> str:
    return engine.runtime.roles.adapters[role].content


def test_the_writer_goes_on_at_once_and_others_wait(make: Callable[..., Engine]) -> None:
    engine = own_turn(make)
    assert engine.runtime.backlog.tokens() == 12
    assert engine.runtime.gauges()["provisional_tokens"] == 0
    assert reads(engine, "plan", TEXT[:15]) == [content(engine, "plan")] * 12
    assert reads(engine, "action", TEXT[:15]) == []
    backlog = engine.runtime.backlog
    for role, waits in (("plan", False), ("action", True), (None, True)):
        state = engine.runtime.new_state(role)
        key = RadixKey(array("q", TEXT[:15]), engine.runtime.namespace(state, None))
        assert bool(backlog.blocking(key, state)) == waits
    engine.check_idle()


@pytest.mark.parametrize("schedule", ["lp", "db"])
def test_the_writer_keeps_its_base_and_others_read_the_neutral_one(
    make: Callable[..., Engine], schedule: str
) -> None:
    engine = own_turn(make, schedule=schedule)
    engine.drain()
    assert engine.runtime.backlog.tokens() == 0 and not engine.runtime.backlog.rebases
    assert reads(engine, "plan", TEXT[:15]) == [content(engine, "plan")] * 12
    assert reads(engine, "action", TEXT[:15]) == [NEUTRAL] * 12
    assert engine.runtime.gauges()["own_base_tokens"] == 12
    assert engine.covered(TEXT[:12], "action") == [(12, True)]
    # Action's turn on top: plan reads its own tokens as its own, action's as everybody.
    engine.turn("action", TEXT[:16])
    engine.drain()
    assert reads(engine, "plan", TEXT[:18]) == [content(engine, "plan")] * 12 + [NEUTRAL] * 4
    assert reads(engine, "action", TEXT[:18]) == [NEUTRAL] * 12 + [content(engine, "action")] * 4
    assert reads(engine, None, TEXT[:18]) == [NEUTRAL] * 16
    engine.check_idle()


def test_own_base_is_the_first_to_be_evicted(make: Callable[..., Engine]) -> None:
    engine = own_turn(make)
    engine.drain()
    assert engine.tree.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 12
    assert reads(engine, "plan", TEXT[:15]) == [NEUTRAL] * 12
    assert engine.covered(TEXT[:12], "plan") == [(12, True)]
    assert engine.runtime.stats.evicted_own == 12
    engine.check_idle()


def test_own_base_that_is_read_stays(make: Callable[..., Engine]) -> None:
    engine = own_turn(make)
    engine.drain()
    req = engine.start("plan", TEXT[:15])
    engine.extend(req)
    assert engine.tree.evict_own(99) == 0
    engine.check()
    engine.finish(req)
    assert engine.tree.evict_own(99) == 12
    engine.check_idle()


def test_without_a_share_of_the_pool_the_turn_is_rebased_in_place(
    make: Callable[..., Engine],
) -> None:
    engine = own_turn(make, own_base_fraction=0.0)
    (node,) = engine.path(TEXT[:12])
    slots = node.value.clone()
    req = engine.start("plan", TEXT[:15])
    engine.extend(req)
    assert not engine.neutral_step(), "its writer reads it"
    engine.finish(req)
    engine.drain()
    assert node.value.equal(slots) and node.own is None
    assert reads(engine, "plan", TEXT[:15]) == [NEUTRAL] * 15
    assert engine.runtime.gauges()["own_base_tokens"] == 0
    engine.check_idle()


def test_own_base_keeps_to_its_share(make: Callable[..., Engine]) -> None:
    engine = make("rebaseown", base_slots=60, own_base_fraction=0.25)
    for first in range(0, 60, 20):
        engine.turn("plan", list(range(first, first + 12)))
        engine.drain()
        engine.check()
    # Of 60 slots 36 hold neutral base KV, which can be evicted.
    assert engine.tree.own_size() == 12
    newest = engine.path(list(range(40, 52)), "plan")
    assert [node.own is not None for node in newest] == [True]
    engine.check_idle()


def test_a_rebase_does_not_disturb_the_writer_that_reads_the_turn(
    make: Callable[..., Engine],
) -> None:
    engine = own_turn(make, piece=5)
    req = engine.start("plan", TEXT[:15])
    engine.extend(req)
    row = engine.rows.req_to_token[req.kv.req_pool_idx, :15].clone()
    engine.drain()
    assert engine.runtime.backlog.tokens() == 0
    engine.check()
    assert engine.rows.req_to_token[req.kv.req_pool_idx, :15].equal(row)
    assert engine.tree.own_pinned_size == 12
    # What the others would have read by now is room: nobody does.
    assert not any(retired.rows.numel() for retired in engine.tree.retired)
    engine.finish(req)
    engine.check_idle()


def test_a_rebase_without_a_free_row_takes_no_slots(make: Callable[..., Engine]) -> None:
    engine = own_turn(make, num_requests=1)
    req = engine.start("plan", TEXT[:15])
    engine.extend(req)
    for _ in range(2):
        assert not engine.neutral_step(), "the only row of the request table is taken"
        engine.check()
    engine.finish(req)
    engine.drain()
    assert engine.runtime.backlog.tokens() == 0
    engine.check_idle()


def test_unloading_a_role_drops_its_own_base(make: Callable[..., Engine]) -> None:
    engine = own_turn(make)
    engine.drain()
    engine.unload("plan")
    assert engine.tree.own_size() == 0
    engine.check_idle()


@pytest.mark.parametrize("method", ["rebaseshared", "rebaseown"])
def test_what_is_read_without_a_break_is_rebased_beside_its_readers(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """User load never keeps a provisional turn from its neutral pass for ever."""
    engine = make(method, max_neutral_wait_ms=0)
    engine.turn("plan", TEXT[:10], answer=TEXT[10:12])
    if engine.runtime.backlog.jobs:
        engine.runtime.backlog.publish_provisionally(one_job(engine))
    req = engine.start("action", TEXT[:15], impatient=True)
    engine.extend(req)
    assert state_of(req).base_len == 12
    row = engine.rows.req_to_token[req.kv.req_pool_idx, :15].clone()
    monkeypatch.setattr(backlog_module, "_MAX_READ", 0.0)
    engine.drain()
    (node, *_) = engine.path(TEXT[:12])
    assert not node.provisional
    assert engine.tree.retired and engine.tree.retired[0].rows.numel() >= 12
    engine.check()  # the reader still reads what it read
    assert engine.rows.req_to_token[req.kv.req_pool_idx, :15].equal(row)
    engine.finish(req)
    # What the reader fed follows on base that was replaced: it is to be rebased, too.
    engine.drain()
    assert reads(engine, "reflect", TEXT[:18]) == [NEUTRAL] * 15
    engine.check_idle()


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
        "lose_patience": 2,
        "evict": 1,
        "evict_all": 1,
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
            may_be_impatient = self.engine.runtime.may_publish_provisionally
            req = self.engine.start(
                self.random.choice(roles),
                self.context(),
                salt=self.random.choice([None, None, None, "x"]),
                impatient=may_be_impatient and self.random.random() < 0.3,
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
        self.engine.neutral_step()

    def lose_patience(self) -> None:
        """Somebody cannot wait for a neutral pass."""
        backlog = self.engine.runtime.backlog
        if backlog.jobs and self.engine.runtime.may_publish_provisionally:
            backlog.publish_provisionally(self.random.choice(backlog.jobs))

    def evict(self) -> None:
        self.engine.tree.evict(EvictParams(num_tokens=self.random.randrange(1, 5)))

    def evict_all(self) -> None:
        """A user's step may have every slot that no user's request holds or reads."""
        engine = self.engine
        engine.tree.evict(EvictParams(num_tokens=engine.allocator.size))
        held = 0
        read = set()
        for req in self.prefilling + self.decoding:
            if req.kv.holds_kv:
                held += max(0, req.kv.kv_allocated_len - req.kv.cache_protected_len)
            node = req.lock.node
            while node is not engine.tree.root_node:
                read.add(node)
                node = node.parent
        held += sum(len(node.key) for node in read)
        held += engine.tree.own_pinned_size
        held += sum(retired.base.numel() for retired in engine.tree.retired)
        assert engine.allocator.available_size() == engine.allocator.size - held

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
@pytest.mark.parametrize(
    ("method", "schedule", "wait"),
    [
        ("baseshared", "lp", -1),
        ("baselrshared", "lp", -1),
        ("prelrshared", "lp", -1),
        ("rebaseshared", "lp", -1),
        ("rebaseshared", "db", -1),
        ("rebaseshared", "auto", -1),
        ("rebaseshared", "lp", 0),
        ("rebaseshared", "db", 0),
        ("rebaseshared", "auto", 0),
        ("rebaseown", "lp", -1),
        ("rebaseown", "db", -1),
        ("rebaseown", "auto", -1),
        ("rebaseown", "lp", 0),
        ("rebaseown", "auto", 0),
    ],
)
def test_no_slot_is_lost_or_shared_whatever_happens(
    make: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    schedule: str,
    wait: int,
    seed: int,
) -> None:
    monkeypatch.setattr(backlog_module, "_PUBLISH_EVERY", 3)
    monkeypatch.setattr(neutral_module, "_STEP_SHARE", 1.0)
    # Every other seed: what is provisional is rebased beside its readers at once.
    monkeypatch.setattr(backlog_module, "_MAX_READ", 0.0 if seed % 2 else 1e9)
    engine = make(
        method,
        base_slots=90,
        lr_slots=120,
        num_requests=6,  # none is left for a neutral pass when all users are there
        piece=6,
        schedule=schedule,
        max_neutral_wait_ms=wait,
    )
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
