"""sglang.srt.observability.req_time_stats

Why: the scheduler knows a request's role and sees every token, but it is not told when the
request arrived, and TTFT counts from there.
How: the stats that the HTTP process sends along carry ``created_time``. SGLang's record in the
scheduler has the field, converts it to the scheduler's clock and does not use it.
Gone when: SGLang sends it, as a comment there proposes.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch


def after_getstate(result: dict[str, Any], stats: Any) -> dict[str, Any]:
    return {**result, "created_time": stats.created_time}


PATCHES = [
    Patch(
        "sglang.srt.observability.req_time_stats.APIServerReqTimeStats.__getstate__",
        "after",
        after_getstate,
    ),
]
