"""The compiled loops and their Python twins against numpy."""

from __future__ import annotations

import os

import numpy as np
import pytest

from transfer import native

TWINS = ["python", "compiled"] if native.COMPILED else ["python"]


def loop(twin: str, name: str):
    return getattr(native, f"_{name}" if twin == "python" else name)


@pytest.fixture
def rng():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def random_pieces(rng, total: int, count: int):
    """Pieces whose targets do not overlap, some of them empty."""
    cuts = np.sort(rng.integers(0, total, 2 * count))
    targets, lengths = cuts[0::2], cuts[1::2] - cuts[0::2]
    sources = np.array([rng.integers(0, total - n + 1) for n in lengths], dtype=np.int64)
    order = rng.permutation(count)
    return targets[order], sources[order], lengths[order]


@pytest.mark.unit
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("count", [0, 1, 7, 513, 3000])
def test_pieces_are_copied_like_numpy_does(twin: str, count: int, rng) -> None:
    total = 300_000
    source = rng.integers(0, 256, total, dtype=np.uint8)
    target = rng.integers(0, 256, total, dtype=np.uint8)
    targets, sources, lengths = random_pieces(rng, total, count)
    expected = target.copy()
    for t, s, n in zip(targets, sources, lengths, strict=True):
        expected[t : t + n] = source[s : s + n]
    loop(twin, "copy_pieces")(target.ctypes.data, source.ctypes.data, targets, sources, lengths)
    assert (target == expected).all()


@pytest.mark.unit
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("count", [0, 1, 512, 1025])
def test_pieces_move_between_processes(twin: str, direction: str, count: int, rng) -> None:
    total = 200_000
    near, far = rng.integers(0, 256, (2, total), dtype=np.uint8)
    there, here, lengths = random_pieces(rng, total, count)
    if direction == "read":
        there, here = here, there
    expected_near, expected_far = near.copy(), far.copy()
    for t, h, n in zip(there, here, lengths, strict=True):
        if direction == "write":
            expected_far[t : t + n] = near[h : h + n]
        else:
            expected_near[h : h + n] = far[t : t + n]
    moved = loop(twin, f"process_vm_{direction}")(
        os.getpid(), far.ctypes.data, near.ctypes.data, there, here, lengths
    )
    assert moved == int(lengths.sum())
    assert (near == expected_near).all()
    assert (far == expected_far).all()


@pytest.mark.unit
@pytest.mark.parametrize("twin", TWINS)
def test_a_foreign_address_that_is_not_mapped_is_an_error(twin: str) -> None:
    here = np.zeros(100, dtype=np.uint8)
    numbers = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full(1, 8)
    for direction in ("write", "read"):
        with pytest.raises(OSError, match="Bad address"):
            loop(twin, f"process_vm_{direction}")(os.getpid(), 64, here.ctypes.data, *numbers)


@pytest.mark.unit
@pytest.mark.parametrize("twin", TWINS)
def test_a_process_that_is_gone_is_an_error(twin: str) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    here = np.zeros(8, dtype=np.uint8)
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(ProcessLookupError):
        loop(twin, "process_vm_read")(
            pid, here.ctypes.data, here.ctypes.data, one, one, np.full(1, 8)
        )


@pytest.mark.unit
@pytest.mark.parametrize("twin", TWINS)
def test_what_could_corrupt_memory_is_refused(twin: str) -> None:
    memory = np.zeros(100, dtype=np.uint8)
    at = memory.ctypes.data
    good = np.array([0, 50])
    bad = [
        (np.array([0, 50], dtype=np.int32), good, good),
        (np.array([[0, 50]]), good, good),
        (good.astype(np.float64), good, good),
        (good[:1], good, good),
        (good, good, good[:1]),
        (good, good, np.array([5, -1])),
    ]
    for arrays in bad:
        with pytest.raises((ValueError, TypeError)):
            loop(twin, "copy_pieces")(at, at, *arrays)
    with pytest.raises((ValueError, BufferError, TypeError)):
        loop(twin, "copy_pieces")(at, at, np.arange(4)[::2], good, good)
    with pytest.raises(ValueError, match="negative"):
        loop(twin, "copy_one")(at, at, -1)


@pytest.mark.unit
@pytest.mark.parametrize("twin", TWINS)
def test_one_piece_may_overlap_itself(twin: str) -> None:
    memory = np.arange(100, dtype=np.uint8)
    loop(twin, "copy_one")(memory.ctypes.data + 1, memory.ctypes.data, 50)
    assert memory[1:51].tolist() == list(range(50))
    loop(twin, "copy_one")(memory.ctypes.data, memory.ctypes.data, 0)


@pytest.mark.unit
@pytest.mark.parametrize("lengths", ["long", "mixed"])
def test_so_much_that_it_goes_past_the_caches_arrives_at_any_alignment(lengths: str, rng) -> None:
    total = 24 << 20
    source = rng.integers(0, 256, total, dtype=np.uint8)
    target = rng.integers(0, 256, total, dtype=np.uint8)
    if lengths == "long":
        targets, sources, sizes = np.array([[3, total // 2 + 61], [17, 5], [9 << 20, 4099]])
    else:
        targets, sources, sizes = random_pieces(rng, total, 3000)
        assert sizes.min() < 64 < 2048 < sizes.max()
    assert sizes.sum() > 8 << 20
    expected = target.copy()
    for t, s, n in zip(targets, sources, sizes, strict=True):
        expected[t : t + n] = source[s : s + n]
    native.copy_pieces(target.ctypes.data, source.ctypes.data, targets, sources, sizes)
    assert (target == expected).all()
    at, nbytes = int(rng.integers(0, 200)), (10 << 20) + int(rng.integers(0, 200))
    native.copy_one(target.ctypes.data + at, source.ctypes.data, nbytes)
    expected[at : at + nbytes] = source[:nbytes]
    assert (target == expected).all()


@pytest.mark.unit
@pytest.mark.parametrize("shift", [1, 4097, -1, -70])
def test_much_that_overlaps_itself_is_moved(shift: int, rng) -> None:
    memory = rng.integers(0, 256, 10 << 20, dtype=np.uint8)
    before, nbytes = memory.copy(), 9 << 20
    source, target = max(0, -shift), max(0, shift)
    native.copy_one(memory.ctypes.data + target, memory.ctypes.data + source, nbytes)
    before[target : target + nbytes] = before[source : source + nbytes].copy()
    assert (memory == before).all()


@pytest.mark.unit
def test_it_can_be_turned_off() -> None:
    import subprocess
    import sys

    code = "from transfer import native; from transfer.backends import lane; print(native.COMPILED)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MOE_RUNTIME_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False"
