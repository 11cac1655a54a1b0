"""Who was called may speak before the last word of its signal connection is read."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.engines import (
    new_engine,
)
from tests.support.waits import eventually
from transfer import TransferEngine, TransferError
from transfer.connections.early_frames import EARLY_BYTES_MAX, FRAME_BYTES, EarlyFrames
from transfer.wire import ControlKind

SOON_S = 60.0


def came(link: Any) -> int:
    return len(link.early._frames)


@contextmanager
def half_met(caller: TransferEngine, called: TransferEngine) -> Iterator[Callable[[], None]]:
    """Let `called` be ready for `caller` and not the other way round, until what comes is called.

    The last word of the signal connection is what `caller` does not get to, as when its thread is
    kept busy meanwhile.
    """
    links: Any = caller._links
    attach, held = links._attach_signal, []
    links._attach_signal = lambda *args: held.append(args)
    calling = threading.Thread(target=lambda: caller.connect(called.address, timeout_s=SOON_S))
    calling.start()

    def go_on() -> None:
        links._attach_signal = attach
        caller._loop.call(lambda: attach(*held.pop()))
        calling.join(SOON_S)

    try:
        eventually(lambda: bool(held), "the signal connection stands")
        yield go_on
    finally:
        if held:
            go_on()
    assert not calling.is_alive()


def test_what_is_said_early_is_heard_once_the_link_is_ready_and_can_be_answered() -> None:
    caller, called = new_engine("shared_memory"), new_engine("shared_memory")
    asked: list[bytes] = []
    answers: list[bytes] = []

    def answer(peer: str, payload: bytes) -> None:
        asked.append(payload)
        caller.notify(peer, payload[::-1])

    caller.on_notify(answer)
    called.on_notify(lambda peer, payload: answers.append(payload))
    payloads = [secrets.token_bytes(1 + secrets.randbelow(99)) for _ in range(20)]
    with caller, called:
        with half_met(caller, called) as go_on:
            link = caller._table.get(called.name)
            # Who called at once as well finds the other's call, and goes on.
            assert called.connect(caller.address, timeout_s=SOON_S).name == caller.name
            for payload in payloads[:10]:
                called.notify(caller.name, payload)
            eventually(lambda: came(link) == 10, "they came")
            assert asked == []
            go_on()
        for payload in payloads[10:]:
            called.notify(caller.name, payload)
        eventually(lambda: len(answers) == 20, "all are answered")
        assert asked == payloads
        assert answers == [payload[::-1] for payload in payloads]
        assert came(link) == 0


def test_nothing_is_kept_of_a_peer_that_leaves_before_the_link_is_ready() -> None:
    caller = new_engine("shared_memory")
    heard: list[bytes] = []
    caller.on_notify(lambda peer, payload: heard.append(payload))
    with caller:
        called = new_engine("shared_memory")
        called.open()
        links: Any = caller._links
        attach, held = links._attach_signal, []
        links._attach_signal = lambda *args: held.append(args)
        refused: list[Exception] = []

        def call() -> None:
            try:
                caller.connect(called.address, timeout_s=SOON_S)
            except TransferError as error:
                refused.append(error)

        calling = threading.Thread(target=call)
        calling.start()
        eventually(lambda: bool(held), "the signal connection stands")
        link = caller._table.get(called.name)
        called.notify(caller.name, b"early")
        eventually(lambda: came(link) == 1, "it has come")
        called.close()
        eventually(lambda: caller._table.get(called.name) is None, "it is lost")
        calling.join(SOON_S)
        links._attach_signal = attach
        assert len(refused) == 1
        assert came(link) == 0
        assert heard == []
        held.pop()[1].close()


def test_what_is_kept_is_bounded() -> None:
    early = EarlyFrames()
    content = b"x" * ((1 << 20) - FRAME_BYTES)
    for _ in range(EARLY_BYTES_MAX >> 20):
        assert early.keep(ControlKind.NOTIFY, content)
    assert not early.keep(ControlKind.NOTIFY, b"")
    assert len(early.take_all()) == EARLY_BYTES_MAX >> 20
    assert early.keep(ControlKind.NOTIFY, b"")
