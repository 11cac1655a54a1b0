"""One lane and one server, used by many threads at once: what the thread sanitizer looks at.

python -m tests.support.lane_storm DIRECTORY    where the build is that must be in use
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.support.data_connections import TOKEN, header, make_lane, make_server, tcp_pair
from transfer import native
from transfer.memory.region import Region, RegionKey
from transfer.rails.books import make_books, make_load
from transfer.rails.express import make_short_way
from transfer.wire import RequestKind

NBYTES = 1 << 18
SECONDS = 3.0
ANSWER_S = 60.0


class Storm:
    """Threads that post, wait, progress, look, attach, detach, offer and withdraw."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.server: Any = make_server("compiled")
        self.peer = self.server.open_peer("peer")
        # What is sent, and where replies land: never the same, or the caller would race.
        self.memory, self.source, self.back = np.zeros((3, NBYTES), dtype=np.uint8)
        self.server.add_offer(TOKEN, "peer", self.memory.ctypes.data, NBYTES, 3)
        self.stopping = self.drained = False
        self.posting = True
        self.answered = self.posted = 0
        self.lane = self._connect()
        self.lane.urgent = True
        self.key = RegionKey("peer", TOKEN, NBYTES, 3, False)
        self.regions = [Region(torch.from_numpy(memory)) for memory in (self.back, self.source)]
        self.messages: list[Any] = []
        self.load: Any = make_load()
        self.load.bind(self, "rail", lambda: None, self.settle)
        self.load.carry(self.lane, (self.lane,), True)
        self.load.open = self.load.healthy = True
        self.load.bandwidth, self.load.bulk_bytes_max = 1e9, 1 << 30
        self.load.bulk_bytes_max_beside_urgent = 1 << 30
        self.books: Any = make_books([self.load])
        self.way = make_short_way()
        self.way.timeout_s = ANSWER_S
        self.way.add("peer", self.books)

    def progress(self, handle: object, timeout_s: float) -> bool:
        """As of a link: others move the bytes."""
        return False

    def leave(self) -> None:
        """Nothing is led."""

    def attend(self) -> None:
        """Others move the bytes."""

    def _connect(self) -> Any:
        ours, theirs = tcp_pair()
        self.server.attach(self.peer, theirs.detach())
        return make_lane("compiled", ours)

    def _post(self, lane: Any, ident: int, head: bytes, nbytes: int, *, writes: bool) -> bool:
        zero, length = np.zeros(1, dtype=np.int64), np.full(1, nbytes, dtype=np.int64)
        base = (self.source if writes else self.back).ctypes.data
        return bool(lane.post(ident, head, writes, base, zero, zero, length))

    def serve(self) -> None:
        while not self.drained:
            self.server.run(0.05)
            self.server.take_events()

    def post(self) -> None:
        while not self.stopping:
            nbytes = 1 << self.rng.randrange(18)
            writes = self.rng.random() < 0.5
            if self.rng.random() < 0.6:
                self._send_message(nbytes, writes=writes)
            else:
                self._send_slice(nbytes, writes=writes)
            if self.lane.in_flight > 64:
                time.sleep(0.001)
        self.posting = False

    def _send_message(self, nbytes: int, *, writes: bool) -> None:
        region = self.regions[writes]
        message = self.way.post(writes, "peer", region, self.key, 0, 0, nbytes, None, None)
        if message is None:
            return
        self.messages.append(message)
        if self.rng.random() < 0.3:
            message.wait(ANSWER_S) if self.rng.random() < 0.5 else message.wait()

    def _send_slice(self, nbytes: int, *, writes: bool) -> None:
        kind = RequestKind.WRITE if writes else RequestKind.READ
        ident = self.books.take()
        head = header(kind, num_pieces=1, nbytes=nbytes, transfer_id=ident,
                      oldest=self.books.oldest)  # fmt: skip
        self.posted += 1
        assert self._post(self.lane, ident, head, nbytes, writes=writes)

    def settle(self, finished: list[tuple[Any, int, object]], lane: object = None) -> None:
        for ident, status, _ in finished:
            assert status == 0
            self.answered += 1
            self.books.end(ident)

    def move(self) -> None:
        while self.posting or self.lane.in_flight:
            self.settle(native.compiled.progress([self.lane], 0.01))

    def look(self) -> None:
        while not self.drained:
            assert self.lane.evidence is None
            _ = self.lane.in_flight, self.lane.unsent, self.server.connections(self.peer)
            self.server.take_counters()
            time.sleep(0.0005)

    def change(self) -> None:
        """Another peer's connections and offers come and go."""
        while not self.stopping:
            peer = self.server.open_peer("guest")
            token = self.rng.randbytes(16)
            self.server.add_offer(token, "guest", self.memory.ctypes.data, NBYTES, 3)
            ours, theirs = tcp_pair()
            connection = self.server.attach(peer, theirs.detach())
            lane = make_lane("compiled", ours)
            head = header(num_pieces=1, nbytes=NBYTES, token=token)
            self._post(lane, 1, head, NBYTES, writes=True)
            native.compiled.progress([lane], 0.001)
            ends: list[tuple[Callable[[Any], None], Any]] = [
                (self.server.withdraw_offer, token),
                (self.server.detach, connection),
                (self.server.close_peer, peer),
            ]
            end, what = self.rng.choice(ends)
            end(what)
            lane.close()
            self.server.close_peer(peer)
            self.server.withdraw_offer(token)


def main() -> int:
    assert native.compiled is not None
    assert sys.argv[1] in str(native.compiled.__file__), "the sanitized build is in use"
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    storm = Storm(seed)
    work: list[Callable[[], None]] = [storm.serve, storm.look]
    busy: list[Callable[[], None]] = [storm.post, storm.move, storm.change]
    threads = [threading.Thread(target=target, name=target.__name__) for target in work + busy]
    for thread in threads:
        thread.start()
    time.sleep(SECONDS)
    storm.stopping = True
    for thread in threads[len(work) :]:
        thread.join(ANSWER_S)
        assert not thread.is_alive(), thread.name
    storm.drained = True
    storm.server.wake()
    for thread in threads[: len(work)]:
        thread.join(ANSWER_S)
        assert not thread.is_alive(), thread.name
    assert storm.lane.in_flight == 0
    assert storm.answered == storm.posted > 50, (storm.answered, storm.posted)
    assert storm.load.messages_done == len(storm.messages) > 50
    assert all(message.bytes_moved == message.nbytes for message in storm.messages)
    assert len(storm.books) == storm.load.out_bytes == 0
    storm.lane.close()
    assert native.compiled.num_urgent() == 0
    storm.server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
