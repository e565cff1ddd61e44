"""``precache-sglang serve``: SGLang's server with our plugin, all its flags and ours."""

from __future__ import annotations

import os

from precache_sglang.launch.process import DIE_WITH_PARENT
from precache_sglang.patches import engine

from precache_sglang.errors import PrecacheError


def serve(argv: list[str]) -> None:
    """Start the HTTP server and block until it ends."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_itself_when_parent_died, kill_process_tree

    if os.environ.get(DIE_WITH_PARENT):
        kill_itself_when_parent_died()
    load_plugins()
    _require_plugin()
    engine.server_has_process_to_itself()
    try:
        run_server(prepare_server_args(argv))
    except PrecacheError as error:
        raise SystemExit(f"precache-sglang: {error}") from error
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _require_plugin() -> None:
    """`SGLANG_PLUGINS` or `SGLANG_PLATFORM` may have filtered us out without a word."""
    from precache_sglang.plugin import require_patches

    try:
        require_patches()
    except PrecacheError as error:
        raise SystemExit(
            f"precache-sglang: {error} Check SGLANG_PLUGINS and SGLANG_PLATFORM."
        ) from error
