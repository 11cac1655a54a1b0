"""Numbers of transfers stay within what the owner remembers, whatever ends when."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines import engine_pair, eventually, offer
from transfer import Transfer, TransferTimeout, allocate
from transfer.backends.incoming import IncomingWrites
from transfer.memory.region import Region
from transfer.rails.numbering import Numbering
from transfer.rails.slices import Operation
from transfer.wire import Request, RequestKind


@given(st.integers(1, 40), st.lists(st.integers(0, 1 << 30), max_size=400))
def test_no_number_is_further_ahead_than_the_owner_allows(ahead: int, steps: list[int]) -> None:
    unfinished: dict[int, None] = {}
    numbering = Numbering(unfinished, ahead_max=ahead)
    last = 0
    for step in steps:
        if step % 3 and not numbering.is_exhausted:
            number = numbering.take()
            assert number == last + 1, "ascending, without holes"
            last = number
            unfinished[number] = None
            assert number < numbering.oldest + ahead, "the owner's own rule"
        elif unfinished:
            del unfinished[list(unfinished)[step % len(unfinished)]]
        if not unfinished:
            assert not numbering.is_exhausted
            assert numbering.oldest == last + 1


def test_what_the_numbers_allow_the_owner_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.backends.incoming.TRANSFERS_AHEAD_MAX", 64)
    unfinished: dict[int, None] = {}
    numbering, owner = Numbering(unfinished, ahead_max=64), IncomingWrites()
    number = 0
    for _ in range(1000):
        if numbering.is_exhausted:
            del unfinished[numbering.oldest]  # the one that never ended at last does
            continue
        number = numbering.take()
        unfinished[number] = None
        request = Request(kind=RequestKind.WRITE, transfer_id=number, oldest=numbering.oldest,
                          slice_idx=0, num_slices=1, num_pieces=0, nbytes=0, immediate=None,
                          token=bytes(16))  # fmt: skip
        assert owner.begin(request, "receiver")
        assert owner.finish(request, "receiver")
        if number % 64 != 1:
            del unfinished[number]
    assert number > 500


def stuck(region: Region, peer: str) -> Operation:
    """An operation that nothing will ever answer."""
    handle = Transfer(peer=peer, operation="write", backend="tcp", nbytes=0,
                      deadline=time.monotonic() + 60.0)  # fmt: skip
    return Operation(kind=RequestKind.WRITE, handle=handle, token=bytes(16), region=region,
                     immediate=None)  # fmt: skip


def test_an_engine_waits_for_the_oldest_with_its_deadline() -> None:
    with engine_pair("tcp") as (user, owner):
        key = offer(owner, owner.register(allocate(4096)), user)
        source = user.register(allocate(4096))
        user.write(owner.name, source, key, 0, 0, 8).wait()
        link = user._table.get(owner.name)
        assert link is not None
        core = link.requests._core
        core.numbers._ahead_max = 100
        core.numbers._limit = 0
        hung = stuck(source, owner.name)
        core.add(hung)
        for _ in range(99):
            user.write(owner.name, source, key, 0, 0, 8).wait()
        with pytest.raises(TransferTimeout):
            user.write(owner.name, source, key, 0, 0, 8, timeout_s=0.2)
        ended = threading.Event()

        def one_more() -> None:
            user.write(owner.name, source, key, 0, 0, 8, timeout_s=60.0).wait()
            ended.set()

        thread = threading.Thread(target=one_more)
        thread.start()
        assert not ended.wait(0.2), "it has to wait"
        with link.requests._lock:
            done = link.requests._end(hung, None)
        link.requests._report([done])
        thread.join(20.0)
        eventually(ended.is_set, "it had its turn")
