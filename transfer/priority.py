"""Classes of traffic: who may delay whom on rails that all of them share."""

from __future__ import annotations

from enum import IntEnum

from configs.schema import TransferConfig


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
