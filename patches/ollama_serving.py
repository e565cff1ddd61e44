"""sglang.srt.entrypoints.ollama.serving

Why: Ollama's routes never look at ``model``; every name is served by the model without an
adapter.
How: settle the role at the door; see `precache_sglang.request_role`.
Gone when: SGLang resolves the names that it lists, and refuses others.
"""

from __future__ import annotations

from precache_sglang.patches import Patch

from precache_sglang.request_role import around_route

PATCHES = [
    Patch(
        f"sglang.srt.entrypoints.ollama.serving.OllamaServing.{handler}",
        "around",
        around_route,
        main_process_only=True,
    )
    for handler in ("handle_chat", "handle_generate")
]
