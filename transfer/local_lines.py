"""A caller's connections to the servers of its own host, several of which are asked at once.

    request(calls) ─▶ each: a line that nobody uses, or a new one ─▶ sent ┐
                      all are sent ─▶ wait for each reply in turn        ◀┘ ─▶ lines are kept
                      no server of this host: the caller goes by ZeroMQ

As `transfer.control.RpcClient` has it for one server, except that callers need not take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from transfer.errors import ControlError, RpcTimeout
from transfer.local_rpc import Line, find_line

LOOK_AGAIN_S: Final = 1.0  # how often a server that is not of this host is looked for
KEPT_MAX: Final = 8  # idle connections to one server
TAKEN_S: Final = 0.1  # a server that takes a request no sooner is asked by ZeroMQ
GRACE_S: Final = 0.005


class LocalLines:
    """Thread-safe.

    Args:
        secret: The cluster secret.
        identity: Name of this end.
        nbytes_max: Of a reply.
    """

    def __init__(self, secret: bytes, *, identity: str, nbytes_max: int) -> None:
        self._secret = secret
        self._identity = identity
        self._nbytes_max = nbytes_max
        self._lock = threading.Lock()
        self._idle: dict[str, list[Line]] = {}
        self._look_at_s: dict[str, float] = {}  # where none was found
        self._closed = False

    def request(
        self,
        calls: Sequence[tuple[str, bytes]],
        timeout_s: float,
        others: Callable[[list[int]], None],
    ) -> dict[int, bytes | ControlError]:
        """Send each (address, request) that is for a server of this host, and wait for the replies.

        Args:
            calls: To any servers.
            timeout_s: For all of them together.
            others: Called once all are sent, with the indices of the calls that are for other
                hosts, if there are any; must not wait.

        Returns:
            By index, a reply as `read_reply` takes it, or what went wrong: RpcTimeout, or
            ControlError if the server ended.
        """
        deadline_s = time.monotonic() + timeout_s
        replies: dict[int, bytes | ControlError] = {}
        begun: dict[int, Line] = {}
        try:
            for idx, (address, payload) in enumerate(calls):
                line = self._begin(address, payload, deadline_s)
                if line is not None:
                    begun[idx] = line
            if len(begun) < len(calls):
                others([idx for idx in range(len(calls)) if idx not in begun])
            for idx in tuple(begun):
                address = calls[idx][0]
                # What has come while an earlier one was waited for is no less of a reply.
                until_s = max(deadline_s, time.monotonic() + GRACE_S)
                try:
                    replies[idx] = begun[idx].receive(self._nbytes_max, until_s)
                except TimeoutError:
                    replies[idx] = RpcTimeout(address, timeout_s)
                except ControlError as error:
                    replies[idx] = error
                else:
                    self._keep(address, begun.pop(idx))
        finally:
            for line in begun.values():  # of no use any more: a late reply may come
                line.close()
        return replies

    def forget(self, address: str) -> None:
        """Hang up on a server that is not asked any more."""
        with self._lock:
            gone = self._idle.pop(address, [])
            self._look_at_s.pop(address, None)
        for line in gone:
            line.close()

    def close(self) -> None:
        """Hang up on all; what is under way ends by itself. Idempotent."""
        with self._lock:
            self._closed = True
            addresses = list(self._idle)
        for address in addresses:
            self.forget(address)

    def _begin(self, address: str, payload: bytes, deadline_s: float) -> Line | None:
        """Send a request; None if nobody of this host takes it soon, and nothing is handled.

        One that is stopped must not keep others waiting: ZeroMQ waits for it beside them.
        """
        while True:
            with self._lock:
                idle = self._idle.get(address)
                line = idle.pop() if idle else None
            is_new = line is None
            until_s = min(deadline_s, time.monotonic() + TAKEN_S)
            if line is None:
                line = self._find(address, until_s)
            if line is None:
                return None
            sent = False
            try:
                sent = line.send(payload, until_s)
            except TimeoutError:
                return None  # of an incomplete frame nothing is handled
            finally:
                if not sent:
                    line.close()
            if sent:
                return line
            if is_new:
                return None  # it has just gone

    def _keep(self, address: str, line: Line) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            if not self._closed and len(idle) < KEPT_MAX:
                idle.append(line)
                return
        line.close()

    def _find(self, address: str, until_s: float) -> Line | None:
        now = time.monotonic()
        if self._closed or now < self._look_at_s.get(address, 0.0):
            return None
        try:
            line = find_line(address, self._secret, self._identity, until_s)
        except TimeoutError:
            line = None
        if line is None:
            self._look_at_s[address] = now + LOOK_AGAIN_S
        return line
