"""Grouped GEMM equals a product row by row: exactly where whole numbers make all sums exact."""

from __future__ import annotations

import itertools

import pytest
import torch

from dispatch.errors import InputInvalid
from dispatch.kernels.grouped_gemm import gemm_tiles, grouped_gemm, grouped_gemm_torch
from dispatch.kernels.grouped_tiles import Architecture, GemmTiles

OPERATIONS = (grouped_gemm, grouped_gemm_torch)
SMALL = GemmTiles(block_m=4, block_n=8, block_k=16, group_m=2)


def row_by_row(rows, weights, bounds):
    """[R, N] float64; NaN where no expert has the row."""
    out = torch.full((len(rows), weights.shape[1]), torch.nan, dtype=torch.float64)
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for row in range(begin, end):
            out[row] = weights[expert].double() @ rows[row].double()
    return out


def whole_numbers(*shape):
    return torch.randint(-3, 4, shape).to(torch.bfloat16)


def covered(bounds):
    return slice(bounds[0], bounds[-1])


def test_the_example_of_the_docstring(interpreted) -> None:
    rows = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.bfloat16)
    weights = torch.tensor(
        [[[1, 0], [0, 1]], [[9, 9], [9, 9]], [[1, 1], [2, 0]]], dtype=torch.bfloat16
    )
    for operation in OPERATIONS:
        found = operation(rows, weights, torch.tensor([0, 1, 1, 3]))
        assert found.tolist() == [[1, 2], [7, 6], [11, 10]]


@pytest.mark.parametrize(
    ("bounds", "n", "k"),
    [
        ([0, 5], 8, 16),  # one expert
        ([0, 0, 3, 3, 12, 12], 11, 20),  # without rows: first, between, last; odd N and K
        ([0, 4, 8, 16], 16, 32),  # aligned to the tile
        ([0, 1, 2, 3, 4, 5, 6, 7], 9, 7),  # a row each; K below the tile
        ([0, 9, 9], 3, 33),
        ([0, 0, 0], 5, 5),  # nothing at all
        ([2, 4, 7], 8, 16),  # begins behind the first row
    ],
)
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_all_tiles_of_all_experts_and_nothing_else(
    interpreted, seed, bounds, n, k, id_dtype
) -> None:
    num_rows = bounds[-1] + 3  # the last ones are nobody's
    rows, weights = whole_numbers(num_rows, k), whole_numbers(len(bounds) - 1, n, k)
    due = row_by_row(rows, weights, bounds).to(torch.float32)
    for operation in OPERATIONS:
        for out_dtype in (torch.float32, torch.bfloat16):
            out = torch.full((num_rows, n), torch.nan, dtype=out_dtype)
            places = torch.tensor(bounds, dtype=id_dtype)
            assert operation(rows, weights, places, out=out, tiles=SMALL) is out
            torch.testing.assert_close(out, due.to(out_dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group_m", [1, 2, 3, 100])
def test_the_order_of_tiles_does_not_change_a_bit(interpreted, seed, group_m) -> None:
    bounds = torch.tensor([0, 7, 7, 13, 14])
    rows, weights = torch.randn(14, 40).bfloat16(), torch.randn(4, 20, 40).bfloat16()
    tiles = GemmTiles(block_m=4, block_n=8, block_k=16, group_m=group_m)
    due = grouped_gemm(rows, weights, bounds, tiles=SMALL)
    assert torch.equal(grouped_gemm(rows, weights, bounds, tiles=tiles), due)


def test_a_row_does_not_depend_on_its_neighbours(interpreted, seed) -> None:
    rows, weights = torch.randn(9, 40).bfloat16(), torch.randn(1, 20, 40).bfloat16()
    together = grouped_gemm(rows, weights, torch.tensor([0, 9]), tiles=SMALL)
    for row in range(9):
        alone = grouped_gemm(rows[row : row + 1], weights, torch.tensor([0, 1]), tiles=SMALL)
        assert torch.equal(alone[0], together[row])


def test_random_numbers_with_the_tiles_that_are_used(interpreted, seed) -> None:
    bounds = torch.tensor([0, 3, 3, 20])
    rows, weights = torch.randn(20, 150).bfloat16(), torch.randn(3, 70, 150).bfloat16()
    due = row_by_row(rows, weights, bounds.tolist()).to(torch.float32)
    for operation in OPERATIONS:
        found = operation(rows, weights, bounds)
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float(), due, rtol=2**-7, atol=2e-3)
    wide = torch.empty(20, 70)
    grouped_gemm(rows, weights, bounds, out=wide)
    torch.testing.assert_close(wide, due, rtol=1e-5, atol=1e-4)


def test_weights_past_four_gib_are_found(interpreted, seed) -> None:
    # Only the pages of three experts are ever touched.
    weights = torch.empty(2300, 1000, 1000, dtype=torch.bfloat16)
    counts = torch.zeros(2300, dtype=torch.int64)
    for expert in (1, 1100, 2299):
        weights[expert] = whole_numbers(1000, 1000)
        counts[expert] = 2
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = whole_numbers(6, 1000)
    tiles = GemmTiles(block_m=4, block_n=512, block_k=256)
    assert torch.equal(
        grouped_gemm(rows, weights, bounds, tiles=tiles), grouped_gemm_torch(rows, weights, bounds)
    )


def test_there_are_programs_for_every_split_of_the_rows(seed) -> None:
    for _ in range(200):
        experts, num_rows = (int(torch.randint(0, 40, ())) for _ in "ab")
        cuts = torch.randint(0, num_rows + 1, (max(0, experts - 1),)).sort().values
        counts = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([num_rows]))
        needed = sum(-(-int(count) // SMALL.block_m) for count in counts) * 3
        assert needed <= SMALL.num_programs(num_rows, max(1, experts), 20)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    for kind in Architecture:
        rows = (0, 8, 64 * 16, 64 * 17, 64 * 200, 64 * 900)
        sizes = [gemm_tiles(number, 64, 7168, kind) for number in rows]
        assert [tiles.block_m for tiles in sizes] == [16, 16, 16, 64, 128, 128]
        assert (sizes[-1].block_n == 256) == (kind is Architecture.HOPPER)
        assert gemm_tiles(0, 0, 7168, kind).block_m == 16
        assert gemm_tiles(64 * 900, 64, 7169, kind).block_n == 64


@pytest.mark.parametrize(
    ("rows", "weights", "bounds", "name"),
    [
        ((4, 8), (2, 3, 9), [0, 2, 4], "shape of weights"),
        ((4, 8), (2, 3, 8), [0, 4], "shape of bounds"),
        ((4, 8), (2, 3, 8), [0, 5, 4], "bounds"),
        ((4, 8), (2, 3, 8), [0, 2, 5], "bounds"),
        ((4, 8), (2, 3, 8), [-1, 2, 4], "bounds"),
    ],
)
def test_wrong_input_is_named(rows, weights, bounds, name) -> None:
    with pytest.raises(InputInvalid) as caught:
        grouped_gemm(whole_numbers(*rows), whole_numbers(*weights), torch.tensor(bounds))
    assert caught.value.name == name
