"""How large slices are: by what a rail moves in a millisecond or two."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from transfer.handle import Transfer
from transfer.pieces import Pieces
from transfer.priority import Priority
from transfer.rails.record import SAMPLE_BYTES
from transfer.rails.slices import Operation, Slice, slice_operation
from transfer.rails.spray import SLICE_S, SprayCore
from transfer.wire import SLICE_BYTES, RequestKind

pytestmark = pytest.mark.unit

FAST = SLICE_BYTES / SLICE_S


def core_of(num_rails: int, bandwidth: float | None) -> SprayCore:
    core = SprayCore(num_rails, shares=dict.fromkeys(Priority, 1.0), room=lambda idx, urgent: 8)
    for rail in core.rails:
        core.opened(rail)
        if bandwidth is not None:
            rail.measured, rail.bandwidth, rail.pace = True, bandwidth, bandwidth
    return core


@pytest.mark.parametrize("priority", Priority)
def test_one_rail_has_few_slices_and_fewer_if_it_is_fast(priority: Priority) -> None:
    assert core_of(1, None).slice_bytes(priority) == SLICE_BYTES // 2, "a guess is no measurement"
    assert core_of(1, FAST * 0.9).slice_bytes(priority) == SLICE_BYTES // 2
    assert core_of(1, FAST * 1.1).slice_bytes(priority) == SLICE_BYTES


def test_several_rails_share_what_takes_a_moment() -> None:
    core = core_of(2, FAST / 8)
    assert core.slice_bytes(Priority.KV_PUT) == SLICE_BYTES // 8
    assert core.slice_bytes(Priority.WEIGHTS) == SLICE_BYTES // 2
    assert core_of(2, FAST * 100).slice_bytes(Priority.WEIGHTS) == SLICE_BYTES


def one_slice(priority: Priority, nbytes: int) -> Slice:
    handle = Transfer(
        peer="peer", operation="write", backend="tcp", nbytes=nbytes,
        deadline=time.monotonic() + 60,
    )  # fmt: skip
    operation = Operation(
        kind=RequestKind.WRITE, handle=handle, token=b"", region=None, immediate=None,
        priority=priority,
    )  # fmt: skip
    zero, whole = np.zeros(1, np.int64), np.array([nbytes], np.int64)
    pieces = Pieces(source_offsets=zero, target_offsets=zero, lengths=whole)
    slice_operation(operation, pieces, slice_bytes=nbytes, slice_pieces=1)
    return operation.slices[0]


def move(core: SprayCore, priority: Priority, nbytes: int, begin: float, end: float) -> None:
    """One slice over the first rail."""
    part = one_slice(priority, nbytes)
    core.rails[0].post(part, begin)
    core.complete(part, core.rails[0], end)


def test_what_bulk_had_beside_urgent_traffic_makes_its_slices_no_shorter() -> None:
    core, now = core_of(2, FAST * 2), 100.0
    for _ in range(random.randrange(30, 60)):
        core.books.urgent_at = now + 0.04
        move(core, Priority.WEIGHTS, SAMPLE_BYTES, now, now + 0.05)
        now += 0.05
    assert core.rails[0].bandwidth < FAST / 10, "it was measured"
    assert core.rails[0].pace == FAST * 2
    core.rails[1].pace = core.rails[1].bandwidth = FAST / 100
    assert core.slice_bytes(Priority.WEIGHTS) == SLICE_BYTES
    assert core.slice_bytes(Priority.KV_PUT) < SLICE_BYTES // 4
    now += 1.0
    for _ in range(40):  # it is slow without them too
        move(core, Priority.WEIGHTS, SAMPLE_BYTES, now, now + 0.05)
        now += 0.05
    assert core.rails[0].pace < FAST / 10
    assert core.slice_bytes(Priority.WEIGHTS) < SLICE_BYTES


def test_a_rail_that_is_faster_than_thought_has_longer_slices_at_once() -> None:
    core, now = core_of(2, FAST / 100), 100.0
    before = core.slice_bytes(Priority.WEIGHTS)
    for _ in range(10):
        core.books.urgent_at = now
        move(core, Priority.WEIGHTS, SLICE_BYTES, now, now + 2 * SLICE_S)
        now += 2 * SLICE_S
    assert core.slice_bytes(Priority.WEIGHTS) > before
