"""One end of a transfer over two rails, in a process (and network namespace) of its own.

    python -m tests.support.rail_worker '{"rails": [...], "seconds": 4.0, ...}'

Speaks lines of JSON: tells its name and address; the owner then reads the asker's, and offers a
window; the asker reads that, writes for a while, and tells what it has seen.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from typing import Any

import torch

from configs.schema import TransferBackend, TransferConfig
from transfer import (
    Access,
    PeerLost,
    Priority,
    RegionKey,
    Transfer,
    TransferEngine,
    TransferError,
    allocate,
)

NBYTES = 8 << 20
OUTSTANDING = 3
PATIENCE_S = 60.0


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def hear() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sys.stdin.readline())
    return found


class Chat:
    """Numbered notifies both ways while a transfer runs."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.heard: list[int] = []
        self.lost: list[str] = []
        self.is_lost = threading.Event()
        self.num_said = 0
        engine.on_notify(lambda _, payload: self.heard.append(int(payload)))
        engine.on_peer_lost(self._on_lost)

    def _on_lost(self, _name: str, evidence: str) -> None:
        self.lost.append(evidence)
        self.is_lost.set()

    def start(self, name: str) -> None:
        self._thread = threading.Thread(target=self._talk, args=(name,))
        self._thread.start()

    def _talk(self, name: str) -> None:
        while not self._stop.wait(0.01):
            try:
                self._engine.notify(name, str(self.num_said).encode())
            except PeerLost:
                return
            self.num_said += 1

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def await_heard(self, number: int) -> None:
        """Until so many have come, or for long enough to be sure that they do not."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.heard) < number and time.monotonic() < deadline:
            time.sleep(0.01)

    def await_resumes(self, number: int) -> None:
        """Until the control connection has gone on over another socket so often."""
        deadline = time.monotonic() + PATIENCE_S
        while self._engine.statistics().control_resumes < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{number} resumes")
            time.sleep(0.01)

    def report(self) -> dict[str, Any]:
        return {
            "said": self.num_said,
            "heard": len(self.heard),
            "in_order": self.heard == list(range(len(self.heard))),
            "lost": self.lost,
            "resumes": self._engine.statistics().control_resumes,
        }


def own(engine: TransferEngine, chat: Chat) -> None:
    asker = hear()
    memory = allocate(NBYTES)
    region = engine.register(memory)
    key = engine.offer(region, to=asker["name"], access=Access.WRITE | Access.READ)
    say(key=key.encode().hex())
    final = hear()
    if final.get("chat"):
        chat.start(asker["name"])
        final = hear()
        while "until_resumes" in final:
            chat.await_resumes(final["until_resumes"])
            say(resumed=True)
            final = hear()
        chat.is_lost.wait(final.get("until_lost_s", 0.0))
        chat.stop()
        say(stopped=True, said=chat.num_said)
        final = hear()
        chat.await_heard(final.get("until_heard", 0))
    torch.manual_seed(final["seed"])
    expected = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    say(
        equal=torch.equal(expected, memory.tensor),
        immediates=engine.statistics().immediates_received,
        chat=chat.report(),
    )


def ask(engine: TransferEngine, chat: Chat, options: dict[str, Any]) -> None:
    """Write for so many seconds, and on until all rails are healthy if that is asked for."""
    seconds, chats = options["seconds"], options.get("chats", False)
    latest = seconds + options.get("healthy_within_s", 0.0)
    owner = hear()
    engine.connect(owner["address"])
    if chats:
        chat.start(owner["name"])
    key = RegionKey.decode(bytes.fromhex(owner["key"]))
    torch.manual_seed(options["seed"])
    source = engine.register(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8))
    under_way: deque[Transfer] = deque()
    ended, errors, posted = [], [], 0
    start = time.monotonic()

    def note() -> None:
        ended.append(time.monotonic() - start)

    def goes_on() -> bool:
        spent_s = time.monotonic() - start
        if chat.lost or errors or spent_s >= latest:
            return False
        return spent_s < seconds or any(r.state != "healthy" for r in engine.statistics().rails)

    say(started=True)
    while under_way or goes_on():
        while len(under_way) < OUTSTANDING and goes_on():
            # Pieces of a megabyte: each ends by itself, so a stall of a single one is seen.
            offset = posted * (1 << 20) % NBYTES
            try:
                transfer = engine.write(owner["name"], source, key, offset, offset, 1 << 20,
                                        immediate=7, priority=Priority.WEIGHTS)  # fmt: skip
            except PeerLost as error:
                errors.append(repr(error))  # only what is under way is left
                break
            transfer.when_done(note)
            under_way.append(transfer)
            posted += 1
        if not under_way:
            continue
        try:
            under_way.popleft().wait()
        except TransferError as error:
            errors.append(repr(error))
    chat.stop()
    gaps = [b - a for a, b in zip([0.0, *ended], ended, strict=False)]
    rails = [
        {"rail": r.rail, "state": r.state, "bytes": r.bytes, "failures": r.failures,
         "retries": r.retries, "at": r.bandwidth}
        for r in engine.statistics().rails
    ]  # fmt: skip
    say(posted=posted, errors=errors, longest_gap_s=max(gaps), rails=rails, ended=len(ended))
    if chats:
        final = hear()  # until the other one has stopped to talk, and all has come
        chat.await_heard(final.get("until_heard", 0))
        chat.is_lost.wait(final.get("until_lost_s", 0.0))
        say(chat=chat.report())


def compare(engine: TransferEngine, seconds: float, message_bytes: int) -> None:
    """Time messages of a dispatcher's size, in quiet and beside bulk that saturates the rails."""
    owner = hear()
    engine.connect(owner["address"])
    key = RegionKey.decode(bytes.fromhex(owner["key"]))
    source = engine.register(allocate(NBYTES))
    say(started=True)

    def bytes_done() -> int:
        return sum(rail.bytes for rail in engine.statistics().rails)

    def time_messages() -> tuple[list[float], list[int]]:
        """How long each took, and how many bytes of other transfers were done meanwhile."""
        took, passed = [], []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done = bytes_done()
            begin = time.perf_counter()
            engine.write(owner["name"], source, key, 0, 0, message_bytes, immediate=1,
                         priority=Priority.ACTIVATIONS).wait()  # fmt: skip
            took.append(time.perf_counter() - begin)
            passed.append(bytes_done() - done - message_bytes)
            time.sleep(0.002)
        return sorted(took), sorted(passed)

    stop = threading.Event()
    moved = [0]

    def saturate() -> None:
        under_way: deque[Transfer] = deque()
        while not stop.is_set():
            under_way.append(engine.write(owner["name"], source, key, 0, 0, NBYTES,
                                          priority=Priority.WEIGHTS))  # fmt: skip
            if len(under_way) >= OUTSTANDING:
                under_way.popleft().wait()
                moved[0] += NBYTES
        for transfer in under_way:
            transfer.wait()

    time_messages()
    quiet, _ = time_messages()
    bulk = threading.Thread(target=saturate)
    bulk.start()
    try:
        beside, passed = time_messages()
        bulk_bytes = moved[0]
    finally:
        stop.set()
        bulk.join()
    say(**{
        f"{name}_{which}_us": round(took[int(len(took) * part)] * 1e6, 1)
        for name, took in (("quiet", quiet), ("beside", beside))
        for which, part in (("p50", 0.5), ("p99", 0.99))
    }, count=len(beside), bulk_bytes=bulk_bytes, passed_p50=passed[len(passed) // 2])  # fmt: skip


def main() -> None:
    options = json.loads(sys.argv[1])
    rails = tuple(options["rails"])
    config = TransferConfig(backend=TransferBackend.TCP, host=rails[0], rails=rails)
    engine = TransferEngine(config, name=options["name"], secret=b"of this test")
    chat = Chat(engine)
    with engine:
        say(name=engine.name, address=engine.address)
        if options["role"] == "owner":
            own(engine, chat)
        elif options["role"] == "compare":
            compare(engine, options["seconds"], options["message_bytes"])
        else:
            ask(engine, chat, options)
        hear()  # stay until the other one is done too


if __name__ == "__main__":
    main()
