"""sglang.srt.entrypoints.openai.serving_base

Why: ``/v1/models`` lists every role, but SGLang takes ``model`` for a role only behind a
colon, any text there, and serves any other name by the model without an adapter.
How: settle the role at the door; see `precache_sglang.request_role`.
Gone when: SGLang resolves the names that it lists, and refuses others.
"""

from __future__ import annotations

from precache_sglang.patches import Patch

from precache_sglang.request_role import around_route

PATCHES = [
    Patch(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        "around",
        around_route,
        main_process_only=True,
    ),
]
