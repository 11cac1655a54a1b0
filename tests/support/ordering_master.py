"""A store master for nodes: knows everybody, orders what a test says, remembers what it is told."""

from __future__ import annotations

import threading
import time
from collections import deque

from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer, seal
from transfer.control import RpcServer

WAIT_S = 30.0


class OrderingMaster:
    """Copies are ordered with `order`, and their fates are found in `done`, `failed`, `corrupt`."""

    def __init__(self, secret: bytes) -> None:
        self.registered: list[m.Register] = []
        self.bad: list[m.ReportBad] = []
        self.done: list[int] = []
        self.failed: list[int] = []
        self.corrupt: list[int] = []
        self.asked = 0
        self.deaf = False
        self._orders: dict[str, deque[m.Copy]] = {}
        self._changed = threading.Condition()
        self._server = RpcServer(secret, self._handle, host="127.0.0.1", port=0)

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> OrderingMaster:
        self._server.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.close()

    def order(self, node: str, copies: list[m.Copy]) -> None:
        with self._changed:
            self._orders.setdefault(node, deque()).extend(copies)

    def wait_for(self, condition, timeout_s: float = WAIT_S) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), vars(self)

    def wait_ended(self, number: int) -> None:
        self.wait_for(lambda: len(self.done) + len(self.failed) + len(self.corrupt) >= number)

    def _handle(self, identity: str, payload: bytes) -> bytes:
        request = m.decode_request(payload)
        if self.deaf and isinstance(request, m.NextCopies | m.ReportBad):
            time.sleep(0.1)
            return b"?"
        with self._changed:
            reply = self._answer(request)
            self._changed.notify_all()
        return seal(Answer(reply=reply))

    def _answer(self, request: m.Request) -> m.Reply:
        match request:
            case m.Register():
                self.registered.append(request)
                return m.Registered(len(request.held.keys))
            case m.Heartbeat():
                return m.Known(True, bool(self._orders.get(request.node)))
            case m.ReportBad():
                self.bad.append(request)
                return m.Done(len(request.keys))
            case m.NextCopies():
                self.asked += 1
                self.done += request.done
                self.failed += request.failed
                self.corrupt += request.corrupt
                orders = self._orders.setdefault(request.node, deque())
                count = min(len(orders), request.limit)
                return m.Copies([orders.popleft() for _ in range(count)])
        return m.Done(1)
