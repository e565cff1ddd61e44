"""Admission: KV and LR slots are promised once, and kept for who they were promised to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engine import Engine
from standins import quiet_imports

with quiet_imports():
    from precache_sglang.patches.scheduler import (
        around_create_generation_req,
        around_handle_generate_request,
    )
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import AddReqResult
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_params import SamplingParams

    from precache_sglang.admission import PrecachePrefillAdder
    from precache_sglang.request import state_of

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = list(range(100, 120))
OTHER = list(range(500, 600))


def adder(engine: Engine, chunk: int = 1000) -> PrecachePrefillAdder:
    running = SimpleNamespace(reqs=engine.running, batch_size=lambda: len(engine.running))
    return PrecachePrefillAdder(1, engine.tree, engine.allocator, running, 0.0, 1000, chunk)


def waiting(engine: Engine, role: str, tokens: list[int]) -> Req:
    """A request that was matched and is not admitted yet."""
    req = engine.start(role, tokens)
    engine.tree.unlock(req.lock)
    req.lock = None
    req.sampling_params.max_new_tokens = 2
    return req


def add(to: PrecachePrefillAdder, req: Req) -> AddReqResult:
    return to.add_one_req(req, has_chunked_req=False, truncation_align_size=None)


def begun_in_chunks(engine: Engine, tokens: list[int]) -> Req:
    """A prompt of plan whose first chunk, of 4 tokens, has run."""
    chunked = waiting(engine, "plan", tokens)
    first = adder(engine, chunk=4)
    add(first, chunked)
    assert first.new_chunked_req is chunked
    engine.extend(chunked, to=4)
    chunked.init_next_round_input()
    return chunked


def adder_of_next_step(engine: Engine, chunked: Req, others_run: bool) -> PrecachePrefillAdder:
    scheduler = engine.runtime.scheduler
    scheduler.running_batch.reqs = []
    scheduler.chunked_req, scheduler._pending_chunked_abort_req = chunked, None
    then = adder(engine, chunk=4)
    then.running_batch = SimpleNamespace(reqs=[], is_empty=lambda: not others_run)
    return then


def test_a_prompts_rows_are_needed_whole(make: Callable[..., Engine]) -> None:
    engine = make("prelrshared", lr_slots=10)
    first = adder(engine)
    assert add(first, waiting(engine, "plan", OTHER[:8])) is AddReqResult.CONTINUE
    assert add(first, waiting(engine, "action", TEXT[:3])) is AddReqResult.NO_TOKEN
    assert add(first, waiting(engine, "action", TEXT[:2])) is AddReqResult.CONTINUE


def test_a_chunked_prompt_keeps_the_rows_it_was_promised(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared", lr_slots=20)
    chunked = begun_in_chunks(engine, OTHER[:16])
    then = adder(engine, chunk=64)
    then.add_chunked_req(chunked)
    # 16 rows are free, 12 of them promised.
    assert add(then, waiting(engine, "action", TEXT[:5])) is AddReqResult.NO_TOKEN
    assert add(then, waiting(engine, "action", TEXT[:4])) is AddReqResult.CONTINUE


@pytest.mark.parametrize("others_run", [True, False])
def test_a_chunk_without_rows_waits_or_is_given_up(
    make: Callable[..., Engine], others_run: bool
) -> None:
    engine = make("baseshared", lr_slots=20)
    chunked = begun_in_chunks(engine, OTHER[:16])
    pool = engine.runtime.lr_pool
    taken = pool.alloc(pool.available_size())
    then = adder_of_next_step(engine, chunked, others_run)
    assert then.add_chunked_req(chunked) is chunked
    assert add(then, waiting(engine, "action", TEXT[:1])) is AddReqResult.NO_TOKEN
    assert then.can_run_list == []
    given_up = engine.runtime.scheduler._pending_chunked_abort_req
    if others_run:
        assert given_up is None
        engine.runtime.free_rows(taken)
        assert adder(engine, chunk=4).add_chunked_req(chunked) is chunked
        assert chunked.extend_len == 4
    else:
        assert given_up is chunked
        assert "--precache-lr-tokens 20" in chunked.discard_output_reason.message


def test_rows_that_a_request_will_pin_are_no_room_for_others(
    make: Callable[..., Engine],
) -> None:
    engine = make("baseshared", lr_slots=24)
    engine.turn("plan", TEXT[:12])
    to = adder(engine)
    assert add(to, waiting(engine, "plan", TEXT[:16])) is AddReqResult.CONTINUE
    # 12 rows are free and 12 evictable; the first request pins those and needs 4 more.
    assert add(to, waiting(engine, "action", OTHER[:9])) is AddReqResult.NO_TOKEN
    assert add(to, waiting(engine, "action", OTHER[:8])) is AddReqResult.CONTINUE


def test_own_base_that_a_request_will_pin_is_no_room_for_others(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseown", base_slots=40)
    engine.turn("plan", TEXT[:10])
    engine.drain()
    assert engine.tree.own_evictable_size == 10
    to = adder(engine)
    # 20 slots are free and 10 evictable; the first request pins those and needs 4 and 2 more.
    assert add(to, waiting(engine, "plan", TEXT[:14])) is AddReqResult.CONTINUE
    assert add(to, waiting(engine, "action", OTHER[:12])) is AddReqResult.NO_TOKEN
    other = waiting(engine, "action", OTHER[:8])
    assert add(to, other) is AddReqResult.CONTINUE
    for req in to.can_run_list:
        engine.extend(req)
    assert engine.tree.own_pinned_size == 10


def test_own_base_that_leaves_no_room_for_its_readers_next_tokens_goes(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseown", base_slots=30)
    engine.turn("plan", TEXT[:10])
    engine.drain()
    to = adder(engine)
    req = waiting(engine, "plan", TEXT[:10] + OTHER[:14])
    assert add(to, req) is AddReqResult.CONTINUE
    engine.extend(req)
    assert engine.tree.own_size() == 0
    assert engine.runtime.stats.evicted_own == 10


@pytest.mark.parametrize("others_run", [True, False])
def test_a_chunk_without_kv_slots_waits_or_is_given_up(
    make: Callable[..., Engine], others_run: bool
) -> None:
    engine = make("rebaseown", base_slots=20)
    chunked = begun_in_chunks(engine, OTHER[:12])
    taken = engine.allocator.alloc(engine.allocator.available_size())  # decode steps of others
    then = adder_of_next_step(engine, chunked, others_run)
    assert then.add_chunked_req(chunked) is chunked
    assert then.can_run_list == []
    given_up = engine.runtime.scheduler._pending_chunked_abort_req
    if others_run:
        assert given_up is None
        engine.allocator.free(taken)
        then = adder(engine, chunk=4)
        assert then.add_chunked_req(chunked) is chunked
        assert then.can_run_list == [chunked]
    else:
        assert given_up is chunked
        assert "--max-total-tokens 20" in chunked.discard_output_reason.message


def test_replayed_tokens_need_no_kv_slot(make: Callable[..., Engine]) -> None:
    engine = make("baseshared", base_slots=20)
    engine.turn("plan", TEXT[:14])
    to = adder(engine)
    req = waiting(engine, "action", TEXT[:16])
    assert state_of(req).base_len == 14 and req.prefix_len == 0
    assert add(to, req) is AddReqResult.CONTINUE


def test_a_request_whose_role_was_unloaded_on_its_way_is_refused(
    make: Callable[..., Engine],
) -> None:
    engine = make("rebaseshared")
    engine.unload("plan")

    def original(_scheduler: Any, _recv_req: Any, **kwargs: Any) -> Req:
        return Req(
            "late", "", TEXT[:5], SamplingParams(), lora_id=kwargs["lora_id"], vocab_size=1000
        )

    with get_parallel().override(tp_rank=0):
        req = around_create_generation_req(
            original, SimpleNamespace(), SimpleNamespace(), lora_id="plan", extra_key=None
        )
    assert req.lora_id is None, "nothing of the adapter may be asked for"
    assert req.to_finish is not None and "was unloaded" in req.to_finish.message


def test_a_request_that_fails_on_its_way_in_is_answered_and_ends_nothing(
    make: Callable[..., Engine],
) -> None:
    make("rebaseshared")
    sent: list[Any] = []
    sender = SimpleNamespace(send_output=lambda answer, _recv_req: sent.append(answer))
    scheduler = SimpleNamespace(ipc_channels=SimpleNamespace(send_to_tokenizer=sender))

    def original(_scheduler: Any, _recv_req: Any) -> None:
        raise KeyError("what nobody thought of")

    around_handle_generate_request(original, scheduler, SimpleNamespace(rid="mine"))
    (answer,) = sent
    assert answer.rid == "mine"
    assert answer.finished_reason["status_code"] == 500
    assert "KeyError: 'what nobody thought of'" in answer.finished_reason["message"]
