"""A slab against a bytearray: random scattered pieces, aligned or not, one or several writers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from configs.schema import DirectIO, FileConfig
from transfer.backends.direct_io import Alignment
from transfer.backends.file import FileSlab
from transfer.backends.file_extents import VECTORS_MAX, make_extents

SLAB_BYTES = (1 << 20) + 1234
IO_BYTES = 1 << 16


@pytest.fixture(params=[DirectIO.PREFER, DirectIO.OFF], ids=["direct", "buffered"])
def slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSlab]:
    config = FileConfig(direct=request.param, io_bytes=IO_BYTES, threads=3)
    with FileSlab(tmp_path / "slab", SLAB_BYTES, config) as slab:
        yield slab


def random_pieces(rng: np.random.Generator, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint pieces: starts and lengths, some neighbours, some aligned, in random order."""
    marks = rng.integers(0, nbytes, size=rng.integers(2, 120))
    align = rng.choice([1, 512, 4096])
    marks = np.unique(marks // align * align)
    lengths = np.diff(marks, append=nbytes)
    shorter = rng.random(len(lengths)) < 0.4
    lengths = np.where(shorter, rng.integers(0, lengths + 1), lengths)
    order = rng.permutation(len(marks))
    return marks[order], lengths[order]


@pytest.mark.parametrize("seed", np.random.SeedSequence().generate_state(6))
def test_a_slab_holds_what_a_bytearray_holds(slab: FileSlab, seed: int) -> None:
    rng = np.random.default_rng(int(seed))
    model = np.zeros(SLAB_BYTES, dtype=np.uint8)
    memory = torch.zeros(SLAB_BYTES + 8192, dtype=torch.uint8)
    for step in range(25):
        offsets, lengths = random_pieces(rng, SLAB_BYTES)
        places = np.cumsum(lengths) - lengths + rng.choice([0, 1, 4096])
        if rng.random() < 0.6:
            content = rng.integers(0, 256, size=len(memory), dtype=np.uint8)
            memory.numpy()[:] = content
            slab.write(memory, places, offsets, lengths)
            for s, t, n in zip(places, offsets, lengths, strict=True):
                model[t : t + n] = content[s : s + n]
        else:
            memory.numpy()[:] = 0xAA
            expected = np.full(len(memory), 0xAA, dtype=np.uint8)
            slab.read(memory, places, offsets, lengths)
            for t, s, n in zip(places, offsets, lengths, strict=True):
                expected[t : t + n] = model[s : s + n]
            assert np.array_equal(memory.numpy(), expected), f"seed {seed} step {step}"
    slab.read(memory, 0, 0, SLAB_BYTES)
    assert np.array_equal(memory.numpy()[:SLAB_BYTES], model), f"seed {seed}"


@pytest.mark.parametrize("seed", np.random.SeedSequence().generate_state(3))
def test_neighbours_written_at_once_lose_nothing(slab: FileSlab, seed: int) -> None:
    """Each writer owns every fourth piece; nearly all pieces share a block with another's."""
    rng = np.random.default_rng(int(seed))
    writers, rounds, area = 4, 8, 48 << 10
    marks = np.unique(rng.integers(0, area, size=96))
    pieces = list(zip(marks[:-1].tolist(), np.diff(marks).tolist(), strict=True))
    barrier, failures = threading.Barrier(writers + 1), []

    def write(writer: int, contents: list[np.ndarray]) -> None:
        try:
            for content in contents:
                barrier.wait(60.0)
                for start, length in pieces[writer::writers]:
                    slab.write(torch.from_numpy(content), start, start, length)
                barrier.wait(60.0)
        except BaseException as error:
            failures.append(error)
            barrier.abort()
            raise

    contents = [rng.integers(0, 256, size=area, dtype=np.uint8) for _ in range(rounds)]
    threads = [threading.Thread(target=write, args=(i, contents)) for i in range(writers)]
    for thread in threads:
        thread.start()
    found = torch.zeros(area, dtype=torch.uint8)
    intact: list[bool] = []
    used = slice(int(marks[0]), int(marks[-1]))
    for content in contents:
        barrier.wait(60.0)  # all start
        barrier.wait(60.0)  # all have ended
        slab.read(found, 0, 0, area)
        intact.append(np.array_equal(found.numpy()[used], content[used]))
    for thread in threads:
        thread.join(60.0)
    assert not failures
    assert all(intact), f"seed {seed}: {intact}"


PIECE = st.tuples(st.integers(0, 400_000), st.integers(0, 300_000), st.integers(1, 90_000))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(PIECE, min_size=1, max_size=30),
    start=st.integers(0, 1 << 20),
    block=st.sampled_from([1, 512, 4096]),
)
@example(pieces=[(0, 0, 4096), (4096, 4096, 4096)], start=0, block=4096)
@example(pieces=[(0, 0, 1), (1, 2, 1)], start=0, block=4096)
@example(pieces=[(0, 3 * IO_BYTES, IO_BYTES), (IO_BYTES, 0, IO_BYTES)], start=0, block=4096)
@example(pieces=[(0, IO_BYTES, IO_BYTES), (1, 0, IO_BYTES)], start=0, block=4096)
@example(pieces=[(0, 0, IO_BYTES - 4096), (0, 4096, IO_BYTES - 4096)], start=0, block=4096)
def test_extents_hold_every_byte_once_and_share_no_block(
    pieces: list[tuple[int, int, int]], start: int, block: int
) -> None:
    memory, file, lengths = (
        np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True)
    )
    alignment = Alignment(block=block, memory=block)
    extents = make_extents(start, memory, file, lengths, alignment=alignment, io_bytes=IO_BYTES)
    assert int(extents.lengths.sum()) == int(lengths.sum())
    wanted = {(int(m) - int(f)) for m, f in zip(memory, file, strict=True)}
    assert set((extents.memory_offsets - extents.file_offsets).tolist()) == wanted
    assert (extents.highs - extents.lows <= IO_BYTES).all()
    assert (extents.lows[1:] >= extents.highs[:-1]).all(), "no two share a block"
    for e in range(len(extents)):
        part = slice(int(extents.bounds[e]), int(extents.bounds[e + 1]))
        low, high = int(extents.lows[e]), int(extents.highs[e])
        starts, ends = extents.file_offsets[part], (extents.file_offsets + extents.lengths)[part]
        assert low <= starts.min()
        assert ends.max() <= high
        covered = np.zeros(high - low, dtype=bool)
        for s, t in zip(starts - low, ends - low, strict=True):
            covered[s:t] = True
        assert bool(extents.partial[e]) == (not covered.all())
        if extents.direct[e]:
            assert part.stop - part.start <= VECTORS_MAX
            assert (starts[1:] == ends[:-1]).all()
            assert not ((start + extents.memory_offsets[part]) % block).any()
            assert not extents.partial[e]
