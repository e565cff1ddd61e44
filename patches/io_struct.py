"""sglang.srt.managers.io_struct

Why: values that SGLang lets through, such as a list of the wrong length, end its scheduler
process or are internal errors, and an empty `lora_path` is served by the model without an adapter.
What a caller says in headers (`precache_sglang.hints`) has to reach the scheduler.
How: check (`precache_sglang.request_check`) before SGLang counts the prompts and after; put hints
into the fields that SGLang passes on, before it fills in an id. SGLang turns a `ValueError` into
status 400.
Gone when: SGLang checks values, and passes on unknown fields.

Why: a tenant's requests must not meet another's in the cache.
How: its name goes in front of the ``extra_key`` of each prompt.
Gone when: SGLang has an API key for each tenant, and namespaces by it.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.config import Settings
from precache_sglang.hints import adopt_request_id, put_into_params
from precache_sglang.request_check import check_before_counting, check_per_prompt
from precache_sglang.tenants import current_tenant, namespace


def before_normalize(request: Any) -> None:
    if _is_ours():
        check_before_counting(request)
    adopt_request_id(request)
    put_into_params(request)


def after_normalize(_result: None, request: Any) -> None:
    if not _is_ours():
        return
    check_per_prompt(request)
    tenant = current_tenant.get()
    if tenant is None:
        return
    if request.is_single:
        request.extra_key = namespace(tenant, request.extra_key)
    else:
        count = request.batch_size * request.parallel_sample_num
        keys = request.extra_key or [None] * count
        request.extra_key = [namespace(tenant, key) for key in keys]


def _is_ours() -> bool:
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    return settings is not None and settings.policy is not None


_NORMALIZE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
PATCHES = [
    Patch(_NORMALIZE, "before", before_normalize),
    Patch(_NORMALIZE, "after", after_normalize),
]
