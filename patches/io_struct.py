"""sglang.srt.managers.io_struct

Why: a `lora_path` list for one prompt ends SGLang's scheduler process, a list of the wrong
length is an internal error, and an empty name is served by the model without an adapter.
What a caller says in headers (`precache_sglang.hints`) has to reach the scheduler.
How: check the shape once SGLang has counted the prompts; put hints into the fields that SGLang
passes on, before it fills in an id. SGLang turns a `ValueError` into status 400.
Gone when: SGLang checks that there is one adapter for each prompt, and passes on unknown fields.

Why: a tenant's requests must not meet another's in the cache.
How: its name goes in front of the ``extra_key`` of each prompt.
Gone when: SGLang has an API key for each tenant, and namespaces by it.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.config import Settings
from precache_sglang.hints import adopt_request_id, put_into_params
from precache_sglang.tenants import current_tenant, namespace


def before_normalize(request: Any) -> None:
    adopt_request_id(request)
    put_into_params(request)


def after_normalize(_result: None, request: Any) -> None:
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    if settings is None or settings.policy is None:
        return
    tenant = current_tenant.get()
    if tenant is not None:
        if request.is_single:
            request.extra_key = namespace(tenant, request.extra_key)
        else:
            count = request.batch_size * request.parallel_sample_num
            keys = request.extra_key or [None] * count
            request.extra_key = [namespace(tenant, key) for key in keys]
    if request.lora_path is None:
        return
    paths = request.lora_path if isinstance(request.lora_path, list) else [request.lora_path]
    if "" in paths:
        raise ValueError(
            "lora_path is empty; name a role, or leave it out for the model without an adapter."
        )
    if not isinstance(request.lora_path, list):
        return
    if request.is_single:
        raise ValueError("lora_path is a list, but there is one prompt; give one role.")
    samples = request.parallel_sample_num
    if len(paths) != request.batch_size * samples:
        raise ValueError(
            f"lora_path lists {len(paths) // samples} roles for {request.batch_size} prompts; "
            "give one role, or one for each prompt (null for none)."
        )


_NORMALIZE = "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
PATCHES = [
    Patch(_NORMALIZE, "before", before_normalize),
    Patch(_NORMALIZE, "after", after_normalize),
]
