"""A client's or node's way to one store master: typed requests, deadlines, no repeated waiting."""

from __future__ import annotations

import threading
import time
from typing import Final, TypeVar

from kvstore.errors import MasterRefused, MasterUnavailable
from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer
from kvstore.wire.standing import MasterRecord, MasterStanding
from transfer.control import ClientClosed, RpcClient
from transfer.errors import TransferError

ReplyT = TypeVar("ReplyT", bound=m.Reply)
PAUSE_S: Final = 0.05
ATTEMPT_S: Final = 1.0  # first attempt of a patient request; each later one is twice as long


class MasterLink:
    """Requests to one master. Thread-safe.

    Args:
        address: The master's address.
        secret: The cluster secret.
        identity: Name of this end, unique among all links to the master.
        timeout_s: Deadline of a request that names none.
    """

    def __init__(self, address: str, *, secret: bytes, identity: str, timeout_s: float) -> None:
        self._secret = secret
        self._identity = identity
        self._timeout_s = timeout_s
        self.standing = MasterStanding(MasterRecord(address=address), identity=identity)
        self._rpc = RpcClient(address, secret, identity=identity)
        self._lock = threading.Lock()  # `redirect`: of the record and the way there

    @property
    def address(self) -> str:
        """Where requests go."""
        return self.standing.record.address

    def redirect(self, address: str, *, term: int = 0) -> None:
        """Send later requests to another master, unless a later one is known already.

        Those under way end by themselves.
        """
        with self._lock:
            if not self.standing.meet(MasterRecord(address=address, term=term)):
                return
            previous = self._rpc
            self._rpc = RpcClient(address, self._secret, identity=self._identity)
        previous.retire()

    def close(self) -> None:
        """Stop asking."""
        self._rpc.close()

    def ask(
        self,
        request: m.Request,
        expected: type[ReplyT],
        *,
        timeout_s: float | None = None,
        patient: bool = False,
    ) -> ReplyT:
        """Send a request and return the reply.

        Args:
            request: Safe to repeat if `patient`.
            expected: Type of the reply.
            timeout_s: Deadline; default: the link's.
            patient: Ask again until the deadline if the master does not answer, or another takes
                its place.

        Raises:
            MasterUnavailable: No answer in time; the request may or may not have been handled.
            Fenced: The sender's incarnation is out of the cluster.
            MasterRefused: The request is not legal.
        """
        answer = self.answer(request, timeout_s=timeout_s, patient=patient)
        return expect(request, answer.reply, expected)

    def answer(
        self, request: m.Request, *, timeout_s: float | None = None, patient: bool = False
    ) -> Answer:
        """Send a request and return what is said. Raises as `ask`."""
        left_s = self._timeout_s if timeout_s is None else timeout_s
        if not patient:
            return self._attempt(request, left_s)
        deadline_s, attempt_s = time.monotonic() + left_s, ATTEMPT_S
        while True:
            asked = self.standing.record
            again, timeout_s = attempt_s < left_s, min(attempt_s, left_s)
            try:
                return self._attempt(request, timeout_s, patient=True, again=again)
            except MasterUnavailable:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise
            self.standing.wait_for_news(asked, min(PAUSE_S, left_s))
            attempt_s *= 2
            left_s = max(0.001, deadline_s - time.monotonic())

    def try_encoded(self, payload: bytes, operation: str, timeout_s: float) -> Answer | None:
        """Send a patient request once; None if it is to be asked again, or of somebody else.

        Raises:
            Fenced, MasterRefused: As `ask`.
        """
        rpc, record = self._rpc, self.standing.record
        if not record.address or rpc.address != record.address:
            return None
        try:
            reply = rpc.request(payload, timeout_s=timeout_s)
            return self.standing.read(operation, record, reply, again=True)
        except (TransferError, MasterUnavailable):
            return None

    def borrow(self, timeout_s: float) -> list[int]:
        """Return descriptors that the master lends: see `RpcClient.borrow`, which raises."""
        return self._rpc.borrow(timeout_s=timeout_s)

    def _attempt(
        self, request: m.Request, timeout_s: float, *, patient: bool = False, again: bool = False
    ) -> Answer:
        operation, payload = type(request).__name__, m.encode(request)
        reply: bytes | TransferError
        while True:
            rpc = self._rpc
            record = self.standing.admit(operation, patient=patient)
            if rpc.address != record.address:  # just being redirected
                with self._lock:
                    rpc, record = self._rpc, self.standing.record
            try:
                reply = rpc.request(payload, timeout_s=timeout_s)
            except ClientClosed as error:
                if rpc is not self._rpc:
                    continue
                reply = error
            except TransferError as error:
                reply = error
            return self.standing.read(operation, record, reply, again=again)


def expect(request: m.Request, reply: m.Reply, expected: type[ReplyT]) -> ReplyT:
    """Return the reply as what it must be. Raises MasterRefused if it is something else."""
    if not isinstance(reply, expected):
        raise MasterRefused(
            operation=type(request).__name__, problem=f"answered {type(reply).__name__}"
        )
    return reply
