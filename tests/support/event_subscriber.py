"""A subscriber of the store's events that shares no code with the publisher.

python -m tests.support.event_subscriber ENDPOINT REPLAY_ENDPOINT SECRET_HEX_OR_- TOPIC RCVHWM

It reads MessagePack by itself, keeps the set of (key, medium), asks for a replay at its start and
whenever the numbers have a gap, and prints one line of JSON after each message.
"""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import zmq

from transfer.curve import secure_client

REPLAY_MS = 60_000


def unpack(data: bytes) -> Any:
    value, end = _unpack(data, 0)
    assert end == len(data), "bytes left over"
    return value


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    tag = data[at]
    at += 1
    if tag <= 0x7F:
        return tag, at
    if 0x80 <= tag <= 0x8F:
        return _unpack_map(data, at, tag & 0x0F)
    if 0x90 <= tag <= 0x9F:
        return _unpack_array(data, at, tag & 0x0F)
    if 0xA0 <= tag <= 0xBF:
        end = at + (tag & 0x1F)
        return data[at:end].decode(), end
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    if tag in (0xC4, 0xC5, 0xC6):
        size, at = _integer(data, at, 1 << (tag - 0xC4))
        return data[at : at + size], at + size
    if tag == 0xCB:
        return struct.unpack_from(">d", data, at)[0], at + 8
    if 0xCC <= tag <= 0xCF:
        return _integer(data, at, 1 << (tag - 0xCC))
    if tag in (0xDC, 0xDD):
        size, at = _integer(data, at, 2 << (tag - 0xDC))
        return _unpack_array(data, at, size)
    raise ValueError(f"tag {tag:#x} at {at - 1}")


def _integer(data: bytes, at: int, size: int) -> tuple[int, int]:
    return int.from_bytes(data[at : at + size], "big"), at + size


def _unpack_array(data: bytes, at: int, size: int) -> tuple[list[Any], int]:
    found = []
    for _ in range(size):
        value, at = _unpack(data, at)
        found.append(value)
    return found, at


def _unpack_map(data: bytes, at: int, size: int) -> tuple[dict[Any, Any], int]:
    flat, at = _unpack_array(data, at, 2 * size)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at


class Subscriber:
    """The set of blocks that the events add up to."""

    def __init__(self, replay: zmq.Socket[bytes]) -> None:
        self.present: set[tuple[bytes, str]] = set()
        self.last = -1
        self.replays = 0
        self._replay = replay

    def apply(self, payload: bytes) -> None:
        seconds, events, rank = unpack(payload)
        assert seconds > 1.6e9, "not seconds since the epoch"
        assert rank == 0
        for event in events:
            fields = list(event.values()) if isinstance(event, dict) else event
            if fields[0] == "AllBlocksCleared":
                self.present.clear()
            elif fields[0] == "BlockStored":
                assert fields[2:6] == [None, [], 16, None]
                self.present |= {(key, fields[6]) for key in fields[1]}
            elif fields[0] == "BlockRemoved":
                self.present -= {(key, fields[2]) for key in fields[1]}
            else:
                raise ValueError(f"event {fields[0]}")

    def hear(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            return
        if self.last < 0 or number > self.last + 1:
            self.catch_up()
        if number > self.last:
            self.apply(payload)
            self.last = number

    def catch_up(self) -> None:
        self.replays += 1
        self._replay.send_multipart([b"", struct.pack(">Q", self.last + 1)])
        while True:
            assert self._replay.poll(REPLAY_MS), "no end of the replay"
            _, number, payload = self._replay.recv_multipart()
            if number == b"\xff" * 8:
                return
            self.apply(payload)
            self.last = int.from_bytes(number, "big")

    def report(self) -> None:
        held = sorted(f"{medium}:{key.hex()}" for key, medium in self.present)
        line = {"last": self.last, "replays": self.replays, "held": held}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Follow until killed."""
    endpoint, replay_endpoint, secret, topic, hwm = sys.argv[1:]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    live, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for socket, name in ((live, "subscriber"), (replay, "replayer")):
        if secret != "-":
            secure_client(socket, bytes.fromhex(secret), identity=name)
    live.rcvhwm = int(hwm)
    live.setsockopt(zmq.SUBSCRIBE, topic.encode())
    live.connect(endpoint)
    replay.connect(replay_endpoint)
    subscriber = Subscriber(replay)
    subscriber.catch_up()
    subscriber.report()
    while True:
        heard_topic, number, payload = live.recv_multipart()
        assert heard_topic.decode() == topic
        subscriber.hear(int.from_bytes(number, "big"), payload)
        subscriber.report()


if __name__ == "__main__":
    main()
