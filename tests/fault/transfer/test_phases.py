"""A peer is killed or stopped at each point of a connection's and of a transfer's life.

It does so itself, so that it is that very point; see `tests.support.doomed_peer`. Whoever is left
gets one typed error in time, loses nothing, and goes on with its other peers.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.engines import (
    BOTH,
    new_engine,
    new_name,
    offer,
    open_descriptors,
)
from tests.support.nursery import ROOT, Nursery, Peer
from tests.support.waits import eventually
from transfer import (
    HandshakeRefused,
    ImmediateTimeout,
    PeerLost,
    Region,
    RegionKey,
    TransferEngine,
    TransferError,
    TransferTimeout,
    allocate,
)
from transfer import native as compiled_loops

SOON_S = 60.0
# Of an operation with a peer that stops, and what may pass until its error is there.
DEADLINE_S = 0.4
GRACE_S = 30.0
# Who was stopped is found by the deadline; who was killed is lost, however slow this machine.
PATIENCE_S = {"SIGSTOP": DEADLINE_S, "SIGKILL": GRACE_S}
# Of a handshake: a peer that is only slow comes to the point where it ends before that.
CALLED_S = 4.0
LARGE = 32 << 20
SIGNALS = ["SIGKILL", "SIGSTOP"]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: Any) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("shim"), native=compiled_loops.COMPILED)
    yield made
    made.close()


class Survivor:
    """An engine with a peer that stays, and one that is doomed."""

    def __init__(self, nursery: Nursery, backend: str, **options: Any) -> None:
        engine_options = options.pop("engine", {})
        self.engine: TransferEngine = new_engine(
            backend, handshake_timeout_s=CALLED_S, **engine_options
        )
        self.other = new_engine(backend)
        self.lost: list[tuple[str, str]] = []
        self.engine.on_peer_lost(lambda name, evidence: self.lost.append((name, evidence)))
        self.engine.open()
        self.other.open()
        self.engine.connect(self.other.address, timeout_s=SOON_S)
        self.tag = 0
        self.check_serves()
        self.descriptors, self.threads = open_descriptors(), threading.active_count()
        self.name = new_name()
        self.peer: Peer = nursery.fork(
            backend=backend, name=self.name, **{"nbytes": 1 << 16, "plain": False, **options}
        )
        self.descriptors += 1  # the channel to it
        self.address = self.peer.channel.hear()["address"]

    def meet(self, *, dial: bool = False, timeout_s: float = SOON_S) -> None:
        """Connect; `dial`: it is the peer that calls."""
        fields = {"address": self.engine.address, "name": self.engine.name, "dial": dial}
        self.peer.channel.say(**fields)
        if not dial:
            self.engine.connect(self.address, timeout_s=timeout_s)

    def exchange(self, *, after: int = 0, key: RegionKey | None = None) -> RegionKey:
        """Get the peer's key, and let it arm its fault."""
        theirs = RegionKey.decode(bytes.fromhex(self.peer.channel.hear()["key"]))
        self.peer.channel.say(after=after, key=key.encode().hex() if key else "")
        assert self.peer.channel.hear()["armed"]
        return theirs

    def source(self, nbytes: int) -> Region:
        return self.engine.register(torch.ones(nbytes, dtype=torch.uint8))

    def check_serves(self) -> None:
        """The other peer writes and reads, and so do we."""
        self.tag += 1
        for a, b in ((self.engine, self.other), (self.other, self.engine)):
            mine, theirs = a.register(allocate(4096)), b.register(allocate(4096))
            key = offer(b, theirs, a)
            mine.tensor.random_()
            a.write(b.name, mine, key, 0, 0, 4096, immediate=self.tag).wait(SOON_S)
            b.expect({(a.name, self.tag): 1}, timeout_s=SOON_S)
            assert torch.equal(mine.tensor, theirs.tensor)
            a.read(b.name, mine, key, 0, 0, 64).wait(SOON_S)
            b.withdraw(key)

    def fails(self, how: str, call: Any) -> TransferError:
        """The call ends with what fits the fault, in time; return its error."""
        started = time.monotonic()
        with pytest.raises((PeerLost, TransferTimeout, ImmediateTimeout)) as caught:
            call()
        assert time.monotonic() - started < DEADLINE_S + GRACE_S
        self.peer.await_end(how)
        expected = PeerLost if how == "SIGKILL" else TimeoutError
        assert isinstance(caught.value, expected), repr(caught.value)
        return caught.value

    def finish(self, how: str) -> None:
        """It is fenced in no time, it dies, and nothing of it is left."""
        self.peer.await_end(how)
        self.check_serves()
        started = time.monotonic()
        self.engine.disconnect(self.name, reason="the test is over")
        assert time.monotonic() - started < GRACE_S
        assert self.name not in {peer.name for peer in self.engine.peers()}
        self.check_serves()
        self.peer.end()
        self.descriptors -= 1
        gc.collect()
        eventually(lambda: open_descriptors() <= self.descriptors, "descriptors are closed", SOON_S)
        eventually(lambda: threading.active_count() <= self.threads, "threads have ended", SOON_S)
        eventually(lambda: not self.engine._rendezvous._negotiations, "no handshake is left")

    def close(self) -> None:
        self.engine.close()
        self.other.close()
        self.peer.end()


