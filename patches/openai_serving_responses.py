"""sglang.srt.entrypoints.openai.serving_responses

Why: ``/v1/responses`` accepts the names of roles and serves them all by the model without an
adapter.
How: settle the role at the door; see `precache_sglang.request_role`.
Gone when: SGLang passes the adapter on, and refuses unknown names.
"""

from __future__ import annotations

from precache_sglang.patches import Patch

from precache_sglang.request_role import around_route

PATCHES = [
    Patch(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses.create_responses",
        "around",
        around_route,
        main_process_only=True,
    ),
]
