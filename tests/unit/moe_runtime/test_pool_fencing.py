"""Who is out of the view is fenced at once, and dead only when somebody saw it end."""

from __future__ import annotations

import asyncio
import time

from dispatch import ExpertMap
from elastic.errors import StoreUnavailable
from elastic.view import View
from moe_runtime import pool_fencing
from moe_runtime.pool_fencing import PoolFencing, RemoteMasters
from tests.support.local_store import LocalStore
from tests.support.membership_network import member


class Master:
    """Keeps what it is told."""

    def __init__(self):
        self.fenced, self.dead = [], []

    def fence(self, incarnations):
        self.fenced += incarnations

    def confirm_dead(self, incarnations):
        self.dead += incarnations


def view(epoch, *members):
    ranks = [one.rank for one in members]
    experts = ExpertMap.even(num_layers=1, num_logical=4, ranks=ranks)
    return View(epoch=epoch, members=members, expert_map=experts, weights_version="v")


async def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def run(scenario, monkeypatch):
    monkeypatch.setattr(pool_fencing, "LOOK_INTERVAL_S", 0.01)

    async def whole():
        master, store = Master(), LocalStore()
        fencing = PoolFencing(master, store)
        try:
            await scenario(fencing, master, store)
        finally:
            await fencing.close()

    asyncio.run(whole())


def test_fenced_at_once_dead_when_seen(monkeypatch):
    async def scenario(fencing, master, store):
        fencing.on_view(view(1, member(0), member(1), member(2)))
        assert master.fenced == []
        fencing.on_view(view(2, member(0)))
        gone = [member(1).incarnation, member(2).incarnation]
        assert master.fenced == gone
        await asyncio.sleep(0.1)
        assert master.dead == [], "nobody saw them end"
        store.report_exit(gone[1], "killed by signal 9")
        await until(lambda: master.dead == [gone[1]])
        store.report_exit(gone[0], "exit status 0")
        await until(lambda: master.dead == [gone[1], gone[0]])
        await asyncio.sleep(0.05)
        assert master.dead == [gone[1], gone[0]], "each of them once"

    run(scenario, monkeypatch)


def test_a_slot_that_lives_again_is_another(monkeypatch):
    async def scenario(fencing, master, store):
        fencing.on_view(view(1, member(0), member(1)))
        fencing.on_view(view(2, member(0), member(1, life=1)))
        assert master.fenced == [member(1).incarnation]
        store.report_exit(member(1).incarnation, "killed by signal 9")
        await until(lambda: master.dead == [member(1).incarnation])
        fencing.on_view(view(3, member(0)))
        assert master.fenced[1:] == [member(1, life=1).incarnation]
        store.report_exit(member(1, life=1).incarnation, "exit status 0")
        await until(lambda: master.dead[1:] == [member(1, life=1).incarnation])

    run(scenario, monkeypatch)


def test_a_store_that_does_not_answer_is_asked_again(monkeypatch):
    async def scenario(fencing, master, store):
        answers = iter([StoreUnavailable, StoreUnavailable])
        exits = store.exits

        def sometimes(incarnations):
            if (kind := next(answers, None)) is not None:
                raise kind(operation="exits", problem="no answer")
            return exits(incarnations)

        store.exits = sometimes
        store.report_exit(member(1).incarnation, "exit status 1")
        fencing.on_view(view(1, member(0), member(1)))
        fencing.on_view(view(2, member(0)))
        await until(lambda: master.dead == [member(1).incarnation])

    run(scenario, monkeypatch)


class Elsewhere(RemoteMasters):
    """A master of its own; `restart` puts another one in its place, which knows nothing."""

    def __init__(self):
        self.restart()

    def restart(self):
        self.fenced, self.dead = set(), set()

    def fence(self, incarnations):
        self.fenced.update(incarnations)

    def confirm_dead(self, incarnations):
        self.dead.update(incarnations)


def test_the_next_master_hears_of_those_that_were_out_before_it_came(monkeypatch):
    monkeypatch.setattr(pool_fencing, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(pool_fencing, "TELL_AGAIN_S", 0.05)
    monkeypatch.setattr(pool_fencing, "DEAD_MAX", 2)

    async def scenario():
        master, store = Elsewhere(), LocalStore()
        fencing = PoolFencing(master, store)
        try:
            fencing.on_view(view(1, *(member(rank) for rank in range(5))))
            fencing.on_view(view(2, member(0)))
            out = [member(rank).incarnation for rank in range(1, 5)]
            for name in out[:3]:  # the last one may still write
                store.report_exit(name, "killed by signal 9")
                await until(lambda name=name: name in master.dead)
            master.restart()
            await until(lambda: master.fenced == {out[3]} and master.dead == set(out[1:3]))
            store.report_exit(out[3], "exit status 0")
            master.restart()
            await until(lambda: master.dead == set(out[2:4]))
        finally:
            await fencing.close()

    asyncio.run(scenario())
