"""An engine that has nothing to do ticks slowly, and as fast as ever from the first thing on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.engines import (
    engine_pair,
    offer,
)
from tests.support.waits import eventually
from transfer import TransferEngine, allocate
from transfer.event_loop import CALM_TICK_S, TICK_S

pytestmark = pytest.mark.unit

NBYTES = 1 << 20
# Most that fit into a signal socket before somebody reads it.
FLOOD = 2000


def periods_of(engine: TransferEngine) -> list[float]:
    """What the engine's ticks leave to the next one, in seconds, from now on."""
    found: list[float] = []
    inner = engine._loop._tick

    def tick(now: float) -> float:
        found.append(inner(now))
        return found[-1]

    engine._loop._tick = tick
    return found


def hurries_of(engine: TransferEngine, ticks: list[float]) -> list[int]:
    """How many of the ticks had been each time that the next one was brought forward."""
    found: list[int] = []
    loop = engine._loop
    inner = loop._become_fast

    def become_fast() -> None:
        if loop._slow:
            found.append(len(ticks))
        inner()

    loop._become_fast = become_fast
    return found


def calm_down(*engines: TransferEngine) -> None:
    for engine in engines:
        eventually(lambda e=engine: e._loop.calm, "it has nothing to do")


@pytest.mark.parametrize("backend", ["tcp", "shared_memory"])
def test_an_idle_engine_ticks_slowly(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        calm_down(a, b)
        for periods in (periods_of(a), periods_of(b)):
            eventually(lambda p=periods: p[-5:] == [CALM_TICK_S] * 5, "all of its ticks are slow")


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
        ticks = periods_of(a)
        hurries = hurries_of(a, ticks)
        DOINGS[what](a, b, region, key)
        assert not a._loop.calm
        eventually(lambda: hurries, "the next tick is brought forward")
        assert hurries[0] <= 1, "by what began, and not by a slow tick that saw it"
        eventually(lambda: TICK_S in ticks, "it ticks as fast as ever")


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
