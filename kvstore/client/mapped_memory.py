"""Memory of nodes, for reading what lies there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.client.steps import Steps, reach, settle
from kvstore.errors import NodeUnreachable
from kvstore.wire.messages import Medium, NodeAddress
from transfer import TransferError

if TYPE_CHECKING:
    from kvstore.client.segment_keys import SegmentKeys

logger = logging.getLogger(__name__)


def memory_of(
    segments: SegmentKeys, where: NodeAddress, offset: int, deadline_s: float
) -> Steps[NDArray[np.uint8] | None]:
    """Return a segment's memory; None if it cannot be mapped here, or its node is not reached.

    Args:
        segments: Keys.
        where: Which segment.
        offset: Of a byte in it.
        deadline_s: Of the monotonic clock.
    """
    memory = segments.memory(where)
    if memory is not None or where.medium is not Medium.DRAM:
        return memory
    try:
        key = segments.known(where)
        if key is None:
            key = yield from reach(where, deadline_s)
        transfer = segments.map(where, key, offset)
        if transfer is not None:
            yield from settle(transfer)
    except (NodeUnreachable, TransferError) as error:  # a copy finds out what is wrong
        logger.debug("%s is not mapped: %s", where.node, error)
        return None
    return segments.memory(where)
