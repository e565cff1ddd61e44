"""Histograms, the bound on role names, and the size of what the live page gets."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from standins import quiet_imports

with quiet_imports():
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from precache_sglang.metrics import NO_ROLE, OTHER_ROLES, Histogram, RoleTable
    from precache_sglang.view import MAX_NODES, MAX_ROLES, SharedView, take_view


def test_a_histogram_counts_in_buckets_and_interpolates() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) is None
    for value, times in ((1.0, 2), (1.5, 1), (4.0, 1), (100.0, 1)):
        histogram.observe(value, times)
    assert histogram.counts == [2, 1, 1, 1]  # a bound belongs to the bucket below it
    assert (histogram.count, histogram.sum) == (5, 107.5)
    assert histogram.quantile(0.2) == 0.5
    assert histogram.quantile(0.6) == 2.0
    assert histogram.quantile(1.0) == 4.0, "what is above the last bound is at least that"


def test_role_names_beyond_the_limit_share_one_row() -> None:
    table = RoleTable(limit=2)
    assert table.label(None) == NO_ROLE
    assert [table.label(f"role-{i}") for i in range(4)] == ["role-0", "role-1"] + 2 * [OTHER_ROLES]
    assert table.of("role-2") is table.of("role-3") is not table.of("role-1")
    assert table.label("role-0") == "role-0", "those that have a row keep it"
    # Names that would pass for ours, or that are no names, get no row of their own.
    fresh = RoleTable(limit=10)
    assert {fresh.label(name) for name in (NO_ROLE, OTHER_ROLES, "x" * 81)} == {OTHER_ROLES}


@pytest.fixture
def crowded(make: Callable[..., Any]) -> Any:
    """An engine with a tree of some hundred nodes of many tenants."""
    engine = make("rebaseshared", base_slots=20_000, lr_slots=40_000)
    for index in range(500):
        salt = f"tenant-{index % 3}"
        engine.turn("plan", [index % 250, index // 250, 7, 8], salt=salt)
        engine.drain()
    return engine


def test_a_big_tree_is_cut_and_says_so(crowded: Any) -> None:
    runtime = crowded.runtime
    start = time.perf_counter()
    view = take_view(runtime)
    took = time.perf_counter() - start
    nodes = view["tree"]["nodes"]
    assert len(nodes) == MAX_NODES < view["gauges"]["tree_nodes"] == runtime.tree.num_nodes
    assert len(json.dumps(view)) < 200_000
    assert took < 0.25, "the scheduler waits for it"
    known = {None}
    for node in nodes:
        assert node["parent"] in known, "a node comes after its parent"
        known.add(node["id"])
    # Those used last: the newest turn is among them.
    newest = crowded.tree.walk(_key(crowded, [499 % 250, 499 // 250, 7, 8], "tenant-1"))
    assert newest[-1].id in known
    assert len({node["tenant"] for node in nodes if node["parent"] is None}) == 3


def _key(engine: Any, tokens: list[int], salt: str) -> RadixKey:
    space = engine.runtime.namespace(engine.runtime.new_state("plan"), None)
    return RadixKey(array("q", tokens), space, cache_salt=salt)


def test_a_view_tells_no_tokens_and_no_salts(make: Callable[..., Any]) -> None:
    engine = make("rebaseshared")
    tokens = [901, 902, 903, 904]
    engine.turn("plan", tokens, salt="secret-salt", extra_key="secret-key")
    running = engine.start("action", [*tokens, 905], salt="secret-salt")
    engine.extend(running)
    view = take_view(engine.runtime)
    assert view["tree"]["running"] and view["tree"]["owed"]
    assert "secret" not in json.dumps(view)
    assert not {*tokens, 905}.intersection(_leaves(view))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _leaves(item)


@pytest.mark.parametrize(
    ("method", "base", "rows"),
    [
        ("nonshared", {"full"}, 0),
        ("fullshared", {"full"}, 0),
        ("baseshared", {"adapted"}, 1),
        ("baselrshared", {"adapted"}, 3),
        ("prelrshared", {"adapted"}, 3),
        ("rebaseshared", {"neutral"}, 3),
        ("rebaseown", {"neutral"}, 3),
    ],
)
def test_a_view_says_what_each_method_caches(
    make: Callable[..., Any], method: str, base: set[str], rows: int
) -> None:
    engine = make(method)
    engine.turn("plan", [1, 2, 3, 4])
    engine.drain()
    view = take_view(engine.runtime)
    json.dumps(view)
    (node,) = view["tree"]["nodes"]
    assert {node["base"]} == base and len(node["slices"]) == rows
    assert view["roles"][node["fed_by"]]["name"] == "plan"
    assert ("lr" in view["pools"]) == (rows > 0)
    for pool in view["pools"].values():
        assert min(pool.values()) >= 0


def test_more_roles_than_a_view_lists(make: Callable[..., Any]) -> None:
    engine = make("rebaseshared")
    table = engine.runtime.by_role
    table.limit = 1000
    for index in range(100):
        table.of(f"gone-{index}")
    view = take_view(engine.runtime)
    assert len(view["roles"]) == MAX_ROLES < view["num_roles"]


def test_one_picture_for_all_who_look() -> None:
    taken = 0

    async def take() -> int:
        nonlocal taken
        taken += 1
        await asyncio.sleep(0.05)
        return taken

    async def look() -> None:
        shared = SharedView(take, every=0.3)
        assert set(await asyncio.gather(*(shared.get(1) for _ in range(20)))) == {1}
        assert await shared.get(1) == 1, "younger than that"
        await asyncio.sleep(0.35)
        assert await shared.get(1) == 2
        await asyncio.sleep(0.35)
        with pytest.raises(asyncio.TimeoutError):
            await shared.get(0.01)
        assert await shared.get(1) == 3, "what was asked for goes to whoever comes next"

    asyncio.run(look())