@pytest.fixture
def survivors() -> Iterator[list[Survivor]]:
    made: list[Survivor] = []
    yield made
    for survivor in made:
        survivor.close()


@pytest.fixture
def doom(nursery: Nursery, survivors: list[Survivor]) -> Any:
    def begin(backend: str, **options: Any) -> Survivor:
        survivors.append(Survivor(nursery, backend, **options))
        return survivors[-1]

    return begin


both_ways = pytest.mark.parametrize("how", SIGNALS)
both_backends = pytest.mark.parametrize("backend", ["tcp", "shared_memory"])


@both_ways
@both_backends
@pytest.mark.parametrize("phase", ["challenge", "accept", "ready"])
def test_while_it_is_called(doom: Any, backend: str, phase: str, how: str) -> None:
    survivor = doom(backend, phase=phase, how=how)
    started = time.monotonic()
    with pytest.raises(HandshakeRefused):
        survivor.meet(timeout_s=CALLED_S)
    assert time.monotonic() - started < CALLED_S + GRACE_S
    survivor.finish(how)
    assert survivor.lost == [], "who was never connected is not lost"


@both_ways
@both_backends
@pytest.mark.parametrize("phase", ["proof", "confirm"])
def test_while_it_calls(doom: Any, backend: str, phase: str, how: str) -> None:
    survivor = doom(backend, phase=phase, how=how)
    survivor.meet(dial=True)
    survivor.finish(how)
    assert survivor.lost == []


@both_ways
def test_before_its_signal_connection(doom: Any, how: str) -> None:
    """Its control connection stands, the other one never comes."""
    survivor = doom("shared_memory", phase="signal", how=how)
    survivor.meet(dial=True)
    survivor.peer.await_end(how)
    with pytest.raises(HandshakeRefused):
        survivor.engine.connect(survivor.address, timeout_s=DEADLINE_S)
    survivor.finish(how)


@both_ways
@both_backends
def test_between_the_handshake_and_the_first_offer(doom: Any, backend: str, how: str) -> None:
    survivor = doom(backend, phase="greeted", how=how)
    survivor.meet(dial=True)
    wanted = {(survivor.name, 1): 1}
    eventually(lambda: len(survivor.engine.peers()) == 2 or bool(survivor.lost), "it is known")
    survivor.fails(how, lambda: survivor.engine.expect(wanted, timeout_s=PATIENCE_S[how]))
    survivor.finish(how)


@both_ways
@pytest.mark.parametrize("phase", ["mapping", "locating"])
def test_while_it_is_asked_where_its_memory_is(doom: Any, phase: str, how: str) -> None:
    survivor = doom("shared_memory", phase=phase, how=how, plain=phase == "locating")
    survivor.meet()
    key, source = survivor.exchange(), survivor.source(64)
    engine, name = survivor.engine, survivor.name
    survivor.fails(
        how, lambda: engine.write(name, source, key, 0, 0, 64, timeout_s=PATIENCE_S[how]).wait()
    )
    survivor.finish(how)


