"""sglang.srt.managers.scheduler

Why: requests need our namespace and state, neutral passes need steps, and two classes
that the scheduler builds have to be ours. SGLang aborts every request whose id begins with
the aborted one; now that callers choose ids, that would be other people's requests. A request
that it fails to take in ends the process, and with it everybody's.
How: around the request factory, the batch decision and the result; after the getters
that SGLang has for subclasses; around an abort, other requests go by another id; around the
intake, an error is that request's answer.
Gone when: the scheduler takes a policy object for internal requests, aborts match whole ids, and
an error at the intake is the request's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from precache_sglang.patches import Patch
from sglang.srt.managers.io_struct import AbortReq, GetInternalStateReqOutput
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler

from precache_sglang.admission import PrecachePrefillAdder
from precache_sglang.hints import EXPLAIN, TRAJECTORY
from precache_sglang.metrics import Exporter
from precache_sglang.neutral import NeutralScheduler
from precache_sglang.runtime import current
from precache_sglang.streamer import PrecacheOutputStreamer
from precache_sglang.view import VIEW_ID, take_view

logger = logging.getLogger(__name__)


def around_handle_generate_request(
    original: Callable[..., None], scheduler: Scheduler, recv_req: Any, **kwargs: Any
) -> None:
    if current() is None:
        return original(scheduler, recv_req, **kwargs)
    try:
        return original(scheduler, recv_req, **kwargs)
    except Exception as error:
        # It is not in the queue yet, and holds nothing. `precache_sglang.request_check` lets
        # nothing pass that we know to fail here: this is a bug, ours or SGLang's.
        logger.exception("request rid=%r failed on its way in", recv_req.rid)
        reason = {
            "type": "abort",
            "status_code": HTTPStatus.INTERNAL_SERVER_ERROR,
            "message": f"The request could not be taken in: {type(error).__name__}: {error}",
        }
        answer = AbortReq(rid=recv_req.rid, finished_reason=reason)
        scheduler.ipc_channels.send_to_tokenizer.send_output(answer, recv_req)


def around_create_generation_req(
    original: Callable[..., Req], scheduler: Scheduler, recv_req: Any, *args: Any, **kwargs: Any
) -> Req:
    req = original(scheduler, recv_req, *args, **kwargs)
    runtime = current()
    if runtime is None:
        return req
    lora_id = kwargs.get("lora_id")
    # SGLang's front end looks a role up before it counts the request as a user of it; an
    # unload in between gets here first.
    unloaded = lora_id is not None and lora_id not in runtime.roles.adapters
    if unloaded:
        lora_id = req.lora_id = None
    req.precache = runtime.new_state(lora_id)
    _take_hints(req)
    # SGLang appends the adapter's id, which would give every role a tree of its own.
    req.extra_key = runtime.namespace(req.precache, kwargs.get("extra_key"))
    error = runtime.request_error(req)
    if unloaded:
        error = "The role's adapter was unloaded before the request arrived; load it again."
    if error is not None:
        req.set_finish_with_abort(error)
    else:
        runtime.limit_output(req)
    runtime.backlog.trajectories.note(req, req.precache.trajectory)
    return req


def _take_hints(req: Req) -> None:
    """What `precache_sglang.hints` has checked and put there in the front end."""
    params = req.sampling_params.custom_params or {}
    req.precache.trajectory = params.get(TRAJECTORY)
    req.precache.explain = bool(params.get(EXPLAIN))


def around_get_next_batch_to_run(
    original: Callable[..., NextBatchPlan],
    scheduler: Scheduler,
    running_batch: ScheduleBatch,
    last_batch: ScheduleBatch | None,
) -> NextBatchPlan:
    runtime = current()
    if runtime is None:
        return original(scheduler, running_batch=running_batch, last_batch=last_batch)
    if runtime.scheduler is None:
        runtime.scheduler = scheduler
        runtime.neutral = NeutralScheduler(scheduler, runtime)
        if scheduler.metrics_reporter.current_scheduler_metrics_enabled:
            runtime.exporter = Exporter(
                scheduler.metrics_collector.labels,
                schedule=runtime.schedule.name if runtime.schedule else "none",
            )
    runtime.history.update(runtime)
    if runtime.exporter is not None:
        runtime.exporter.update(runtime)
    return runtime.neutral.next_batch(original, running_batch, last_batch)


def around_process_batch_result(
    original: Callable[..., None], scheduler: Scheduler, batch: ScheduleBatch, result: Any
) -> None:
    runtime = current()
    if runtime is None:
        return original(scheduler, batch, result)
    runtime.require_rows_stored(batch)
    # First: a turn that ends with this step publishes what rode beside it.
    runtime.end_forward()
    if runtime.neutral.finish(batch):
        # Else /health would fail where a request waits for a long neutral pass.
        scheduler.maybe_send_health_check_signal()
    else:
        reqs = list(batch.reqs)
        original(scheduler, batch, result)
        runtime.by_role.note_tokens(reqs)


def around_abort_request(
    original: Callable[..., None], scheduler: Scheduler, recv_req: AbortReq
) -> None:
    if current() is None or recv_req.abort_all:
        return original(scheduler, recv_req)
    reqs = {*scheduler.waiting_queue, *scheduler.collect_inflight_reqs()}
    reqs.update(scheduler.grammar_manager.grammar_queue)
    if scheduler.chunked_req is not None:
        reqs.add(scheduler.chunked_req)
    others = [r for r in reqs if r.rid != recv_req.rid and r.rid.startswith(recv_req.rid)]
    for req in others:
        req.rid = "\0" + req.rid  # nothing is sent by that name: it is ours again below
    try:
        return original(scheduler, recv_req)
    finally:
        for req in others:
            req.rid = req.rid[1:]


def around_flush_cache(
    original: Callable[..., bool], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> bool:
    runtime = current()
    if runtime is not None and scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        # What a neutral pass would rebuild is about to be thrown away.
        runtime.backlog.clear()
    return original(scheduler, *args, **kwargs)


def around_get_internal_state(
    original: Callable[..., Any], scheduler: Scheduler, recv_req: Any
) -> Any:
    runtime = current()
    if runtime is not None and recv_req.rid == VIEW_ID:
        return GetInternalStateReqOutput(internal_state={"precache_view": take_view(runtime)})
    result = original(scheduler, recv_req)
    if runtime is not None:
        result.internal_state["precache"] = runtime.state()
    return result


def after_get_prefill_adder_class(cls: type, _scheduler: Scheduler) -> type | None:
    return None if current() is None else PrecachePrefillAdder


def after_get_output_streamer_class(cls: type, _scheduler: Scheduler) -> type | None:
    return None if current() is None else PrecacheOutputStreamer


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
PATCHES = [
    Patch(f"{_SCHEDULER}.handle_generate_request", "around", around_handle_generate_request),
    Patch(f"{_SCHEDULER}._create_generation_req", "around", around_create_generation_req),
    Patch(f"{_SCHEDULER}.get_next_batch_to_run", "around", around_get_next_batch_to_run),
    Patch(f"{_SCHEDULER}.process_batch_result", "around", around_process_batch_result),
    Patch(f"{_SCHEDULER}.abort_request", "around", around_abort_request),
    Patch(f"{_SCHEDULER}.flush_cache", "around", around_flush_cache),
    Patch(f"{_SCHEDULER}.get_internal_state", "around", around_get_internal_state),
    Patch(f"{_SCHEDULER}.get_prefill_adder_class", "after", after_get_prefill_adder_class),
    Patch(f"{_SCHEDULER}.get_output_streamer_class", "after", after_get_output_streamer_class),
]
