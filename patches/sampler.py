"""sglang.srt.layers.sampler

Why: one request whose grammar allows no token, or whose logit bias overflows, leaves probabilities
that are no numbers; PyTorch's sampling fails on them, and ends the server for everybody.
How: such a row becomes uniform. What it samples is that request's alone, and a grammar refuses it.
Gone when: SGLang's sampler survives such a row.
"""

from __future__ import annotations

from typing import Any

import torch
from precache_sglang.patches import Patch

from precache_sglang.runtime import current


def before_sample_from_probs(
    _sampler: Any, probs: torch.Tensor, *_args: Any, **_kwargs: Any
) -> None:
    if current() is not None:
        probs.nan_to_num_(nan=1.0 / probs.shape[-1])


PATCHES = [
    Patch(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs", "before", before_sample_from_probs
    )
]
