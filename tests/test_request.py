"""What is kept for a request: owned rows, prompt counts, whose pass it is."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from precache_sglang.request import OwnedSlots, PromptCounts, RequestState, state_of
from precache_sglang.roles import Adapter


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def adapter(rows_key: str | None = "rows", content: str = "content") -> Adapter:
    return Adapter(
        lora_id="id",
        name="plan",
        content=content,
        rows_key=rows_key,
        team="default",
        rank=2,
        k=None,
        v=None,
    )


def test_rows_without_slots_are_an_empty_span() -> None:
    rows = OwnedSlots(7)
    assert (rows.num_slots, rows.end) == (0, 7)
    assert rows.slots().dtype == torch.int64 and rows.slots().numel() == 0


def test_rows_grow_by_one_slot_for_each_token() -> None:
    rows = OwnedSlots(3)
    rows.append(slots(10, 11))
    rows.append(slots(4))
    assert (rows.start, rows.end, rows.num_slots) == (3, 6, 3)
    assert rows.slots().tolist() == [10, 11, 4]


def test_taking_rows_hands_over_the_oldest_and_moves_the_start() -> None:
    rows = OwnedSlots(3, [slots(10, 11), slots(12), slots(13, 14)])
    assert rows.take_until(6).tolist() == [10, 11, 12]
    assert (rows.start, rows.end) == (6, 8)
    assert rows.slots().tolist() == [13, 14]


def test_rows_can_be_appended_after_some_were_taken() -> None:
    rows = OwnedSlots(0, [slots(1, 2, 3)])
    rows.take_until(2)
    rows.append(slots(9))
    assert (rows.start, rows.end) == (2, 4)
    assert rows.slots().tolist() == [3, 9]


def test_taking_up_to_a_position_before_the_start_takes_nothing() -> None:
    rows = OwnedSlots(5, [slots(1, 2)])
    assert rows.take_until(5).numel() == 0
    assert rows.take_until(2).numel() == 0
    assert (rows.start, rows.end) == (5, 7)


def test_taking_beyond_the_end_takes_what_there_is() -> None:
    rows = OwnedSlots(5, [slots(1, 2)])
    assert rows.take_until(100).tolist() == [1, 2]
    assert (rows.start, rows.end, rows.num_slots) == (7, 7, 0)


def test_prompt_counts_start_at_zero() -> None:
    assert PromptCounts() == PromptCounts(shared=0, own=0, replayed=0, computed=0)


def test_a_pass_without_adapter_is_neutral_and_needs_no_rows() -> None:
    state = RequestState(adapter=None, team="default")
    assert state.is_neutral and state.own_key is None and state.feeder == ""


def test_a_pass_with_an_adapter_feeds_under_its_content() -> None:
    state = RequestState(adapter=adapter(), team="default")
    assert not state.is_neutral
    assert (state.own_key, state.feeder) == ("rows", "content")


def test_an_adapter_of_neither_k_nor_v_feeds_but_needs_no_rows() -> None:
    state = RequestState(adapter=adapter(rows_key=None), team="default")
    assert not state.is_neutral
    assert (state.own_key, state.feeder) == (None, "content")


def test_a_neutral_job_feeds_for_the_role_whose_turn_it_rebuilds() -> None:
    job = SimpleNamespace(feeder="content of plan")
    state = RequestState(adapter=None, team="default", job=job)  # type: ignore[arg-type]
    assert state.is_neutral and state.own_key is None
    assert state.feeder == "content of plan"


def test_two_requests_share_no_lists() -> None:
    first = RequestState(adapter=None, team="default")
    second = RequestState(adapter=None, team="default")
    first.rows["rows"] = OwnedSlots(0)
    first.written.append("rows")
    assert second.rows == {} and second.written == []


def test_the_state_rides_on_the_request() -> None:
    state = RequestState(adapter=None, team="default")
    assert state_of(SimpleNamespace(precache=state)) is state  # type: ignore[arg-type]
