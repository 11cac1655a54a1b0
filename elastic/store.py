"""The membership store: one view record changed only by compare-and-set, and small values.

`MembershipStore` is what the rest of the package needs; `TCPStoreMembership` keeps it in a
`torch.distributed.TCPStore`. Keys:

    view                    the view record (JSON)
    slot/<rank>             who claimed the slot: "<node>/<local rank>"
    claim/<node>/<local>    the slot that this place claimed earlier
    member/<rank>           newest registration of the slot (JSON)
    members                 ranks that ever registered: ",0,1,0..."
    exit/<incarnation>      how that process ended, written by the agent that reaped it
    value/<key>             small values of others: addresses of the front and of the store master

A TCPStore client call to a stopped server blocks for good: its timeout only covers waiting for
keys. So each call runs on a thread of its own client (`_Lane`), the caller waits for it with a
deadline, and a client that missed a deadline is left behind and replaced.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from elastic.errors import StoreKeyMissing, StoreUnavailable
from elastic.view import Member, View

T = TypeVar("T")

POLL_INTERVAL_S = 0.01
RECONNECT_INTERVAL_S = 0.1
# Of an operation's deadline: what is known about the connection must be told before it is over.
CONNECT_SHARE = 0.8
LANE_QUEUE_MAX = 64
SLOTS_MAX = 4096


class KeyValues(Protocol):
    """What is used of a `torch.distributed.TCPStore` client."""

    @property
    def port(self) -> int:
        """Port of the server."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; waits for it if it is not there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Change `expected` ("": nothing) to `desired`; return what is stored now."""

    def append(self, key: str, value: str, /) -> None:
        """Append to a value."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return several values."""


class MembershipStore(Protocol):
    """Where views, registrations and small values live. Implementations are thread-safe.

    A place (node and local rank) gets the slot it prefers or the next free one, and keeps it.

    Every method raises `StoreUnavailable` when the store does not answer in time; whether a
    change was made is then unknown, which is harmless: all changes are idempotent or compared.
    """

    def read(self) -> View | None:
        """Return the committed view, None before the first."""

    def compare_and_set(self, expected_epoch: int, view: View) -> View:
        """Store `view` if the record's epoch is `expected_epoch` (0: if there is no record).

        Returns:
            The view that is stored now; the caller won if it equals `view`.
        """

    def register(self, member: Member) -> None:
        """Make `member` the newest registration of its slot."""

    def registrations(self) -> dict[int, Member]:
        """Return the newest registration of every slot that ever had one."""

    def claim_slot(self, node: str, local_rank: int, prefer: int) -> int:
        """Return the slot of this place, the same at every call."""

    def report_exit(self, incarnation: str, how: str) -> None:
        """Record that the process of this incarnation has ended for certain."""

    def exits(self, incarnations: Iterable[str]) -> dict[str, str]:
        """Return how those of `incarnations` ended that are known to have ended."""

    def put(self, key: str, value: bytes) -> None:
        """Store a small value."""

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """Return a value, waiting for it up to `timeout_s`.

        Raises:
            StoreKeyMissing: Nothing was put before the deadline.
        """

    def close(self) -> None:
        """Let go of connections and threads."""


