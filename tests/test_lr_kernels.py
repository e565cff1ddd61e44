"""Triton kernels against float64, in Triton's interpreter: no GPU is needed.

The cases and tolerances are those of ``kernels/bench/cases.py``, which a GPU is checked with as
well. Outputs are poisoned before the launch.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import error_of, make_case, make_write_case, oracle
from ops import reference
from ops.lr_decode import lr_decode, scratch, splits_for
from ops.lr_extend import lr_extend
from ops.lr_rows import AttentionInputs
from ops.lr_write import lr_write


@pytest.mark.parametrize("seed", range(110))
def test_extend(seed: int) -> None:
    q, inputs, q_indptr = make_case(seed, decode=False)
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    longest = int(q_indptr.diff().max())
    lr_extend(q, out, inputs, q_indptr, longest)
    assert error_of(out, oracle(q, inputs, q_indptr)) <= 1


@pytest.mark.parametrize("seed", range(110))
def test_decode(seed: int) -> None:
    q, inputs, _ = make_case(1000 + seed, decode=True)
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    num_splits = random.Random(seed).choice([1, 2, 3, 8])
    parts, part_lse = scratch(*q.shape, num_splits, "cpu")
    parts.fill_(math.nan)
    part_lse.fill_(math.nan)
    lr_decode(q, out, inputs, parts, part_lse)
    # Requests are in order: row i of q is request i, of length 0 too.
    assert error_of(out, oracle(q, inputs, torch.arange(len(q) + 1))) <= 1


@pytest.mark.parametrize("write", [lr_write, reference.write_rows])
@pytest.mark.parametrize("seed", range(24))
def test_write(seed: int, write: Any) -> None:
    case = make_write_case(seed)
    write(case.x, case.stack, case.slots, case.rows[0], *case.rows[1:] or [None])
    for rows, expected in zip(case.rows, case.expected, strict=True):
        assert error_of(rows[1:], expected[1:]) <= 1  # slot 0 takes what nobody reads


@pytest.mark.parametrize("requests", [1, 3, 8, 200])
@pytest.mark.parametrize("tokens", [1, 255, 17_000, 131_072])
def test_splits_fill_the_device_and_fit_the_scratch(requests: int, tokens: int) -> None:
    from ops.lr_decode import most_parts

    splits = splits_for(requests, 8, 132, tokens)
    assert 1 <= splits <= 128
    assert requests * 8 * splits <= most_parts(requests, 8, 132)
    if tokens >= 17_000:
        assert requests * 8 * splits >= 132 or splits >= 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_v": torch.zeros(9, 80)}, "80 wide"),
        ({"cos_sin": None}, "rotated over the whole head"),
        ({"cos_sin": torch.zeros(40, 32)}, "rotated over the whole head"),
        ({"k": torch.zeros(9, 5, 64)}, "do not share 5"),
        ({"v": torch.zeros(9, 2, 64, dtype=torch.float64)}, "float64"),
        ({"rows_k": torch.zeros(8, 9).T}, "contiguous"),
    ],
)
def test_shapes_that_are_not_served_are_refused(change: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 4, 64)
    inputs = AttentionInputs(
        k=torch.zeros(9, 2, 64),
        v=torch.zeros(9, 2, 64),
        rows_k=torch.zeros(9, 8),
        rows_v=torch.zeros(9, 8),
        b_k=torch.zeros(1, 8, 128),
        b_v=torch.zeros(1, 8, 128),
        ranks=torch.tensor([8]),
        cos_sin=torch.zeros(40, 64),
        req_to_token=torch.zeros(1, 40, dtype=torch.int32),
        req_to_lr=torch.zeros(1, 40, dtype=torch.int32),
        rows=torch.zeros(1),
        seq_lens=torch.ones(1),
        adapters=torch.zeros(1),
        scale=1.0,
    )
    inputs.check(q, q)
    with pytest.raises(ValueError, match=message):
        replace(inputs, **change).check(q, q)
    with pytest.raises(ValueError, match="head size 80"):
        inputs.check(torch.zeros(1, 4, 80), torch.zeros(1, 4, 80))