# Over tcp, and over the sockets of one host: memory in no memory file, addresses not told.
sockets = pytest.mark.parametrize(
    ("backend", "options"),
    [("tcp", {}), ("shared_memory", {"plain": True, "process_memory": False,
                                     "engine": {"process_memory": False}})],
    ids=["tcp", "unix"],
)  # fmt: skip


@both_ways
@sockets
@pytest.mark.parametrize("phase", ["landing", "acknowledging", "replying"])
def test_while_bytes_move(
    doom: Any, backend: str, options: dict[str, Any], phase: str, how: str
) -> None:
    survivor = doom(backend, phase=phase, how=how, nbytes=LARGE, **options)
    survivor.meet()
    key = survivor.exchange(after=LARGE // 3 if phase == "landing" else 100_000)
    nbytes = 1 << 16 if phase == "acknowledging" else LARGE
    source, name = survivor.source(nbytes), survivor.name
    call = survivor.engine.read if phase == "replying" else survivor.engine.write
    # A third of the bytes has to be there before who stops then does.
    patience_s = 5.0 if how == "SIGSTOP" else GRACE_S

    def move() -> None:
        call(name, source, key, 0, 0, nbytes, timeout_s=patience_s).wait()

    error = survivor.fails(how, move)
    assert isinstance(error, PeerLost | TransferTimeout)
    assert error.peer == name
    assert error.bytes_moved < nbytes, "what was not acknowledged is not said to be in place"
    assert error.elapsed_s < patience_s + GRACE_S
    survivor.finish(how)


@both_ways
@both_backends
def test_while_a_key_is_withdrawn_from_it(doom: Any, backend: str, how: str) -> None:
    survivor = doom(backend, phase="withdrawing", how=how)
    engine = survivor.engine
    region = engine.register(torch.zeros(4096, dtype=torch.uint8))
    survivor.meet()
    key = engine.offer(region, to=survivor.name, access=BOTH)
    survivor.exchange(key=key)
    assert region.tensor[:64].sum() == 64, "it was used"
    started = time.monotonic()
    free = engine.withdraw(key)
    assert time.monotonic() - started < GRACE_S
    survivor.peer.await_end(how)
    told = bool(survivor.engine._links.told.num_quarantined)
    if how == "SIGSTOP":  # of the dead nothing is told any more, a moment later
        assert free is not told
    if how == "SIGSTOP" and backend == "shared_memory":
        assert not free, "a stopped process may be in the middle of a copy"
    survivor.finish(how)
    eventually(lambda: engine.withdraw(key), "its memory is free")
    assert engine._links.told.num_quarantined == 0


@both_ways
@both_backends
def test_while_it_closes(doom: Any, backend: str, how: str) -> None:
    survivor = doom(backend, phase="closing", how=how)
    survivor.meet()
    survivor.exchange()
    wanted = {(survivor.name, 1): 1}
    survivor.fails(how, lambda: survivor.engine.expect(wanted, timeout_s=PATIENCE_S[how]))
    if how == "SIGKILL":
        eventually(lambda: bool(survivor.lost), "it is told")
        assert [name for name, _ in survivor.lost] == [survivor.name]
    survivor.finish(how)


@both_backends
def test_an_engine_closes_beside_a_stopped_peer(doom: Any, backend: str) -> None:
    survivor = doom(backend, phase="greeted", how="SIGSTOP", plain=True)
    survivor.meet(dial=True)
    survivor.peer.await_end("SIGSTOP")
    survivor.engine.offer(survivor.source(64), to=survivor.name, access=BOTH)
    started = time.monotonic()
    survivor.engine.close()
    assert time.monotonic() - started < GRACE_S


# Half a minute on two quiet cores.
@pytest.mark.timeout(600)
@pytest.mark.skipif(not compiled_loops.COMPILED, reason="this is already without them")
def test_all_that_moves_bytes_without_the_compiled_parts() -> None:
    chosen = "asked or move or withdrawn or closes"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen],
        cwd=ROOT, env={**os.environ, "MOE_RUNTIME_NATIVE": "0"}, capture_output=True, text=True,
        timeout=560, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