class TCPStoreMembership:
    """A `MembershipStore` in a TCPStore. Thread-safe.

    Args:
        host: Address of the server.
        port: Its port; 0 lets the server pick one (see `port`).
        is_master: Whether this process serves the store. It then must outlive all others.
        timeout_s: Deadline of one operation, connecting included.
    """

    def __init__(
        self, host: str, port: int = 0, *, is_master: bool = False, timeout_s: float = 10.0
    ) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._lane: _Lane | None = None
        self._server: KeyValues | None = None
        self._known: tuple[str, View | None] = ("", None)  # the record as last seen
        if is_master:
            self._server = _serve(host, port, timeout_s)
            port = self._server.port
        self.port = port

    def close(self) -> None:
        """Let go of the client, and of the server if this process has it. Idempotent."""
        with self._lock:
            lane, self._lane, self._server = self._lane, None, None
        if lane is not None:
            lane.close()

    def read(self) -> View | None:
        """Return the committed view, None before the first."""
        text = self._call("read", lambda store: _get_text(store, "view"))
        return self._remember(text) if text else None

    def compare_and_set(self, expected_epoch: int, view: View) -> View:
        """Store `view` if the record's epoch is `expected_epoch`; return what is stored now."""
        if view.epoch != expected_epoch + 1:
            raise ValueError(f"epoch {view.epoch} does not follow {expected_epoch}")
        text, known = self._known
        if known is not None and known.epoch != expected_epoch:
            self.read()
            text, known = self._known  # a pair: another thread may have read a newer one
            if known is not None and known.epoch != expected_epoch:
                return known
        if (0 if known is None else known.epoch) != expected_epoch:
            problem = f"no view record, expected epoch {expected_epoch}"
            raise StoreUnavailable(operation="compare_and_set", problem=problem)
        desired = view.encode().decode()
        found = self._call(
            "compare_and_set", lambda store: store.compare_set("view", text, desired)
        )
        return self._remember(bytes(found).decode())

    def register(self, member: Member) -> None:
        """Make `member` the newest registration of its slot."""

        def write(store: KeyValues) -> None:
            store.set(f"member/{member.rank}", member.encode().decode())
            store.append("members", f",{member.rank}")

        self._call("register", write)

    def registrations(self) -> dict[int, Member]:
        """Return the newest registration of every slot that ever had one."""

        def collect(store: KeyValues) -> list[bytes]:
            listed = _get_text(store, "members").split(",")
            keys = [f"member/{rank}" for rank in sorted(set(listed) - {""})]
            return list(store.multi_get(keys)) if keys else []

        members = (Member.decode(bytes(raw)) for raw in self._call("registrations", collect))
        return {member.rank: member for member in sorted(members, key=lambda m: m.rank)}

    def claim_slot(self, node: str, local_rank: int, prefer: int) -> int:
        """Return the slot of this place; the first claim gets `prefer` or the next free slot."""
        if prefer < 0:
            raise ValueError(f"slot {prefer} is negative")
        place = f"{node}/{local_rank}"

        def claim(store: KeyValues) -> int:
            earlier = _get_text(store, f"claim/{place}")
            if earlier:
                return int(earlier)
            for slot in range(prefer, prefer + SLOTS_MAX):
                owner = bytes(store.compare_set(f"slot/{slot}", "", place)).decode()
                if owner == place:
                    store.set(f"claim/{place}", str(slot))
                    return slot
            raise StoreUnavailable(operation="claim_slot", problem=f"{SLOTS_MAX} slots are taken")

        return self._call("claim_slot", claim)

    def report_exit(self, incarnation: str, how: str) -> None:
        """Record that the process of this incarnation has ended for certain."""
        self._call("report_exit", lambda store: store.set(f"exit/{incarnation}", how))

    def exits(self, incarnations: Iterable[str]) -> dict[str, str]:
        """Return how those of `incarnations` ended that are known to have ended."""
        wanted = tuple(incarnations)

        def collect(store: KeyValues) -> dict[str, str]:
            found = {name: _get_text(store, f"exit/{name}") for name in wanted}
            return {name: how for name, how in found.items() if how}

        return self._call("exits", collect)

    def put(self, key: str, value: bytes) -> None:
        """Store a small value."""
        self._call("put", lambda store: store.set(f"value/{key}", "=" + value.hex()))

    def get(self, key: str, *, timeout_s: float) -> bytes:
        """Return a value, waiting for it up to `timeout_s` seconds.

        Raises:
            StoreKeyMissing: Nothing was put before the deadline.
            StoreUnavailable: The store does not answer.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # Asked again and again rather than waited for, so that other threads get their turn.
            text = self._call("get", lambda store: _get_text(store, f"value/{key}"))
            if text:
                return bytes.fromhex(text[1:])  # the "=" tells an empty value from none
            if time.monotonic() >= deadline:
                raise StoreKeyMissing(key=key, waited_s=timeout_s)
            time.sleep(POLL_INTERVAL_S)

    def _remember(self, text: str) -> View:
        known_text, view = self._known
        if view is None or text != known_text:
            view = View.decode(text.encode())
            self._known = (text, view)  # one assignment: other threads see a pair that belongs
        return view

    def _call(self, operation: str, work: Callable[[KeyValues], T]) -> T:
        with self._lock:
            lane = self._lane
            if lane is None or lane.broken:
                lane = self._lane = _Lane(self._connect)
        return lane.call(operation, work, self._timeout_s)

    def _connect(self) -> KeyValues:
        # Asked first in our own way: of a missing server the library logs pages.
        _wait_for_server(self._host, self.port, CONNECT_SHARE * self._timeout_s)
        return _tcp_store(self._host, self.port, self._timeout_s, serve=False)


def _tcp_store(host: str, port: int, timeout_s: float, *, serve: bool) -> KeyValues:
    # Made by hand: under torchrun, init_process_group would make every such store a client.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=serve,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    return cast("KeyValues", store)


def _serve(host: str, port: int, timeout_s: float) -> KeyValues:
    try:
        return _tcp_store(host, port, timeout_s, serve=True)
    except RuntimeError as error:
        raise StoreUnavailable(operation="serve", problem=_first_line(error)) from error


def _wait_for_server(host: str, port: int, timeout_s: float) -> None:
    """Return once something listens there.

    Raises:
        RuntimeError: Nothing did before the deadline.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(deadline - time.monotonic(), POLL_INTERVAL_S)
        try:
            socket.create_connection((host, port), timeout=left_s).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                problem = f"no answer from {host}:{port}: {error.strerror or error}"
                raise RuntimeError(problem) from error
            time.sleep(RECONNECT_INTERVAL_S)
        else:
            return


def _get_text(store: KeyValues, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _first_line(error: BaseException) -> str:
    # The C++ layer appends its own stack to the message.
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Call:
    __slots__ = ("done", "error", "result", "work")

    def __init__(self, work: Callable[[KeyValues], Any]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class _Lane:
    """One client connection and the daemon thread that may block in it."""

    def __init__(self, connect: Callable[[], KeyValues]) -> None:
        self._connect = connect
        self._calls: queue.Queue[_Call | None] = queue.Queue(maxsize=LANE_QUEUE_MAX)
        self.broken = False
        self._thread = threading.Thread(target=self._run, name="membership-store", daemon=True)
        self._thread.start()

    def call(self, operation: str, work: Callable[[KeyValues], T], timeout_s: float) -> T:
        call = _Call(work)
        try:
            self._calls.put(call, timeout=timeout_s)
        except queue.Full:
            self.broken = True
            raise StoreUnavailable(operation=operation, problem="too many calls wait") from None
        if not call.done.wait(timeout_s):
            self.broken = True  # the thread is stuck in the client: nobody may queue behind it
            raise StoreUnavailable(operation=operation, problem=f"no answer in {timeout_s:.3g} s")
        if isinstance(call.error, RuntimeError):  # torch's DistError and its children
            self.broken = True
            self.close()
            problem = _first_line(call.error)
            raise StoreUnavailable(operation=operation, problem=problem) from call.error
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def close(self) -> None:
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            return  # stuck for good; the daemon thread goes with the process
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        store: KeyValues | None = None
        while (call := self._calls.get()) is not None:
            try:
                if store is None:
                    store = self._connect()
                call.result = call.work(store)
            except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
                call.error = error
            call.done.set()
