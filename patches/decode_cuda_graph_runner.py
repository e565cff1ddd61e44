"""sglang.srt.model_executor.runner.decode_cuda_graph_runner

Why: a captured decode step has one token per request; neutral tokens that ride along make it
another step.
How: such a step does not run as a graph.
Gone when: SGLang asks the attention backend whether a batch can replay.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.runtime import current


def after_can_run_graph(result: bool, *_args: Any, **_kwargs: Any) -> bool:
    runtime = current()
    return result and not (runtime is not None and runtime.neutral_spans)


PATCHES = [
    Patch(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
        ".can_run_graph",
        "after",
        after_can_run_graph,
    ),
]
