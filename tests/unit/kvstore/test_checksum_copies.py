"""Copies that bring checksums: the bytes and xxhash's own values, for every length and place."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from types import ModuleType

import numpy as np
import pytest
import xxhash

from kvstore import copying

LENGTHS = (*range(1, 520), 1023, 1024, 1025, 1088, 2047, 2048, 2049, 65_536, 65_537, 4_194_305)


@pytest.fixture(params=["as built", "in Python"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "as built":
        if not copying.COMPILED:
            pytest.skip("kvstore._native is not built: no C compiler")
    else:
        monkeypatch.setattr(copying, "compiled", None)
    return copying


@pytest.mark.parametrize("stream_bytes", [0, copying.WRITE_STREAM_BYTES_MIN, 1 << 40])
def test_copies_and_checksums_are_xxhash_s(module: ModuleType, stream_bytes: int) -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    lengths = np.array(LENGTHS)
    for part in (lengths, lengths[lengths > 240], lengths[lengths <= 240]):
        starts = np.cumsum(part + rng.integers(0, 70, len(part))) - part
        source = rng.integers(0, 256, int(starts[-1] + part[-1]) + 9, dtype=np.uint8)
        places = np.cumsum(part + rng.integers(1, 70, len(part))) - part
        target = np.zeros(int(places[-1] + part[-1]) + 9, dtype=np.uint8)
        found = module.copy_with_checksums(
            target, source, places, starts, part, stream_bytes=stream_bytes
        )
        expected = np.zeros_like(target)
        for to, start, length in zip(places, starts, part, strict=True):
            expected[to : to + length] = source[start : start + length]
        assert np.array_equal(target, expected), seed
        sums = [
            xxhash.xxh3_64_intdigest(source[start : start + length].data)
            for start, length in zip(starts, part, strict=True)
        ]
        assert found == sums, seed
        assert module.checksums_of(source, starts, part) == sums, seed


def test_streamed_copies_stay_in_their_places_at_any_alignment(module: ModuleType) -> None:
    seed = time.time_ns()
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 5000, dtype=np.uint8)
    for place in range(64, 130):
        start, length = int(rng.integers(0, 70)), int(rng.integers(241, 4900))
        target = rng.integers(0, 256, 5200, dtype=np.uint8)
        expected = target.copy()
        expected[place : place + length] = source[start : start + length]
        columns = [np.array([number]) for number in (place, start, length)]
        (found,) = module.copy_with_checksums(target, source, *columns, stream_bytes=0)
        assert np.array_equal(target, expected), (seed, place, start, length)
        assert found == xxhash.xxh3_64_intdigest(source[start : start + length].data), seed


@pytest.mark.parametrize("nbytes", [1, 240, 241, 16_383, 16_384, 65_537, 1 << 20])
def test_one_piece_is_copied_and_summed(module: ModuleType, nbytes: int) -> None:
    rng = np.random.default_rng()
    source = rng.integers(0, 256, nbytes + 100, dtype=np.uint8)
    source.flags.writeable = False
    target = rng.integers(0, 256, nbytes + 200, dtype=np.uint8)
    start, place = (int(rng.integers(0, 100)) for _ in range(2))
    expected = target.copy()
    expected[place : place + nbytes] = source[start : start + nbytes]
    found = module.copy_with_checksum(target, place, source, start, nbytes)
    assert np.array_equal(target, expected)
    sum_ = xxhash.xxh3_64_intdigest(source[start : start + nbytes].data)
    assert found == sum_
    value = source[start : start + nbytes].tobytes()
    assert module.bytes_with_checksum(source, start, nbytes) == (value, sum_)


def test_one_piece_outside_of_its_buffer_is_refused() -> None:
    if not copying.COMPILED:
        pytest.skip("kvstore._native is not built: no C compiler")
    memory = np.zeros(1000, dtype=np.uint8)
    other = np.zeros(1000, dtype=np.uint8)
    copy = importlib.import_module("kvstore._native").copy_one_summed
    for to, start, nbytes in ((0, 501, 500), (501, 0, 500), (-1, 0, 500), (0, -1, 500), (0, 0, 9)):
        with pytest.raises(ValueError, match="not in both buffers"):
            copy(memory, to, other, start, nbytes, 0)
    with pytest.raises(ValueError, match="not in both buffers"):
        copy(memory, 0, other, 0, 500, -1)
    other.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        copy(other, 0, memory, 0, 500, 0)
    assert not memory.any()


def test_bytes_of_what_lies_outside_are_refused() -> None:
    if not copying.COMPILED:
        pytest.skip("kvstore._native is not built: no C compiler")
    memory = np.zeros(1000, dtype=np.uint8)
    take = importlib.import_module("kvstore._native").bytes_summed
    wrong = ((501, 500, 0), (-1, 500, 0), (0, 9, 0), (0, 1 << 62, 0), (0, 500, -1))
    for start, nbytes, stream in wrong:
        with pytest.raises(ValueError, match="not in the source"):
            take(memory, start, nbytes, stream)
    with pytest.raises(TypeError):
        take(memory, 0, 500)
    with pytest.raises(OverflowError):
        take(memory, 0, 1 << 70, 0)


def test_no_pieces_are_no_work(module: ModuleType) -> None:
    none = np.zeros(0, dtype=np.int64)
    memory = np.zeros(8, dtype=np.uint8)
    assert module.copy_with_checksums(memory, memory, none, none, none) == []
    assert module.checksums_of(memory, none, none) == []


def test_columns_of_any_stride_are_taken(module: ModuleType) -> None:
    memory = np.arange(4096, dtype=np.uint8)
    rows = np.array([[0, 300], [512, 700]])
    expected = [xxhash.xxh3_64_intdigest(memory[a : a + n].data) for a, n in rows.tolist()]
    assert module.checksums_of(memory, rows[:, 0], rows[:, 1]) == expected


def test_the_compiled_part_refuses_nonsense() -> None:
    if not copying.COMPILED:
        pytest.skip("kvstore._native is not built: no C compiler")
    native = importlib.import_module("kvstore._native")
    memory = np.zeros(1024, dtype=np.uint8)
    one, two = np.array([300]), np.array([300, 300])
    zero = np.array([0])
    for bad in (two, one.astype(np.int32), one.astype(np.float64), one.reshape(1, 1)):
        with pytest.raises(ValueError, match="offsets and lengths"):
            native.sums(memory.ctypes.data, zero, bad)
        with pytest.raises(ValueError, match="offsets and lengths"):
            native.copy_summed(memory.ctypes.data, memory.ctypes.data, zero, bad, one, 0)
    for length in (-1, 0, native.SHORT_BYTES):
        with pytest.raises(ValueError, match="not more than"):
            native.sums(memory.ctypes.data, zero, np.array([length]))
    for wrong in ((), (1,), (memory.ctypes.data, zero)):
        with pytest.raises(TypeError):
            native.sums(*wrong)
        with pytest.raises(TypeError):
            native.copy_summed(*wrong)
    with pytest.raises(TypeError):
        native.sums("there", zero, one)
    with pytest.raises(TypeError):
        native.copy_summed(memory.ctypes.data, memory.ctypes.data, zero, zero, one, "many")
    with pytest.raises(OverflowError):
        native.copy_summed(memory.ctypes.data, memory.ctypes.data, zero, zero, one, 1 << 63)


def test_it_can_be_turned_off() -> None:
    program = "from kvstore import copying; assert not copying.COMPILED"
    environment = {"MOE_RUNTIME_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
