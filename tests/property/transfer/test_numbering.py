"""Numbers of transfers stay within what the owner remembers, whatever ends when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines import (
    engine_pair,
    offer,
)
from tests.support.waits import eventually
from transfer import Transfer, TransferTimeout, allocate, native
from transfer.backends.incoming import IncomingWrites
from transfer.memory.region import Region
from transfer.rails.books import Books, BooksLike
from transfer.rails.slices import Operation
from transfer.wire import Request, RequestKind

KINDS: dict[str, Callable[[int], BooksLike]] = {"python": Books}
if native.compiled is not None:
    KINDS["compiled"] = native.compiled.Books


@pytest.mark.parametrize("kind", KINDS)
@given(ahead=st.integers(1, 40), steps=st.lists(st.integers(0, 1 << 30), max_size=400))
def test_no_number_is_further_ahead_than_the_owner_allows(
    kind: str, ahead: int, steps: list[int]
) -> None:
    books, unfinished = KINDS[kind](ahead), []
    last = 0
    for step in steps:
        if step % 3 and not books.is_exhausted:
            number = books.take()
            assert number == last + 1, "ascending, without holes"
            last = number
            unfinished.append(number)
            assert number < books.oldest + ahead, "the owner's own rule"
        elif unfinished:
            books.end(unfinished.pop(step % len(unfinished)))
        assert len(books) == len(unfinished)
        assert books.oldest == min(unfinished, default=last + 1)
        if not unfinished:
            assert not books.is_exhausted


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_ended_ends_once(kind: str) -> None:
    books = KINDS[kind](100)
    numbers = [books.take() for _ in range(5)]
    for number in (3, 3, 1, 99, 0, 1):
        books.end(number)
    assert len(books) == 3
    assert books.oldest == 2
    for number in numbers:
        books.end(number)
    assert (len(books), books.oldest) == (0, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_numbers_allow_the_owner_takes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.backends.incoming.TRANSFERS_AHEAD_MAX", 64)
    books, owner = KINDS[kind](64), IncomingWrites()
    number = 0
    for _ in range(1000):
        if books.is_exhausted:
            books.end(books.oldest)  # the one that never ended at last does
            continue
        number = books.take()
        request = Request(kind=RequestKind.WRITE, transfer_id=number, oldest=books.oldest,
                          slice_idx=0, num_slices=1, num_pieces=0, nbytes=0, immediate=None,
                          token=bytes(16))  # fmt: skip
        assert owner.begin(request, "receiver")
        assert owner.finish(request, "receiver")
        if number % 64 != 1:
            books.end(number)
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
        core.books.ahead_max = 100
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
        thread.join(60.0)
        eventually(ended.is_set, "it had its turn")
