"""Rows taken by number and by address: any size, any place, near the caches and past them."""

from __future__ import annotations

import numpy as np
import pytest

from dispatch import native

STREAMED_BYTES = 5 << 20  # `native.c` goes past the caches for so much
WAYS = ["numpy", "compiled"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(native, "compiled", None)
    elif native.compiled is None:
        pytest.skip("the compiled loops were not built")
    return request.param


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("misaligned", [0, 8, 64])
@pytest.mark.parametrize("row_bytes", [8, 56, 64, 72, 192, 4096])
@pytest.mark.parametrize("nbytes", [0, 1, 20_000, STREAMED_BYTES])
def test_rows_by_number(way, rng, nbytes, row_bytes, misaligned):
    num_rows = -(-nbytes // row_bytes)
    source = rng.integers(0, 1 << 63, (37, row_bytes // 8), np.uint64)
    index = rng.integers(0, len(source), num_rows)
    memory = np.zeros(num_rows * row_bytes + 256, np.uint8)
    begin = -memory.__array_interface__["data"][0] % 64 + misaligned
    target = np.ndarray((num_rows, row_bytes // 8), np.uint64, memory, begin)
    native.take_rows(source, index, target)
    assert np.array_equal(target, source[index])
    assert not memory[:begin].any()
    assert not memory[begin + num_rows * row_bytes :].any()


@pytest.mark.skipif(native.compiled is None, reason="the compiled loops were not built")
def test_rows_by_address(rng):
    row_bytes = 128
    parts = [rng.integers(0, 256, (9, row_bytes), np.uint8) for _ in range(2)]
    rows = np.concatenate([native.addresses(part, np.arange(9), row_bytes) for part in parts])
    order = rng.integers(0, 18, STREAMED_BYTES // row_bytes)
    target = np.zeros((len(order), row_bytes), np.uint8)
    native.compiled.gather_rows(target.__array_interface__["data"][0], rows[order], row_bytes)
    assert np.array_equal(target, np.concatenate(parts)[order])


@pytest.mark.skipif(native.compiled is None, reason="the compiled loops were not built")
def test_wrong_calls_are_refused():
    index = np.zeros(1, np.int64)
    with pytest.raises(TypeError, match="takes 4 arguments, got 1"):
        native.compiled.take_rows(0)
    with pytest.raises(ValueError, match="8 bytes"):
        native.compiled.take_rows(0, 0, index.astype(np.int32), 8)
    with pytest.raises(ValueError, match="-8 bytes"):
        native.compiled.take_rows(0, 0, index, -8)
