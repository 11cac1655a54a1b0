"""How large slices are: by what a rail moves in a millisecond or two."""

from __future__ import annotations

import pytest

from transfer.priority import Priority
from transfer.rails.spray import SLICE_S, SprayCore
from transfer.wire import SLICE_BYTES

pytestmark = pytest.mark.unit

FAST = SLICE_BYTES / SLICE_S


def core_of(num_rails: int, bandwidth: float | None) -> SprayCore:
    core = SprayCore(num_rails, shares=dict.fromkeys(Priority, 1.0), room=lambda idx, urgent: 8)
    for rail in core.rails:
        core.opened(rail)
        if bandwidth is not None:
            rail.measured, rail.bandwidth = True, bandwidth
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
