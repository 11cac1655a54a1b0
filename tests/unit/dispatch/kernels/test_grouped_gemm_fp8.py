"""Grouped GEMM in fp8: exact where numbers are whole and scales are powers of two."""

from __future__ import annotations

import itertools

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.grouped_gemm_fp8 import (
    gemm_fp8_tiles,
    grouped_gemm_fp8,
    grouped_gemm_fp8_torch,
)
from dispatch.kernels.grouped_tiles import Architecture, GemmTiles

OPERATIONS = (grouped_gemm_fp8, grouped_gemm_fp8_torch)
E4M3 = torch.float8_e4m3fn
SMALL = GemmTiles(block_m=4, block_n=64, block_k=128, group_m=2)


def dequantised(rows, row_scales, weights, weight_scales):
    """Rows [R, K] and weights [E, N, K] in float64."""
    k = torch.arange(rows.shape[1]) // 128
    n = torch.arange(weights.shape[1]) // 128
    wide = weights.double() * weight_scales.double()[:, n][:, :, k]
    return rows.double() * row_scales.double()[:, k], wide


def expected(rows, weights, bounds):
    out = torch.zeros(len(rows), weights.shape[1], dtype=torch.float64)
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        out[begin:end] = rows[begin:end] @ weights[expert].T
    return out


def drawn(num_rows, experts, n, k):
    blocks, columns = -(-k // 128), -(-n // 128)
    rows = torch.randint(-4, 5, (num_rows, k)).to(E4M3)
    weights = torch.randint(-4, 5, (experts, n, k)).to(E4M3)
    row_scales = torch.exp2(torch.randint(-3, 4, (num_rows, blocks)))
    weight_scales = torch.exp2(torch.randint(-3, 4, (experts, columns, blocks)))
    return rows, row_scales.float(), weights, weight_scales.float()


def test_the_example_of_the_docstring(interpreted) -> None:
    rows = torch.tensor([[1.0, 2.0], [4.0, 4.0]]).to(E4M3)
    weights = torch.tensor([[[1.0, 1.0]], [[2.0, 0.5]]]).to(E4M3)
    row_scales, weight_scales = torch.tensor([[0.5], [2.0]]), torch.tensor([[[1.0]], [[0.25]]])
    for operation in OPERATIONS:
        found = operation(rows, row_scales, weights, weight_scales, torch.tensor([0, 1, 2]))
        assert found.tolist() == [[1.5], [5.0]]


@pytest.mark.parametrize(
    ("bounds", "n", "k"),
    [
        ([0, 5], 64, 128),
        ([0, 0, 3, 3, 9, 9], 130, 260),  # without rows; a short block of N and of K
        ([0, 4, 8], 128, 256),
        ([0, 2, 3], 5, 40),
        ([0, 0], 5, 5),
    ],
)
def test_whole_numbers_and_power_of_two_scales_are_exact(interpreted, seed, bounds, n, k) -> None:
    operands = drawn(bounds[-1] + 2, len(bounds) - 1, n, k)
    due = expected(*dequantised(*operands), bounds)[: bounds[-1]]
    for operation in OPERATIONS:
        for out_dtype in (torch.float32, torch.bfloat16):
            places = torch.tensor(bounds, dtype=torch.int32)
            found = operation(*operands, places, out_dtype=out_dtype, tiles=SMALL)
            assert found.dtype is out_dtype
            assert torch.equal(found[: bounds[-1]], due.float().to(out_dtype))


def test_random_numbers_with_the_tiles_that_are_used(interpreted, seed) -> None:
    rows, row_scales, weights, weight_scales = drawn(7, 2, 140, 200)
    rows, weights = torch.randn(7, 200).to(E4M3), torch.randn(2, 140, 200).to(E4M3)
    operands = (rows, row_scales * 0.37, weights, weight_scales * 1.3)
    due = expected(*dequantised(*operands), [0, 3, 7])
    for operation in OPERATIONS:
        found = operation(*operands, torch.tensor([0, 3, 7]), out_dtype=torch.float32)
        torch.testing.assert_close(found.double(), due, rtol=1e-4, atol=1e-2)


def test_tiles_keep_within_a_block_of_scales() -> None:
    for rows, kind in itertools.product((0, 100, 1000, 100_000), Architecture):
        tiles = gemm_fp8_tiles(rows, 16, rows + 16, kind)
        assert tiles.block_k == 128
        assert 128 % tiles.block_n == 0


def test_wrong_input_is_named(interpreted) -> None:
    rows, row_scales, weights, weight_scales = drawn(4, 2, 130, 256)
    bounds = torch.tensor([0, 2, 4])
    wide = GemmTiles(block_m=4, block_n=256, block_k=128)
    deep = GemmTiles(block_m=4, block_n=64, block_k=256)
    cases = {
        "dtype of rows": (rows.float(), row_scales, weights, weight_scales),
        "shape of row_scales": (rows, row_scales[:, :1], weights, weight_scales),
        "shape of weight_scales": (rows, row_scales, weights, weight_scales[:, :1]),
    }
    for name, operands in cases.items():
        with pytest.raises(InputInvalid) as caught:
            grouped_gemm_fp8(*operands, bounds)
        assert caught.value.name == name
    for name, tiles in {"128 % block_n": wide, "block_k": deep}.items():
        with pytest.raises(InputInvalid) as caught:
            grouped_gemm_fp8(rows, row_scales, weights, weight_scales, bounds, tiles=tiles)
        assert caught.value.name == name
