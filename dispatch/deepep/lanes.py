"""The dispatchers behind a buffer, one for each set of sizes, with two exchanges in flight."""

from __future__ import annotations

from dispatch.deepep.carriers import Carrier
from dispatch.dispatcher import Dispatcher
from dispatch.errors import CallOrder
from dispatch.layout import DispatchLayout

LAYOUTS_MAX = 16


class Lane:
    """A dispatcher whose two microbatches are used in turns, in a pass that never ends.

    Attributes:
        dispatcher: In its pass.
        turn: The microbatch of the next dispatch.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.turn = 0
        dispatcher.begin_pass()

    def advance(self) -> None:
        """A dispatch was accepted; the other microbatch is next. The same turns on all ranks."""
        self.turn ^= 1


class Lanes:
    """Makes lanes at the first use of their sizes, and closes them. Owns the dispatchers."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self._lanes: dict[DispatchLayout, Lane] = {}

    def of(self, layout: DispatchLayout) -> Lane:
        """Return the lane for these sizes.

        Raises:
            CallOrder: There are `LAYOUTS_MAX` already.
        """
        lane = self._lanes.get(layout)
        if lane is None:
            if len(self._lanes) >= LAYOUTS_MAX:
                raise CallOrder(call="other sizes", state=f"{LAYOUTS_MAX} are in use: destroy()")
            lane = self._lanes[layout] = Lane(self.carrier.dispatcher(layout))
        return lane

    def close(self) -> None:
        """Free all memory. Idempotent."""
        for lane in self._lanes.values():
            self.carrier.close(lane.dispatcher)
        self._lanes.clear()

    def experts(self, num_experts: int, rank: int) -> range:
        """Return the experts of a rank: runs as equal as they can be, the longer ones first."""
        share, left_over = divmod(num_experts, self.carrier.size)
        begin = rank * share + min(rank, left_over)
        return range(begin, begin + share + (rank < left_over))
