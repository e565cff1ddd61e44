"""sglang.srt.entrypoints.engine

Why: SGLang spawns its scheduler and its detokenizer, and each of them imports SGLang anew. Without
an accelerator that is most of what it takes to start a server.
How: on our CPU platform, a process that does nothing but serve forks them. Elsewhere a CUDA
context forbids it, or threads and OpenMP regions that somebody's own program may have run.
Gone when: SGLang chooses the start method by platform.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from precache_sglang.patches import Patch

_is_servers_own = False


def server_has_process_to_itself() -> None:
    """Say that this process does nothing but start the server."""
    global _is_servers_own
    _is_servers_own = True


def after_set_envs_and_config(_result: None, *_args: Any, **_kwargs: Any) -> None:
    from precache_sglang.platform import is_active  # SGLang settles its platform when imported

    if _is_servers_own and is_active():
        multiprocessing.set_start_method("fork", force=True)


PATCHES = [
    Patch(
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        "after",
        after_set_envs_and_config,
        main_process_only=True,
    ),
]
