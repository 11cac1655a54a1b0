"""What one end knows of the master of a shard: where it is, its term, whether it answers."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kvstore.errors import Fenced, MasterRefused, MasterUnavailable, StoreClosed
from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer, EnvelopeMalformed, unseal
from transfer.control import ClientClosed
from transfer.errors import RpcTimeout, TransferError

COOL_S_MAX: Final = 1.0
SHORT_BYTES: Final = 96  # of a reply that may well be the same again


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterRecord:
    """The master of one shard. `address` is "" while nobody is known to lead it."""

    shard: int = 0
    address: str = ""
    term: int = 0


class MasterStanding:
    """Follows one shard's master through its successors. Thread-safe.

    After a request ran into its deadline, further ones fail at once for a short while: a dead
    master costs every caller one wait, not one wait per request.

    Args:
        record: What is known at first.
        identity: Name of this end.
    """

    def __init__(self, record: MasterRecord, *, identity: str) -> None:
        self._identity = identity
        self._changed = threading.Condition()
        self._record = record
        self._silent_until = 0.0
        self.stale_replies = 0
        self._last = b"", Answer(reply=m.Done(0))

    @property
    def record(self) -> MasterRecord:
        """The master that is asked now."""
        return self._record

    def meet(self, record: MasterRecord) -> bool:
        """Ask this master from now on; False if a later one is known already, or it is the same."""
        with self._changed:
            if record.term < self._record.term or record == self._record:
                return False
            self._record = record
            self._silent_until = 0.0
            self._changed.notify_all()
            return True

    def admit(self, operation: str, *, patient: bool = False) -> MasterRecord:
        """Return whom to ask. Raises MasterUnavailable if that is known to be of no use now."""
        record = self._record
        if not record.address:
            raise _unavailable(operation, record, "nobody is known to lead this shard")
        if self._silent_until and not patient and time.monotonic() < self._silent_until:
            raise _unavailable(operation, record, "did not answer a moment ago")
        return record

    def wait_for_news(self, record: MasterRecord, timeout_s: float) -> None:
        """Wait until another master than this is known, or until the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._record != record, timeout=timeout_s)

    def read(
        self,
        operation: str,
        record: MasterRecord,
        reply: bytes | TransferError,
        *,
        again: bool = False,
    ) -> Answer:
        """Judge what came back from this master.

        Args:
            operation: What was asked.
            record: Whom.
            reply: What was said, or why nothing was.
            again: It is asked again within the same deadline: its silence is not judged yet.

        Raises:
            MasterUnavailable: Nothing, or not from who leads the shard.
            Fenced: This end's incarnation is out of the cluster.
            MasterRefused: The request is not legal.
            StoreClosed: This end was closed.
        """
        last, answer = self._last
        if reply == last and answer.term == self._record.term:
            return answer  # the same bytes mean the same: of a stream of puts nearly all are
        if isinstance(reply, ClientClosed):
            raise StoreClosed(what=f"{self._identity}, way to the store's masters") from reply
        if isinstance(reply, TransferError):
            if isinstance(reply, RpcTimeout) and not again:
                self._found_silent(record, reply.timeout_s)
            raise _unavailable(operation, record, f"{type(reply).__name__}: {reply}") from reply
        try:
            answer = unseal(reply)
        except (EnvelopeMalformed, msgspec.MsgspecError) as error:
            raise _unavailable(operation, record, f"{type(error).__name__}: {error}") from error
        if answer.term != self._record.term:
            self._check_term(operation, record, answer.term)
        if isinstance(answer.reply, m.Refused):
            self._refuse(operation, record, answer.reply)
        if len(reply) <= SHORT_BYTES:
            self._last = reply, answer
        return answer

    def _check_term(self, operation: str, record: MasterRecord, term: int) -> None:
        with self._changed:
            known = self._record
            if term < known.term:
                self.stale_replies += 1
                problem = f"it answers for term {term}, and term {known.term} is known"
                raise _unavailable(operation, record, problem)
            if term > known.term and record.address == known.address:
                self._record = replace(known, term=term)

    def _refuse(self, operation: str, record: MasterRecord, refused: m.Refused) -> None:
        if refused.reason is m.RefusalReason.NOT_LEADING:
            raise _unavailable(operation, record, refused.problem)
        if refused.reason is m.RefusalReason.FENCED:
            raise Fenced(incarnation=self._identity)
        raise MasterRefused(
            operation=operation, problem=refused.problem, reason=str(refused.reason)
        )

    def _found_silent(self, record: MasterRecord, waited_s: float) -> None:
        with self._changed:
            if record == self._record:
                self._silent_until = time.monotonic() + min(COOL_S_MAX, waited_s)


def _unavailable(operation: str, record: MasterRecord, problem: str) -> MasterUnavailable:
    return MasterUnavailable(operation=operation, address=record.address, problem=problem)
