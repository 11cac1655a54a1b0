"""The compiled part under the address, undefined-behaviour and thread sanitizers.

Its own tests run again in a process where each access of native.c to memory is checked. Only it
is built so: the interpreter and torch are as they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sanitized import ADDRESS, THREAD, Sanitized

TESTS = (
    "tests/unit/transfer/test_native.py",
    "tests/unit/transfer/test_file_calls.py",
    "tests/unit/transfer/test_call_line.py",
    "tests/unit/transfer/test_lanes.py",
    "tests/unit/transfer/test_express.py",
    "tests/unit/transfer/test_mapped_copies.py",
    "tests/unit/transfer/test_server.py",
    "tests/unit/transfer/test_hostile_wire.py",
    "tests/unit/transfer/test_read_only_memory.py",
    "tests/property/transfer/test_hostile_server.py",
    "tests/property/transfer/test_copies.py",
    # Of those with several processes the one that moves bytes: starting them takes long here.
    "tests/multiprocess/transfer/test_processes.py::test_three_processes_all_to_all",
)
# The twins in Python are not what is looked at; what starts interpreters takes its time here.
CHOSEN = "not python and not turned_off"

OVERRUN = """
from transfer import native
assert "{directory}" in native.compiled.__file__
target, source = bytearray(16), bytearray(64)
import ctypes
at = lambda b: ctypes.addressof(ctypes.c_char.from_buffer(b))
native.copy_one(at(target), at(source), 32)
"""


# A minute on two quiet cores.
@pytest.mark.timeout(600)
def test_no_access_outside_of_what_is_allocated(tmp_path: Path) -> None:
    sanitized = Sanitized(ADDRESS, tmp_path)
    proof = sanitized.python("-c", OVERRUN.format(directory=tmp_path), timeout_s=60.0)
    assert proof.returncode != 0, "it does look"
    assert "heap-buffer-overflow" in proof.stdout, proof.stdout[-3000:]
    options = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", CHOSEN)
    done = sanitized.python(*options, *TESTS, timeout_s=560.0)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(600)
def test_no_access_that_races(tmp_path: Path) -> None:
    sanitized = Sanitized(THREAD, tmp_path)
    done = sanitized.python("-m", "tests.support.lane_storm", str(tmp_path), timeout_s=560.0)
    assert "WARNING: ThreadSanitizer" not in done.stdout, done.stdout[:6000]
    assert done.returncode == 0, done.stdout[-6000:]
