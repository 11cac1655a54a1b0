"""A process forks while its engines are at work."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.engines import BACKENDS, BOTH, engine_pair, new_engine, offer
from tests.support.forks import in_a_child
from tests.support.ranks import Board, run_ranks
from transfer import Access, PeerLost, RegionKey, Transfer, TransferEngine, allocate

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SOON_S = 60.0
NBYTES = 8 << 20
FORKS = 8
both_backends = pytest.mark.parametrize("backend", BACKENDS)


def sockets() -> int:
    """Descriptors that a peer could see, or wait for."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        found += target.startswith(("socket:", "anon_inode:[event"))
    return found


class Busy:
    """Two engines of this process whose locks are all in use."""

    def __init__(self, a: TransferEngine, b: TransferEngine) -> None:
        self.a, self.b = a, b
        self.source = a.register(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8))
        self.plain = b.register(torch.zeros(NBYTES, dtype=torch.uint8))
        self.mapped = b.register(allocate(NBYTES))
        self.keys = [offer(b, region, a) for region in (self.plain, self.mapped)]
        self.prepared = [a.prepare_write(b.name, self.source, key, 0, 0, 64) for key in self.keys]
        self.stopping = False
        self.errors: list[BaseException] = []
        self.rounds = 0
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(3)]

    def _run(self, which: int) -> None:
        try:
            while not self.stopping:
                if which == 2:
                    self.a.notify(self.b.name, b"x" * 100)
                    self.a.statistics()
                    self.b.withdraw(self.b.offer(self.plain, to=self.a.name, access=BOTH))
                    continue
                key = self.keys[which]
                transfers = [self.a.write(self.b.name, self.source, key, 0, 0, NBYTES, immediate=7)]
                transfers += [self.a.write(self.b.name, self.source, key, i, i, 64)
                              for i in range(20)]  # fmt: skip
                for transfer in transfers:
                    transfer.wait(SOON_S)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def calls(self, handle: Transfer) -> dict[str, Callable[[], Any]]:
        """Everything that needs the engine, as a child might call it."""
        a, b, source, key = self.a, self.b, self.source, self.keys[0]
        return {
            "write": lambda: a.write(b.name, source, key, 0, 0, 64).wait(),
            "write by hand": lambda: a.write(b.name, source, key, [0], [0], [64], timeout_s=1.0),
            "read": lambda: a.read(b.name, source, key, 0, 0, 64).wait(),
            "write to itself": lambda: a.write(a.name, source, key, 0, 0, 64),
            "prepare": lambda: a.prepare_read(b.name, source, key, 0, 0, 64),
            "post": lambda: self.prepared[0].post(),
            "post mapped": lambda: self.prepared[1].post(immediate=1),
            "wait": handle.wait,
            "register": lambda: a.register(source.tensor),
            "release": lambda: b.release(self.plain),
            "offer": lambda: b.offer(self.plain, to=a.name, access=BOTH),
            "withdraw": lambda: b.withdraw(key),
            "connect": lambda: a.connect(b.name),
            "disconnect": lambda: a.disconnect(b.name, reason="x"),
            "peer": lambda: a.peer(b.name),
            "peers": a.peers,
            "notify": lambda: a.notify(b.name, b""),
            "expect": lambda: b.expect({(a.name, 7): 1}, timeout_s=1.0),
            "arrived": lambda: b.arrived({(a.name, 7): 1}),
            "wait_any": lambda: b.wait_any([(a.name, 7)], timeout_s=1.0),
            "interrupt": lambda: b.interrupt("x"),
            "explain": lambda: a.explain(b.name),
            "statistics": a.statistics,
            "open": a.open,
        }

    def in_the_child(self, handle: Transfer, before: int) -> dict[str, Any]:
        outcomes: dict[str, Any] = {}
        for name, call in self.calls(handle).items():
            try:
                call()
                outcomes[name] = "worked"
            except BaseException as error:  # noqa: BLE001 - told to the parent
                outcomes[name] = type(error).__name__
        self.a.close()
        self.b.close()
        outcomes["sockets"] = sockets() - before
        return outcomes


@both_backends
def test_forks_in_the_middle_of_transfers(backend: str) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    before = sockets()
    with engine_pair(backend, process_memory=False) as (a, b):
        busy = Busy(a, b)
        for thread in busy.threads:
            thread.start()
        finished = 0
        for _ in range(FORKS):
            time.sleep(rng.random() * 0.02)
            handle = a.write(b.name, busy.source, busy.keys[0], 0, 0, NBYTES)
            told = in_a_child(lambda h=handle: busy.in_the_child(h, before))
            assert isinstance(told, dict), (seed, told)
            # One more data connection may be on its way from hand to hand: the control connection
            # is closed, which is what the peer goes by.
            assert told.pop("sockets") <= 1, f"seed {seed}"
            # One that had ended before the fork has ended well in the child too.
            finished += told["wait"] == "worked"
            told["wait"] = "EngineClosed"
            assert set(told.values()) == {"EngineClosed"}, (seed, told)
            handle.wait(SOON_S)
        busy.stopping = True
        for thread in busy.threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
        assert busy.errors == [], seed
        assert busy.rounds > 2
        assert finished < FORKS, "a transfer was under way"
        for region in (busy.plain, busy.mapped):
            assert torch.equal(region.tensor, busy.source.tensor)


def name_of(rank: int) -> str:
    return f"{rank:016x}"


def expect_without_end(engine: TransferEngine, other: str) -> None:
    while True:
        engine.expect({(other, 1): 1}, timeout_s=SOON_S / 2)


def die_beside_a_child(board: Board, backend: str) -> str:
    """Rank 1 writes without end, forks a child that lives on, and is killed."""
    nbytes = 1 << 20
    memory = allocate(nbytes)
    with new_engine(backend, name=name_of(board.rank)) as engine:
        addresses = board.exchange("address", engine.address)
        if board.rank == 1:
            engine.connect(addresses[0])
        board.exchange("connected", None)
        other = name_of(1 - board.rank)
        key = engine.offer(engine.register(memory), to=other, access=Access.WRITE)
        theirs = RegionKey.decode(board.exchange("key", key.encode())[1 - board.rank])
        if board.rank == 1:
            source = engine.register(allocate(nbytes))
            for i in range(1000):
                engine.write(other, source, theirs, 0, 0, nbytes, immediate=1)
                if i == 20 and (child := os.fork()) == 0:
                    time.sleep(SOON_S)
                    os._exit(0)
                if i == 20:
                    board.post("child", child)
                if i == 40:
                    os.kill(os.getpid(), signal.SIGKILL)
        child = board.read("child")
        try:
            with pytest.raises(PeerLost) as caught:
                expect_without_end(engine, other)
            os.kill(child, 0)  # it does live on
        finally:
            os.kill(child, signal.SIGKILL)
    return caught.value.evidence


@both_backends
def test_a_writer_that_dies_beside_its_child_is_missed(backend: str) -> None:
    assert run_ranks(2, die_beside_a_child, str(backend), exits={1: -9})[0]
