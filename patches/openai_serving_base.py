"""sglang.srt.entrypoints.openai.serving_base

Why: ``/v1/models`` lists every role, but SGLang takes ``model`` for a role only behind a
colon and serves any other name by the model without an adapter.
How: after SGLang's own rules, a bare name selects the role of that name; a name that is
neither a role nor the served model is an error.
Gone when: SGLang resolves the names that it lists.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.config import Settings


def after_resolve_lora_path(
    result: Any, serving: Any, request_model: str, explicit_lora_path: Any
) -> str | None:
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    if result is not None or settings is None or settings.policy is None:
        return None
    manager = serving.tokenizer_manager
    # "default" is what SGLang fills in for a request that names no model.
    if request_model in (manager.served_model_name, manager.model_path, "default"):
        return None
    if request_model in manager.lora_ref_cache:
        return request_model
    raise ValueError(
        f"model={request_model!r} is neither the served model ({manager.served_model_name}) nor "
        f"a loaded role ({', '.join(manager.lora_ref_cache) or 'none'})."
    )


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path",
        "after",
        after_resolve_lora_path,
        main_process_only=True,
    ),
]
