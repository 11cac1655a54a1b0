"""What becomes of silence, losses and refusals: a delivery on a scripted engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from dispatch import PassFailed
from dispatch.delivery import Delivery
from dispatch.message import Stamp
from dispatch.waiting import LOOKS, immediate_of
from dispatch.windows import SendWindow, StagedPart
from transfer import AccessRefused, EngineClosed, ImmediateTimeout, Interrupted, PeerLost

PEERS = {2: "two", 5: "five", 9: "nine"}
STAMP = Stamp(3, 0, 1, 0)
TIMEOUT_S = 0.04


class ScriptedEngine:
    """`expect` follows a script, the last entry for ever: an error, or a pause and an error."""

    def __init__(self, *script, refuse=None, late=None) -> None:
        self.script = list(script)
        self.refuse, self.late = refuse or {}, late or {}
        self.written: list[tuple[str, int, int, int]] = []
        self.waits = 0
        self.timeouts: list[float] = []

    def in_place(self, peer, key):
        return None

    def write(self, peer, source, key, begin, at, nbytes, *, immediate, timeout_s):
        assert timeout_s == TIMEOUT_S
        if peer in self.refuse:
            raise self.refuse[peer]
        self.written.append((peer, begin, at, immediate))
        return ScriptedTransfer(self.late.get(peer))

    def expect(self, due, *, timeout_s):
        self.waits += 1
        self.timeouts.append(timeout_s)
        self.due = due
        step = self.script.pop(0) if len(self.script) > 1 else (self.script or [None])[0]
        if isinstance(step, tuple):
            time.sleep(step[0])
            step = step[1]
        if step is not None:
            raise step


class ScriptedTransfer:
    def __init__(self, error) -> None:
        self.error = error

    def done(self):
        return True

    def wait(self, timeout_s=None):
        if self.error is not None:
            raise self.error


def delivery_on(engine: ScriptedEngine) -> Delivery:
    part = np.zeros(64, np.uint8)
    return Delivery(
        engine,
        SimpleNamespace(members=(2, 4, 5, 9), me=1),
        epoch=3,
        timeout_s=TIMEOUT_S,
        peers=PEERS,
        windows={rank: SimpleNamespace(parts=[part, part]) for rank in PEERS},
        targets={rank: SendWindow(f"key-{rank}", [640, 64]) for rank in PEERS},
        staging=SimpleNamespace(
            parts=[
                [StagedPart("staging", at, part), StagedPart("staging", at + 64, part)]
                for at in (0, 128, 256)
            ]
        ),
        counters=SimpleNamespace(sent_bytes=0, waited_s=0.0),
    )


def exchange(engine: ScriptedEngine, stamp: Stamp = STAMP):
    return exchange_on(delivery_on(engine), stamp)


def exchange_on(delivery: Delivery, stamp: Stamp, **options):
    delivery.send(stamp, lambda member: 64, lambda member, part: 64)
    return delivery.receive(stamp, b"", **options)


def silent(*ranks: int) -> ImmediateTimeout:
    return ImmediateTimeout(tuple((PEERS[rank], immediate_of(3, 0)) for rank in ranks))


def test_one_write_per_peer_starting_with_the_next_rank():
    engine = ScriptedEngine()
    assert set(exchange(engine)) == {0, 2, 3}, "positions of the other members"
    assert engine.written == [("five", 0, 0, 24), ("nine", 128, 0, 24), ("two", 256, 0, 24)]
    engine = ScriptedEngine()
    exchange(engine, STAMP._replace(parity=1))
    assert engine.written == [("five", 64, 640, 25), ("nine", 192, 640, 25), ("two", 320, 640, 25)]
    assert engine.due == {(name, 25): 1 for name in PEERS.values()}


def test_immediates_wrap_with_the_epoch():
    assert immediate_of(5, 1) == 41
    assert immediate_of((1 << 24) + 5, 0) == 40
    assert immediate_of((1 << 24) - 1, 7) == (1 << 27) - 1


def test_silence_names_all_whose_message_is_missing():
    engine = ScriptedEngine(silent(9, 2))
    with pytest.raises(PassFailed) as caught:
        exchange(engine)
    failure = caught.value
    assert failure.suspects == (2, 9)
    assert (failure.epoch, failure.pass_id, failure.layer) == (3, 0, 1)
    assert failure.phase == "dispatch"
    assert "0.04" in failure.evidence
    assert engine.waits >= 2, "the first wait saw a message arrive"


def test_the_deadline_is_renewed_as_long_as_messages_arrive():
    engine = ScriptedEngine(silent(9, 2), silent(9), None)
    exchange(engine)
    assert engine.waits == 3
    engine = ScriptedEngine(silent(9, 2), silent(9))
    with pytest.raises(PassFailed) as caught:
        exchange(engine)
    assert caught.value.suspects == (9,)


def test_silence_is_counted_from_the_last_message():
    """A message in the first moment of a wait must not double it."""
    engine = ScriptedEngine(silent(9, 2))
    with pytest.raises(PassFailed):
        exchange(engine)
    assert engine.waits == 1 + LOOKS
    assert engine.timeouts == [TIMEOUT_S / LOOKS] * engine.waits
    engine = ScriptedEngine(silent(2, 5, 9))
    with pytest.raises(PassFailed):
        exchange(engine)
    assert engine.waits == LOOKS


def test_the_deadline_of_a_call_is_not_renewed():
    engine = ScriptedEngine((TIMEOUT_S, silent(9, 2)), silent(9))
    with pytest.raises(PassFailed) as caught:
        exchange_on(delivery_on(engine), STAMP, timeout_s=TIMEOUT_S * 0.9)
    assert caught.value.suspects in ((2, 9), (9,))
    assert engine.waits <= 2
    engine = ScriptedEngine(None)
    exchange_on(delivery_on(engine), STAMP, timeout_s=0.0)
    assert engine.waits == 1, "what is here already is taken"


def test_a_process_that_stood_still_looks_once_more_before_it_accuses():
    stood_still = (TIMEOUT_S * 3, silent(2, 5, 9))
    engine = ScriptedEngine(stood_still, None)
    exchange(engine)
    assert engine.waits == 2
    engine = ScriptedEngine(stood_still)
    with pytest.raises(PassFailed) as caught:
        exchange(engine)
    assert caught.value.suspects == (2, 5, 9)
    assert engine.waits == 1 + LOOKS, "bounded, however slow this process is"


def test_a_lost_peer_is_the_suspect():
    with pytest.raises(PassFailed) as caught:
        exchange(ScriptedEngine(PeerLost("five", "end of file")))
    assert caught.value.suspects == (5,)
    assert "end of file" in caught.value.evidence
    with pytest.raises(PassFailed) as caught:
        exchange(ScriptedEngine(refuse={"nine": PeerLost("nine", "reset")}))
    assert caught.value.suspects == (9,)


def test_a_refused_write_accuses_nobody():
    withdrawn = AccessRefused("nine", "withdrawn")
    with pytest.raises(PassFailed) as caught:
        exchange(ScriptedEngine(refuse={"nine": withdrawn}))
    assert caught.value.suspects == ()
    # The same, where the refusal comes back later, as over tcp.
    with pytest.raises(PassFailed) as caught:
        exchange(ScriptedEngine(silent(9), late={"nine": withdrawn}))
    assert caught.value.suspects == ()
    assert "withdrawn" in caught.value.evidence


def test_what_no_peer_did_passes_through():
    for error in (Interrupted("abort"), EngineClosed("closed")):
        with pytest.raises(type(error)):
            exchange(ScriptedEngine(error))
        with pytest.raises(type(error)):
            exchange(ScriptedEngine(refuse={"two": error}))


def test_an_earlier_write_that_failed_shows_before_its_staging_is_reused():
    engine = ScriptedEngine(late={"two": PeerLost("two", "reset")})
    delivery = delivery_on(engine)
    exchange_on(delivery, STAMP)
    exchange_on(delivery, STAMP._replace(parity=1))
    with pytest.raises(PassFailed) as caught:
        exchange_on(delivery, STAMP._replace(layer=2))
    assert caught.value.suspects == (2,)
