"""An event loop's line against servers that answer in pieces, late, wrongly or not at all."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time

import pytest

from transfer import ControlError, RpcTimeout
from transfer.local_rpc import Line
from transfer.loop_line import LoopLine, NotAsked

SOON_S = 60.0
BYTES_MAX = 1 << 20


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


class Ends:
    """A line, and the server's end as streams; an asynchronous context manager."""

    async def __aenter__(self):
        ours, theirs = socket.socketpair()
        self.line = LoopLine(Line(ours), "here", nbytes_max=BYTES_MAX)
        self.reader, self.writer = await asyncio.open_unix_connection(sock=theirs)
        return self

    async def __aexit__(self, *exc_info):
        self.line.close()
        self.line.close()
        self.writer.close()
        assert self.line.closed

    async def take(self) -> bytes:
        (nbytes,) = struct.unpack("<I", await self.reader.readexactly(4))
        return await self.reader.readexactly(nbytes)


def test_requests_in_turn_and_replies_in_any_pieces():
    rng = random.Random(seed := time.time_ns())
    requests = [rng.randbytes(rng.choice([0, 1, 7, 3000, 700_000])) for _ in range(40)]
    replies = [rng.randbytes(rng.choice([0, 1, 3, 5000, 600_000, BYTES_MAX])) for _ in range(40)]

    async def serve(ends):
        for request, reply in zip(requests, replies, strict=True):
            assert await ends.take() == request, seed
            whole = framed(reply)
            cuts = sorted(rng.sample(range(len(whole) + 1), min(3, len(whole))))
            for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                ends.writer.write(whole[start:end])
                await ends.writer.drain()
                await asyncio.sleep(0)

    async def use():
        async with Ends() as ends:
            serving = asyncio.ensure_future(serve(ends))
            found = await asyncio.gather(*(ends.line.ask(r, SOON_S) for r in requests))
            assert found == replies, seed
            await serving

    asyncio.run(use())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\7",
        framed(bytes(20000))[:-1],
        struct.pack("<I", BYTES_MAX + 1) + bytes(64),
        framed(b"one") + framed(b"two"),
    ],
)
def test_who_dies_or_talks_nonsense_ends_what_is_under_way(said):
    async def use():
        async with Ends() as ends:
            first, second = ends.line.ask(b"1", SOON_S), ends.line.ask(b"2", SOON_S)
            assert await ends.take() == b"1"
            ends.writer.write(said)
            ends.writer.close()
            results = await asyncio.gather(first, second, return_exceptions=True)
            assert isinstance(results[0], ControlError)
            assert not isinstance(results[0], NotAsked), "it may have been handled"
            assert isinstance(results[1], NotAsked)
            with pytest.raises(NotAsked):
                await ends.line.ask(b"3", SOON_S)

    asyncio.run(use())


def test_a_reply_that_does_not_come_costs_the_deadline_and_a_late_one_counts_for_nobody():
    async def use():
        async with Ends() as ends:
            begin = time.monotonic()
            first, second = ends.line.ask(b"1", 0.2), ends.line.ask(b"2", 0.05)
            with pytest.raises(NotAsked):  # its time was over while it was in the queue
                await second
            with pytest.raises(RpcTimeout):
                await first
            assert 0.2 <= time.monotonic() - begin < SOON_S
            assert ends.line.closed

    asyncio.run(use())


def test_one_that_nobody_waits_for_any_more_is_not_sent():
    async def use():
        async with Ends() as ends:
            first, second, third = (ends.line.ask(b"%d" % i, SOON_S) for i in range(3))
            second.cancel()
            for expected in (b"0", b"2"):
                assert await ends.take() == expected
                ends.writer.write(framed(expected * 2))
            assert (await first, await third) == (b"00", b"22")

    asyncio.run(use())
