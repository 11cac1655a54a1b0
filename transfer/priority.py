"""Classes of traffic: who may delay whom on rails that all of them share."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from configs.schema import TransferConfig

# What is no larger is taken for something that somebody waits for.
URGENT_BYTES_MAX: Final = 64 << 10


class Priority(IntEnum):
    """What a transfer is for, the most urgent first.

    Classes share the rails by weight (`TransferConfig.shares`), so none starves. `ACTIVATIONS`
    are latency: they may travel in lanes of their own, and never queue behind the bytes of a
    bulk class that are under way. All others are bulk.
    """

    ACTIVATIONS = 0
    KV_GET = 1
    KV_PUT = 2
    WEIGHTS = 3
    MIGRATION = 4

    @property
    def urgent(self) -> bool:
        """Whether latency counts more than bytes."""
        return self is Priority.ACTIVATIONS


def shares_of(config: TransferConfig) -> dict[Priority, float]:
    """Return the weight of each class."""
    shares = config.shares.model_dump()
    return {priority: float(shares[priority.name.lower()]) for priority in Priority}


def class_of(
    priority: Priority | None, nbytes: int, immediate: int | None, *, write: bool
) -> Priority:
    """Return the class of an operation for which none, or this one, was given.

    Raises:
        TypeError: no priority.
    """
    if priority is not None:
        if type(priority) is not Priority:
            raise TypeError(f"priority must be a Priority, got {type(priority).__name__}")
        return priority
    if immediate is not None or nbytes <= URGENT_BYTES_MAX:
        return Priority.ACTIVATIONS
    return Priority.KV_PUT if write else Priority.KV_GET
