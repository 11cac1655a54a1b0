"""What a failed completion tells, in words and as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from transfer.backends.verbs.binding import enums
from transfer.rails.rail import RailName

_NAMES: Final = {
    int(getattr(enums, name)): name.removeprefix("IBV_WC_").lower()
    for name in dir(enums)
    if name.startswith("IBV_WC_") and (name.endswith("_ERR") or name == "IBV_WC_SUCCESS")
}
_MEANINGS: Final = {
    "retry_exc_err": "no acknowledgement from the other side",
    "rnr_retry_exc_err": "the other side has posted no receives",
    "rem_access_err": "the other side's card refused the access",
    "rem_inv_req_err": "the other side's card does not take such requests",
    "rem_op_err": "the other side's card failed",
    "loc_prot_err": "our memory is not registered for this",
    "wr_flush_err": "given up, because the queue pair had failed before",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailure:
    """A work request that failed.

    Attributes:
        rail: which way it went.
        status: libibverbs' number, `name` its name.
        vendor_error: the card's own number, for its maker.
        operation: "write" or "read".
    """

    rail: RailName
    status: int
    vendor_error: int
    operation: str

    @property
    def name(self) -> str:
        """The status as libibverbs calls it."""
        return _NAMES.get(self.status, "unknown status")

    def __str__(self) -> str:
        meaning = _MEANINGS.get(self.name, "the request failed")
        return (
            f"{self.operation} failed: {meaning}"
            f" ({self.name}, status {self.status}, vendor error {self.vendor_error:#x})"
        )


def failure_of(completion: Any, rail: RailName, operation: str) -> WorkFailure:
    """Decode a completion that is no success."""
    return WorkFailure(
        rail=rail,
        status=int(completion.status),
        vendor_error=int(completion.vendor_err),
        operation=operation,
    )
