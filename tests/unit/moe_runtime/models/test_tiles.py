"""Products on the tile unit: against plain formulas, at every size, in every place."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from configs.schema import Exactness
from moe_runtime.models import tiles
from moe_runtime.models.elementwise import silu_and_mul
from moe_runtime.models.linear import Linear

needs_unit = pytest.mark.skipif(
    tiles.compiled is None, reason="not compiled, or this processor has no tile unit"
)
BF16 = torch.bfloat16
SIZES = [(1, 1), (32, 32), (33, 70), (96, 31), (100, 64), (512, 96), (17, 129)]  # K, N or H, I
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 255, 256, 257, 300]


@pytest.fixture
def generator():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def draw(generator, *shape, scale=1.0):
    return (torch.randn(*shape, generator=generator) * scale).to(BF16)


def assert_close(found, expected):
    error = (found.double() - expected).abs().max()
    assert error <= 2**-7 * expected.abs().max() + 1e-30


@needs_unit
@pytest.mark.parametrize(("depth", "columns"), SIZES)
def test_a_product_of_any_size(generator, depth, columns):
    weight = draw(generator, columns, depth)
    packed = tiles.PackedWeight(weight)
    rows = draw(generator, max(ROWS), depth)
    everything = packed.product(rows)
    assert_close(everything, rows.double() @ weight.double().T)
    for count in ROWS:
        start = random.randrange(len(rows) - count + 1)
        part = slice(start, start + count)
        assert torch.equal(packed.product(rows[part]), everything[part]), (start, count)
    assert packed.product(rows[:0]).shape == (0, columns)


def expert_by_linears(rows, gate_up, down):
    inner = silu_and_mul(torch.nn.functional.linear(rows, gate_up), Exactness.BITWISE)
    return torch.nn.functional.linear(inner, down)


@needs_unit
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_experts_of_any_size_and_any_number_of_rows(generator, hidden, inner):
    counts = [3, 16, 0, 1, 257, 32]
    matrices = [
        (draw(generator, 2 * inner, hidden), draw(generator, hidden, inner)) for _ in counts
    ]
    packed = [tiles.PackedExpert(*both) for both in matrices]
    rows = draw(generator, sum(counts), hidden)
    mlps, out = tiles.GatedMLPs(hidden, inner), torch.empty(rows.shape, dtype=BF16)
    mlps(rows, counts, packed, out)
    begin = 0
    for count, expert, both in zip(counts, packed, matrices, strict=True):
        part = rows[begin : begin + count]
        if count:
            assert_close(out[begin : begin + count], expert_by_linears(part, *both).double())
        for row in range(0, count, 7):
            alone = torch.empty(1, hidden, dtype=BF16)
            mlps(part[row : row + 1], [1], [expert], alone)
            assert torch.equal(alone[0], out[begin + row])
        begin += count


@needs_unit
def test_the_activation_of_every_gate(generator):
    """All bfloat16 numbers through silu, times one: a weight of one picks them out."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    # Numbers below the smallest normal one count as zero in this unit's products.
    numbers = numbers[numbers.isfinite() & ((numbers == 0) | (numbers.abs() >= 2.0**-126))]
    rows = torch.stack((numbers, torch.ones_like(numbers)), 1).contiguous()
    gate_up = torch.tensor([[1, 0], [0, 1]], dtype=BF16)
    down = torch.tensor([[1], [0]], dtype=BF16)
    out = torch.empty(rows.shape, dtype=BF16)
    packed = [tiles.PackedExpert(gate_up, down)]
    tiles.GatedMLPs(2, 1)(rows, [len(rows)], packed, out)
    exact = numbers.double() * torch.sigmoid(numbers.double())
    exact[exact.abs() < 2.0**-126] = 0.0
    found = out[:, 0].double()
    error = (found - exact).abs()
    large = exact.abs() > 2.0**-120
    assert (error[large] <= exact.abs()[large] * 2**-8 * 1.001).all()
    assert (error[~large] <= 2.0**-119).all()


@needs_unit
def test_what_is_not_a_number_stays_in_its_row(generator):
    weight = draw(generator, 40, 50)
    rows = draw(generator, 20, 50)
    packed = tiles.PackedWeight(weight)
    expected = packed.product(rows)
    rows[7, 3], rows[9, 49] = float("nan"), float("inf")
    found = packed.product(rows)
    assert found[7].isnan().all()
    assert not found[9].isfinite().any()
    others = [row for row in range(20) if row not in (7, 9)]
    assert torch.equal(found[others], expected[others])
    # The rows of a tile that belong to nobody may hold anything.
    assert torch.equal(packed.product(rows[10:11]), expected[10:11])


@needs_unit
def test_the_library_goes_on_as_before_beside_it(generator):
    """Both configure the same unit of the same thread."""
    weight, rows = draw(generator, 64, 128), draw(generator, 48, 128)
    library = Linear(weight, exactness=Exactness.TOLERANT)
    expected = library(rows)
    packed = tiles.PackedWeight(weight)
    for _ in range(20):
        assert_close(packed.product(rows), expected.double())
        assert torch.equal(library(rows), expected)


@needs_unit
def test_wrong_calls_are_refused():
    with pytest.raises(TypeError, match="takes 7 arguments, got 2"):
        tiles.compiled.gated(1, 2)
    with pytest.raises(TypeError):
        tiles.compiled.pack("somewhere", 0, 1, 1, 0)


def test_threads_and_types_that_it_does_not_serve(monkeypatch):
    assert not tiles.usable(torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not tiles.usable(BF16)


def test_it_can_be_turned_off():
    code = "from moe_runtime.models import tiles; assert tiles.compiled is None"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"MOE_RUNTIME_NATIVE": "0"}, timeout=240
    )
