"""sglang.srt.model_executor.pool_configurator

Why: the LR pool's bytes come out of the same memory as the KV pool's.
How: charge them per token, or as a fixed amount when ``--precache-lr-tokens`` is given.
Gone when: pools can be registered with the configurator.
"""

from __future__ import annotations

from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.runtime import current


def after_compute_cell_size(
    cell_size: int, _configurator: Any, _kvc: Any, _num_layers: int
) -> int | None:
    runtime = current()
    return None if runtime is None else cell_size + runtime.bytes_per_token()


def after_init(_result: None, configurator: Any, *_args: Any, **_kwargs: Any) -> None:
    runtime = current()
    if runtime is not None:
        configurator._fixed_overhead_bytes += runtime.fixed_bytes()


_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
PATCHES = [
    Patch(f"{_CONFIGURATOR}._compute_cell_size", "after", after_compute_cell_size),
    Patch(f"{_CONFIGURATOR}.__init__", "after", after_init),
]
