"""sglang.srt.utils.request_logger

Why: an operator needs a line for each request that names it and its role, but no prompt.
SGLang logs no request, or (``--log-requests``) its text too; the levels without text leave
out the role.
How: after SGLang's own, a line of ours.
Gone when: a level of ``--log-requests`` has the role and no text.
"""

from __future__ import annotations

import logging
from typing import Any

from precache_sglang.patches import Patch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from precache_sglang.config import Settings
from precache_sglang.streamer import INFO_KEY

logger = logging.getLogger(__name__)


def after_log_finished_request(
    _result: None, _logger: Any, obj: Any, out: dict[str, Any], *_args: Any, **_kwargs: Any
) -> None:
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    if settings is None or settings.policy is None:
        return
    if obj.rid.startswith(HEALTH_CHECK_RID_PREFIX):
        return
    meta = out["meta_info"]
    counts = meta.get(INFO_KEY) or {}
    # Names are the callers': quoted, so that none of them can look like another line.
    logger.info(
        "request rid=%r role=%r end=%s prompt=%s output=%s %s seconds=%.3f",
        obj.rid,
        obj.lora_path,
        (meta.get("finish_reason") or {}).get("type"),
        meta.get("prompt_tokens"),
        meta.get("completion_tokens"),
        " ".join(f"{name}={count}" for name, count in counts.items()),
        meta.get("e2e_latency") or 0.0,
    )


PATCHES = [
    Patch(
        "sglang.srt.utils.request_logger.RequestLogger.log_finished_request",
        "after",
        after_log_finished_request,
        main_process_only=True,
    ),
]
