"""The reference operations against formulas written down a second time, in float64."""

from __future__ import annotations

import pytest
import torch
from precache_sglang.kernels.reference import attend, expand_keys, expand_values

FLOAT32 = 1e-5
# bfloat16 keeps 8 bits; the kernel also rounds the softmax weights to it before it sums.
BFLOAT16 = 2e-2

GQA = pytest.mark.parametrize("group", [1, 3, 4])
HEAD_DIM = pytest.mark.parametrize("head_dim", [16, 64, 128])


pytestmark = pytest.mark.usefixtures("one_thread")


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_new: int, scale: float
) -> torch.Tensor:
    """Softmax over every visible key, one score matrix per query head, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    num_tokens = k.shape[0]
    query_at = torch.arange(num_tokens - num_new, num_tokens).unsqueeze(1)
    scores.masked_fill_(torch.arange(num_tokens) > query_at, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)


def check(
    num_tokens: int,
    num_new: int,
    group: int = 3,
    head_dim: int = 64,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    tolerance: float = FLOAT32,
) -> None:
    q = torch.randn(num_new, kv_heads * group, head_dim).to(dtype)
    k = torch.randn(num_tokens, kv_heads, head_dim).to(dtype)
    v = torch.randn(num_tokens, kv_heads, head_dim).to(dtype)
    scale = head_dim**-0.5
    out = attend(q, k, v, num_new, scale)
    assert out.shape == q.shape and out.dtype == dtype
    torch.testing.assert_close(
        out.double(), dense(q, k, v, num_new, scale), atol=tolerance, rtol=tolerance
    )


@GQA
@HEAD_DIM
def test_attention_without_a_prefix_is_causal(group: int, head_dim: int) -> None:
    check(9, 9, group, head_dim)


@GQA
@HEAD_DIM
def test_a_single_first_token_attends_to_itself(group: int, head_dim: int) -> None:
    check(1, 1, group, head_dim)


@GQA
@HEAD_DIM
def test_a_decode_step_sees_every_token(group: int, head_dim: int) -> None:
    check(23, 1, group, head_dim)


@GQA
@HEAD_DIM
def test_a_chunk_sees_its_prefix_whole_and_itself_causally(group: int, head_dim: int) -> None:
    check(23, 7, group, head_dim)


@pytest.mark.parametrize(("num_tokens", "num_new"), [(3, 2), (700, 130), (700, 1), (530, 529)])
def test_lengths_on_both_sides_of_a_kernel_tile_agree(num_tokens: int, num_new: int) -> None:
    check(num_tokens, num_new)


@pytest.mark.parametrize(("num_tokens", "num_new"), [(9, 9), (200, 1), (200, 40)])
@GQA
def test_bfloat16_agrees_within_its_precision(num_tokens: int, num_new: int, group: int) -> None:
    check(num_tokens, num_new, group, dtype=torch.bfloat16, tolerance=BFLOAT16)


def test_one_part_that_outweighs_the_other_by_far_does_not_overflow() -> None:
    """Prefix and new tokens are joined by their log-sum-exps, here hundreds apart."""
    num_new, head_dim = 3, 16
    for strong in (slice(0, 5), slice(5, 8)):
        q = torch.full((num_new, 2, head_dim), 10.0)
        k = torch.full((8, 1, head_dim), -10.0)
        k[strong] = 10.0
        v = torch.randn(8, 1, head_dim)
        out = attend(q, k, v, num_new, 0.25)
        torch.testing.assert_close(
            out.double(), dense(q, k, v, num_new, 0.25), atol=FLOAT32, rtol=FLOAT32
        )


@pytest.mark.parametrize("num_new", [1, 4])
def test_keys_and_values_may_be_rows_picked_from_a_pool(num_new: int) -> None:
    pool_k, pool_v = torch.randn(2, 40, 2, 64)
    slots = torch.randperm(40)[:17]
    q = torch.randn(num_new, 6, 64)
    picked = attend(q, pool_k.index_select(0, slots), pool_v.index_select(0, slots), num_new, 0.125)
    expected = dense(q, pool_k[slots], pool_v[slots], num_new, 0.125)
    torch.testing.assert_close(picked.double(), expected, atol=FLOAT32, rtol=FLOAT32)


@pytest.mark.parametrize("num_new", [1, 4])
def test_keys_and_values_may_be_strided_views(num_new: int) -> None:
    """A run of slots is read as a view of the pool; heads may lie apart in memory, too."""
    pool = torch.randn(30, 2, 2, 64)  # key and value of a head side by side
    k, v = pool[5:20, :, 0], pool[5:20, :, 1]
    assert not k.is_contiguous()
    q = torch.randn(num_new, 6, 64)
    torch.testing.assert_close(
        attend(q, k, v, num_new, 0.125).double(),
        dense(q, k, v, num_new, 0.125),
        atol=FLOAT32,
        rtol=FLOAT32,
    )


# -- expand ----------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, 5e-2)])
def test_expanded_values_are_base_plus_rows_times_b(dtype: torch.dtype, tolerance: float) -> None:
    base = torch.randn(11, 2, 64).to(dtype)
    rows, b = torch.randn(11, 8).to(dtype), torch.randn(8, 128).to(dtype)
    before = base.clone()
    out = expand_values(base, rows, b)
    expected = base.double() + (rows.double() @ b.double()).view(11, 2, 64)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(base, before), "the pool's values must not be written"


def test_values_may_be_expanded_from_views_of_pools() -> None:
    pool, lr_pool = torch.randn(20, 2, 16), torch.randn(20, 8)
    b = torch.randn(4, 32)
    out = expand_values(pool[3:9], lr_pool[3:9, :4], b)
    torch.testing.assert_close(
        out, pool[3:9] + (lr_pool[3:9, :4] @ b).view(6, 2, 16), atol=FLOAT32, rtol=FLOAT32
    )


def cos_sin_of(positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """As in SGLang's cache: the cosines of a token's angles, then their sines."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = positions.double().unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def rotate(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, neox: bool) -> torch.Tensor:
    """RoPE pair by pair, as multiplication by ``exp(i * angle)``. `x`: ``[tokens, heads, dim]``."""
    x = x.double().clone()
    half = rotary_dim // 2
    for pair in range(half):
        first, second = (pair, pair + half) if neox else (2 * pair, 2 * pair + 1)
        angle = positions.double() * 10000.0 ** (-2 * pair / rotary_dim)
        turned = torch.complex(x[..., first], x[..., second])
        turned = turned * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        x[..., first], x[..., second] = turned.real, turned.imag
    return x


