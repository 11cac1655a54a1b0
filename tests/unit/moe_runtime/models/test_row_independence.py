"""Every kernel of a step gives a row the same bits at any place, among any number of rows."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from configs.schema import Exactness
from moe_runtime.errors import ExactnessUnavailable
from moe_runtime.models import tiles
from moe_runtime.models.elementwise import choose_experts, rms_norm, silu_and_mul
from moe_runtime.models.exactness import RowTiles, apply_tiled, cancelling_data, probe_tiles
from moe_runtime.models.linear import Linear, can_reorder, plain_kernel
from moe_runtime.models.rotary import Rotary, apply_rotary
from moe_runtime.models.spec import ModelSpec
from tests.support.checkpoints import make_tiny_checkpoint

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 257]
ROWS = 300


@pytest.fixture
def generator():
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def assert_rows_independent(function, x):
    """`function` of any run of rows equals the rows computed one by one."""
    expected = torch.cat([function(x[row : row + 1]) for row in range(len(x))])
    for count in COUNTS:
        for start in (0, 1, 13, len(x) - count):
            found = function(x[start : start + count])
            assert torch.equal(found, expected[start : start + count]), (count, start)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 33, 40, 64, 500, 768])
def test_norm_activation_and_router(generator, dtype, width):
    x = (3 * torch.randn(ROWS, width, generator=generator)).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    assert_rows_independent(lambda rows: rms_norm(rows, weight, 1e-6), x)
    wide = (4 * torch.randn(ROWS, 2 * width, generator=generator)).to(dtype)
    assert_rows_independent(lambda rows: silu_and_mul(rows, Exactness.BITWISE), wide)
    for topk, part in ((1, 0), (1, 1), (4, 0), (4, 1), (8, 0), (8, 1)):
        choose = partial(choose_experts, topk=topk, renormalise=True)
        assert_rows_independent(lambda rows, f=choose, part=part: f(rows)[part], x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(generator, dtype, tmp_path):
    spec = ModelSpec.from_directory(make_tiny_checkpoint(tmp_path / "model", head_dim=24))
    x = torch.randn(ROWS, 6, 24, generator=generator).to(dtype)
    cos, sin = Rotary(spec, dtype).at(torch.arange(ROWS))
    expected = apply_rotary(x, cos, sin)
    for start, count in ((0, 1), (7, 1), (100, 33)):
        rows = slice(start, start + count)
        assert torch.equal(apply_rotary(x[rows], cos[rows], sin[rows]), expected[rows])


def test_activation_and_choice_against_plain_formulas(generator):
    gate, up = torch.randn(2, 9, 48, generator=generator, dtype=torch.float64) * 5
    expected = gate * torch.sigmoid(gate) * up
    packed = torch.cat((gate, up), dim=1).float()
    for exactness in Exactness:
        torch.testing.assert_close(
            silu_and_mul(packed, exactness).double(), expected, rtol=1e-5, atol=1e-6
        )
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert silu_and_mul(extreme, Exactness.BITWISE).tolist() == [[0.0, 200.0]]
    ids, weights = choose_experts(torch.tensor([[0.0, 2.0, 1.0]]), 2, renormalise=True)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[2.0, 1.0]]), -1))


@pytest.mark.parametrize("way", ["best", "library", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(512, 512), (256, 512), (33, 70), (1024, 96)]
)
def test_linear(generator, monkeypatch, dtype, in_features, out_features, way):
    reorder = way != "plain"
    if way == "library":
        monkeypatch.setattr(tiles, "compiled", None)
    x, weight = cancelling_data(ROWS, in_features, out_features, dtype)
    assert_rows_independent(Linear(weight, exactness=Exactness.BITWISE, reorder=reorder), x)
    x = torch.randn(ROWS, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    linear = Linear(weight, exactness=Exactness.BITWISE, bias=bias, reorder=reorder)
    assert_rows_independent(linear, x)
    expected = x.double() @ weight.double().T + bias.double()
    error = (linear(x).double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    assert linear(x[:0]).shape == (0, out_features)


def uneven_kernel(weight):
    """Adds from the left at 3 to 20 rows and from the right otherwise, one row after another."""

    def product(x):
        ahead = 3 <= len(x) <= 20
        columns = range(x.shape[1]) if ahead else reversed(range(x.shape[1]))
        total = torch.zeros(len(x), len(weight))
        for column in columns:
            total += x[:, column, None] * weight[:, column]
        return total

    return product


def positional_kernel(weight):
    """A product whose first row is rounded otherwise, at any number of rows."""

    def product(x):
        y = x @ weight.T
        y[0] *= 1 + 1e-6
        return y

    return product


def test_the_probe_finds_the_sizes_that_agree():
    tiles = probe_tiles(uneven_kernel, in_features=64, out_features=16, dtype=torch.float32)
    assert tiles.sizes == tuple(range(3, 21))


def test_a_kernel_that_depends_on_the_position_is_refused():
    with pytest.raises(ExactnessUnavailable, match="exactness: tolerant"):
        probe_tiles(positional_kernel, in_features=64, out_features=16, dtype=torch.float32)


def test_tiles_cover_all_rows_once(generator):
    tiles = RowTiles(sizes=(3, 4, 16))
    for rows in range(1, 70):
        pieces = tiles.cut(rows)
        covered = [start + i for start, count, _ in pieces for i in range(count)]
        assert covered == list(range(rows))
        assert all(size in tiles.sizes for _, _, size in pieces)
        assert all(count == size for _, count, size in pieces[:-1])
    x, weight = torch.randn(45, 8, generator=generator), torch.randn(5, 8, generator=generator)
    torch.testing.assert_close(apply_tiled(plain_kernel(weight), x, tiles), x @ weight.T)


def test_a_tile_that_is_nearly_full_is_filled_up():
    tiles = RowTiles(sizes=(*range(1, 33), 64, 128))
    assert tiles.cut(125) == [(0, 125, 128)]
    assert tiles.cut(40) == [(0, 32, 32), (32, 8, 8)]
    assert tiles.cut(190) == [(0, 128, 128), (128, 62, 64)]
    assert tiles.cut(137) == [(0, 128, 128), (128, 9, 9)]


def test_reordered_weights_are_used_where_they_exist():
    assert can_reorder(torch.float16) is False
    assert isinstance(can_reorder(torch.bfloat16), bool)
