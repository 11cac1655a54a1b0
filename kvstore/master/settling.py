"""When places that an earlier master gave out are certainly not written any more.

A segment to which somebody had access when its node registered is not placed into for as long as a
put may take (`Segment.placeable_s`), unless its node says sooner that all writers are at rest, or
those of which it does not know it are certainly dead.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.master.books.catalog import Catalog
from kvstore.master.transition import Transition
from kvstore.wire import messages as m

DEAD_MAX: Final = 1 << 14  # incarnations kept in mind


class Settling:
    """See `MasterPart`.

    Args:
        catalog: The pool's books.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._waiting: dict[tuple[str, int], set[str]] = {}  # segment -> who may still write
        self._dead: OrderedDict[str, None] = OrderedDict()

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {m.Settled: self._settled}

    def advance(self, now: float) -> float:
        """Forget whom nobody waits for any more; nothing is ever due."""
        if self._waiting:
            self._waiting = {
                where: names for where, names in self._waiting.items() if self._is_shut(where, now)
            }
        return math.inf

    def confirm_dead(self, incarnations: Iterable[str], now: float) -> None:
        """These certainly run no more."""
        for name in incarnations:
            self._dead[name] = None
            self._dead.move_to_end(name)
        while len(self._dead) > DEAD_MAX:
            self._dead.popitem(last=False)
        for where in list(self._waiting):
            self._judge(where, now)

    def settled_s(self) -> float:
        """Return when all segments can be used, at the latest."""
        return max((segment.placeable_s for segment in self._catalog.pool), default=0.0)

    def _settled(self, request: m.Settled, now: float) -> m.Reply:
        where = request.node, request.segment
        if not self._is_shut(where, now):
            return m.Done(0)
        self._waiting[where] = set(request.waiting)
        self._judge(where, now)
        return m.Done(int(not self._is_shut(where, now)))

    def _judge(self, where: tuple[str, int], now: float) -> None:
        segment = self._catalog.pool.find(*where)
        if segment is not None and self._waiting[where] <= self._dead.keys():
            segment.placeable_s = min(segment.placeable_s, now)
            del self._waiting[where]

    def _is_shut(self, where: tuple[str, int], now: float) -> bool:
        segment = self._catalog.pool.find(*where)
        return segment is not None and segment.placeable_s > now