ROTARY = pytest.mark.parametrize(
    ("rotary_dim", "neox"),
    [(64, True), (64, False), (32, True), (32, False)],
    ids=["neox", "interleaved", "neox partial", "interleaved partial"],
)


@ROTARY
def test_expanded_keys_are_base_plus_the_rotated_delta(rotary_dim: int, neox: bool) -> None:
    positions = torch.arange(13)
    base = torch.randn(13, 2, 64)
    rows, b = torch.randn(13, 4), torch.randn(4, 128)
    before = base.clone()
    out = expand_keys(base, rows, b, cos_sin_of(positions, rotary_dim), neox)
    delta = (rows.double() @ b.double()).view(13, 2, 64)
    expected = base.double() + rotate(delta, positions, rotary_dim, neox)
    torch.testing.assert_close(out.double(), expected, atol=FLOAT32, rtol=FLOAT32)
    assert torch.equal(base, before), "the pool's keys must not be written"


@ROTARY
def test_adding_the_delta_after_rotation_is_rotating_the_adapted_key(
    rotary_dim: int, neox: bool
) -> None:
    """What lets base keys be stored rotated: RoPE is linear. Positions far from 0, too."""
    positions = torch.tensor([0, 1, 5, 100, 1000, 4000])
    unrotated = torch.randn(6, 2, 64)
    rows, b = torch.randn(6, 4), torch.randn(4, 128)
    base = rotate(unrotated, positions, rotary_dim, neox).float()
    out = expand_keys(base, rows, b, cos_sin_of(positions, rotary_dim), neox)
    adapted = unrotated.double() + (rows.double() @ b.double()).view(6, 2, 64)
    expected = rotate(adapted, positions, rotary_dim, neox)
    torch.testing.assert_close(out.double(), expected, atol=FLOAT32, rtol=FLOAT32)


def test_dimensions_beyond_the_rotary_part_are_not_rotated() -> None:
    base, rows, b = torch.zeros(5, 1, 16), torch.randn(5, 2), torch.randn(2, 16)
    out = expand_keys(base, rows, b, cos_sin_of(torch.arange(5), 8))
    assert torch.equal(out[..., 8:], (rows @ b).view(5, 1, 16)[..., 8:])


@pytest.mark.parametrize("neox", [True, False])
def test_bfloat16_keys_agree_within_their_precision(neox: bool) -> None:
    positions = torch.arange(13)
    base = torch.randn(13, 2, 64).bfloat16()
    rows, b = torch.randn(13, 4).bfloat16(), torch.randn(4, 128).bfloat16()
    out = expand_keys(base, rows, b, cos_sin_of(positions, 64), neox)
    assert out.dtype == torch.bfloat16
    delta = (rows.double() @ b.double()).view(13, 2, 64)
    expected = base.double() + rotate(delta, positions, 64, neox)
    # Three roundings of numbers up to about 8: the product, the rotation, the sum.
    torch.testing.assert_close(out.double(), expected, atol=8e-2, rtol=2e-2)


def test_rows_of_zeros_leave_keys_and_values_as_they_are() -> None:
    base, rows, b = torch.randn(5, 2, 16), torch.zeros(5, 4), torch.randn(4, 32)
    assert torch.equal(expand_values(base, rows, b), base)
    assert torch.equal(expand_keys(base, rows, b, cos_sin_of(torch.arange(5), 16)), base)
