"""A request that concerns one master, taken apart for whoever sends it without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from kvstore.errors import MasterUnavailable
from kvstore.wire import messages as m
from transfer.control import read_reply
from transfer.errors import ControlError

if TYPE_CHECKING:
    from kvstore.shards.plan import Merge, Merged
    from kvstore.wire.envelope import Answer
    from kvstore.wire.standing import MasterRecord, MasterStanding


@dataclass(frozen=True, slots=True)
class NearQuestion:
    """One request and what its answer is judged by.

    Attributes:
        payload: What to send.
        record: To whom.
        is_patient: It may be sent again, within its deadline, if nothing is answered.
    """

    payload: bytes
    record: MasterRecord
    is_patient: bool
    _operation: str
    _standing: MasterStanding
    _merge: Merge | None

    @classmethod
    def ask(
        cls, part: m.Request, standing: MasterStanding, merge: Merge | None, *, patient: bool
    ) -> Self | None:
        """Return it; None if there is nobody to ask at once."""
        operation = type(part).__name__
        try:
            record = standing.admit(operation, patient=patient)
        except MasterUnavailable:
            return None  # whoever may wait finds out
        return cls(m.encode(part), record, patient, operation, standing, merge)

    def read(
        self, reply: bytes | ControlError, *, again: bool = False
    ) -> tuple[Answer, Merged | None]:
        """Judge what came back. Arguments and errors: as of `MasterStanding.read`."""
        found: bytes | ControlError = reply
        if isinstance(reply, bytes):
            try:
                found = read_reply(reply, self.record.address)
            except ControlError as error:
                found = error
        answer = self._standing.read(self._operation, self.record, found, again=again)
        if self._merge is None:
            return answer, None
        merged = self._merge([answer.reply])
        return replace(answer, reply=merged.reply), merged
