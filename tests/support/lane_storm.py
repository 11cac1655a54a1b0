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

from tests.support.data_connections import TOKEN, header, make_lane, make_server, tcp_pair
from transfer import native
from transfer.wire import RequestKind

NBYTES = 1 << 18
SECONDS = 3.0
ANSWER_S = 60.0


class Storm:
    """Threads that post, progress, look, attach, detach, offer and withdraw."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.server: Any = make_server("compiled")
        self.peer = self.server.open_peer("peer")
        # What is sent, and where replies land: never the same, or the caller would race.
        self.memory, self.source, self.back = np.zeros((3, NBYTES), dtype=np.uint8)
        self.server.add_offer(TOKEN, "peer", self.memory.ctypes.data, NBYTES, 3)
        self.stopping = self.drained = False
        self.answered = self.posted = 0
        self.lane = self._connect()

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
            self.posted += 1
            ident, nbytes = self.posted, 1 << self.rng.randrange(18)
            kind = self.rng.choice([RequestKind.WRITE, RequestKind.READ])
            oldest, writes = max(ident - 1000, 1), kind is RequestKind.WRITE
            if self.rng.random() < 0.5:
                place = (self.source if writes else self.back).ctypes.data
                assert self.lane.post_message(
                    ident, kind.value, None, ident, oldest, TOKEN, place, 0, nbytes
                )
                self.lane.push()
            else:
                head = header(kind, num_pieces=1, nbytes=nbytes, transfer_id=ident, oldest=oldest)
                assert self._post(self.lane, ident, head, nbytes, writes=writes)
            if self.lane.in_flight > 64:
                time.sleep(0.001)

    def move(self) -> None:
        while not (self.drained or (self.stopping and not self.lane.in_flight)):
            self.answered += len(native.compiled.progress([self.lane], 0.01))

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
    assert storm.answered == storm.posted > 100, (storm.answered, storm.posted)
    storm.lane.close()
    storm.server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
