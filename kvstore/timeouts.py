"""What callers say of how long they would wait."""

from __future__ import annotations

from kvstore.errors import InvalidValue
from transfer.arguments import check_timeout as check_seconds


def check_timeout(timeout_s: float | None, name: str = "timeout_s") -> None:
    """Return if it is None (the configured time), or seconds; below zero is no time at all.

    Args:
        timeout_s: What a caller gave.
        name: Of his argument.

    Raises:
        InvalidValue: It is no number, or not one that is ever over.
    """
    if timeout_s is not None:
        try:
            check_seconds(timeout_s, name)
        except (TypeError, ValueError) as error:
            raise InvalidValue(problem=str(error)) from None
