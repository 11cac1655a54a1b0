"""An engine that has nothing to do ticks slowly, and as fast as ever from the first thing on."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.engines import engine_pair, eventually, offer
from transfer import TransferEngine, allocate
from transfer.event_loop import CALM_TICK_S, TICK_S

pytestmark = pytest.mark.unit

NBYTES = 1 << 20
# Most that fit into a signal socket before somebody reads it.
FLOOD = 2000


def ticks_of(engine: TransferEngine) -> list[float]:
    """When the engine ticks, from now on."""
    found: list[float] = []
    inner = engine._loop._on_tick

    def on_tick(now: float) -> bool:
        found.append(now)
        return inner(now)

    engine._loop._on_tick = on_tick
    return found


def calm_down(*engines: TransferEngine) -> None:
    for engine in engines:
        eventually(lambda e=engine: e._loop.calm, "it has nothing to do")


@pytest.mark.parametrize("backend", ["tcp", "shared_memory"])
def test_an_idle_engine_ticks_slowly(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        calm_down(a, b)
        ticks = [ticks_of(a), ticks_of(b)]
        time.sleep(5 * CALM_TICK_S)
        assert all(len(found) <= 7 for found in ticks), ticks


DOINGS: dict[str, Callable[..., object]] = {
    "the short way": lambda a, b, region, key: a.write(b.name, region, key, 0, 0, 64),
    "the long way": lambda a, b, region, key: a.write(
        b.name, region, key, np.array([0, 128]), np.array([0, 64]), 64
    ),
    "a read": lambda a, b, region, key: a.read(b.name, region, key, 0, 0, NBYTES),
    "a notify": lambda a, b, region, key: a.notify(b.name, b"hello"),
    "an offer withdrawn": lambda a, b, region, key: a.release(region),
}


@pytest.mark.parametrize("what", DOINGS)
def test_whatever_begins_is_looked_after_at_once(what: str) -> None:
    with engine_pair("tcp") as (a, b):
        key = offer(b, b.register(allocate(NBYTES)), a)
        region = a.register(allocate(NBYTES))
        a.offer(region, to=b.name, access=key.access)
        a.write(b.name, region, key, 0, 0, 8).wait()
        calm_down(a)
        ticks = ticks_of(a)
        begin = time.monotonic()
        DOINGS[what](a, b, region, key)
        assert not a._loop.calm
        eventually(lambda: len(ticks) >= 3, "it ticks")
        # On a machine that is busy otherwise they may be late, but not as late as slow ones.
        assert ticks[2] - begin < 2 * CALM_TICK_S + 3 * TICK_S, [tick - begin for tick in ticks]


def test_immediates_that_nobody_waits_for_find_room() -> None:
    with engine_pair("shared_memory") as (a, b):
        key = offer(b, b.register(allocate(NBYTES)), a)
        region = a.register(allocate(NBYTES))
        a.write(b.name, region, key, 0, 0, 8).wait()
        calm_down(a, b)
        for number in range(FLOOD):
            a.write(b.name, region, key, 0, 0, 8, immediate=number % 7, timeout_s=20.0).wait()
        assert not b._loop.calm
        eventually(lambda: b.statistics().immediates_received == FLOOD, "all are counted")
