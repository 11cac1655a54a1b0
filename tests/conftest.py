"""Markers from directories, a quiet environment, and a look at what each test leaves behind."""

from __future__ import annotations

import os

# Before torch is imported anywhere: several processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# On shared cores an example takes as long as it takes.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

ROOT = Path(__file__).parent
DIRECTORY_MARKERS = ("unit", "property", "multiprocess", "fault", "gpu", "rdma", "slow")
SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 30.0  # only where something is left: others wait for nothing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's first directory below tests/ is its marker."""
    for item in items:
        if item.path.is_relative_to(ROOT):
            top = item.path.relative_to(ROOT).parts[0]
            if top in DIRECTORY_MARKERS:
                item.add_marker(getattr(pytest.mark, top))


@pytest.fixture
def seed() -> int:
    """A fresh one below 2**31; printed, so that a failing test shows it."""
    drawn = random.SystemRandom().randrange(1 << 31)
    print("seed", drawn)
    return drawn


@pytest.fixture
def rng(seed: int) -> random.Random:
    """What draws a test's input."""
    return random.Random(seed)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here ends with the test, the last first."""
    with ExitStack() as stack:
        yield stack


def _children() -> set[str]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue  # gone between the listing and the look: not a leak
        # The tracker and fork server of multiprocessing live as long as the test run itself.
        if "resource_tracker" not in command and "forkserver" not in command:
            found.add(f"{process.pid} {command[:80]}")
    return found


def _threads() -> set[threading.Thread]:
    # Executors of the standard library and anyio keep idle threads on purpose.
    kept = ("asyncio_", "AnyIO", "ThreadPoolExecutor")
    return {thread for thread in threading.enumerate() if not thread.name.startswith(kept)}


def _shared_memory_files() -> set[str]:
    """Files in /dev/shm that this process tree maps or that carry our name.

    Other programs on the machine use /dev/shm too, so a plain listing would accuse us of theirs.
    """
    if not SHARED_MEMORY.is_dir():
        return set()
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    if not names:
        return set()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {name for name in names if name.startswith("moe") or f"/dev/shm/{name}" in maps}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process, a thread, or a file in /dev/shm.

    Ends are waited for up to `SETTLE_S`. A test that has to leave something carries
    `@pytest.mark.leaves("why")`.
    """
    looks = (_children, _threads, _shared_memory_files)
    before = [look() for look in looks]
    yield
    if request.node.get_closest_marker("leaves") is not None:
        return
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = [look() - known for look, known in zip(looks, before, strict=True)]
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if any(left):
        pytest.fail("left behind: {}, {}, {}".format(*map(sorted, (map(str, x) for x in left))))
