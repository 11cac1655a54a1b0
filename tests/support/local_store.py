"""A membership store in this process, with the semantics of the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from elastic.errors import StoreKeyMissing
from elastic.view import Member, View


class LocalStore:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.record: bytes | None = None
        self.history: list[View] = []
        self.members: dict[int, Member] = {}
        self.ended: dict[str, str] = {}
        self.values: dict[str, bytes] = {}
        self.slots: dict[int, str] = {}

    def read(self) -> View | None:
        return None if self.record is None else View.decode(self.record)

    def compare_and_set(self, expected_epoch: int, view: View) -> View:
        with self.lock:
            current = self.read()
            if (0 if current is None else current.epoch) == expected_epoch:
                self.record = view.encode()
                self.history.append(view)
            found = self.read()
            assert found is not None
            return found

    def register(self, member: Member) -> None:
        with self.lock:
            self.members[member.rank] = member

    def registrations(self) -> dict[int, Member]:
        with self.lock:
            return dict(sorted(self.members.items()))

    def claim_slot(self, node: str, local_rank: int, prefer: int) -> int:
        with self.lock:
            slot = prefer
            while self.slots.setdefault(slot, f"{node}/{local_rank}") != f"{node}/{local_rank}":
                slot += 1
            return slot

    def report_exit(self, incarnation: str, how: str) -> None:
        self.ended[incarnation] = how

    def exits(self, incarnations: Iterable[str]) -> dict[str, str]:
        return {name: self.ended[name] for name in incarnations if name in self.ended}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str, *, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while key not in self.values:
            if time.monotonic() > deadline:
                raise StoreKeyMissing(key=key, waited_s=timeout_s)
            time.sleep(0.005)
        return self.values[key]

    def close(self) -> None:
        pass
