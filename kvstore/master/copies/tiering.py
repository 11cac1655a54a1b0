"""What moves between DRAM and SSD, and when.

    free share of a DRAM segment:   0 ──── low ──────── high ──── 1
                                      ▲ below: its next victims go to the SSD, until `high` is free
    a block hit `promotion_hits` times on the SSD comes back to DRAM

    what is put while DRAM is full of what should go there, goes to the SSD itself

So there is nearly always room in DRAM for what is put and promoted, and nothing that the SSD should
have is evicted while it has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from configs.kvstore_policies import Admission, TierPolicy
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.overflow import Overflow
from kvstore.master.books.segment import Segment
from kvstore.master.copies.admission import SsdAdmission
from kvstore.master.copies.copy_order import CopyOrder, Outcome, Purpose
from kvstore.master.copies.copying import Copying
from kvstore.master.copies.promotion import Promotion
from kvstore.wire.messages import Medium, Pin

VICTIMS_PER_STEP: Final = 256
AWAKE_S: Final = 2.0  # since the last demotion, in which a node asks again by itself
AGAIN_S: Final = 0.02  # then


class Tiering:
    """Orders demotions and promotions. Not thread-safe.

    Args:
        policy: The configured one.
        catalog: The pool's books.
        copying: Takes the orders.
    """

    def __init__(self, policy: TierPolicy, catalog: Catalog, copying: Copying) -> None:
        self._policy = policy
        self._catalog = catalog
        self._copying = copying
        self._admission = SsdAdmission(policy.admission, names_max=policy.admission_names)
        self._promotion = Promotion(hits=policy.promotion_hits, window_s=policy.promotion_window_s)
        self._slow: set[int] = set()  # SSD segments
        self._leaving: dict[int, int] = {}  # bytes of a segment that are being demoted
        self._demoted: dict[bytes, int] = {}  # their sizes
        self._last_s: dict[str, float] = {}  # of each node: when something was demoted
        if policy.admission is not Admission.NEVER:
            catalog.pool.overflow = Overflow(policy.overflow_free, self._is_kept)

    @property
    def watches_hits(self) -> bool:
        """Whether `hit` has to be told anything."""
        return bool(self._slow)

    def joined(self, segment: Segment) -> None:
        """A segment came."""
        if segment.medium is Medium.SSD:
            self._slow.add(segment.index)

    def left(self, segment: Segment) -> None:
        """A segment went."""
        self._slow.discard(segment.index)
        self._leaving.pop(segment.index, None)
        self._last_s.pop(segment.node.name, None)

    def hit(self, rows: Sequence[int], now: float) -> None:
        """Copies were given to a reader."""
        table = self._catalog.table
        where, keys, slow = table.segment, table.keys, self._slow
        if self._admission.counts_uses:
            self._admission.used([keys[row] for row in rows])
        for row in rows:
            if where[row] in slow and self._promotion.hit(keys[row], now):
                self._copying.order(
                    CopyOrder(key=keys[row], source=where[row], purpose=Purpose.PROMOTE)
                )

    def ended(self, order: CopyOrder, outcome: Outcome) -> None:
        """Take note of how a demotion ended."""
        del outcome
        space = self._demoted.pop(order.key, 0)
        if order.source in self._leaving:
            self._leaving[order.source] -= space

    def advance(self, now: float) -> None:
        """Order demotions where DRAM is nearly full."""
        for segment in list(self._catalog.pool):
            self._look_at(segment, now)

    def advance_node(self, name: str, now: float) -> float:
        """As `advance`, of one node that asks for work.

        Returns:
            After how many seconds it should ask again if there is none; 0: when it is told.
        """
        node = self._catalog.pool.node(name)
        for segment in list(node.segments.values()) if node is not None else ():
            self._look_at(segment, now)
        return AGAIN_S if now - self._last_s.get(name, -AWAKE_S) < AWAKE_S else 0.0

    def _look_at(self, segment: Segment, now: float) -> None:
        if not self._slow or self._policy.admission is Admission.NEVER:
            return
        if segment.index not in self._slow and segment.is_told and not segment.node.draining:
            self._relieve(segment, now)

    def _relieve(self, segment: Segment, now: float) -> None:
        leaving = self._leaving.get(segment.index, 0)
        if segment.free + leaving >= self._policy.demotion_low * segment.capacity:
            return
        missing = int(self._policy.demotion_high * segment.capacity) - segment.free - leaving
        for _ in range(VICTIMS_PER_STEP):
            row = segment.victim() if missing > 0 else None
            if row is None:
                return
            space = self._catalog.table.space[row]
            if not self._demote(row, segment, now):
                return
            missing -= space

    def _demote(self, row: int, segment: Segment, now: float) -> bool:
        """Let a victim go, to the SSD if it is admitted; False if that must wait."""
        catalog, table = self._catalog, self._catalog.table
        key, space = table.keys[row], table.space[row]
        if not self._is_kept(row):
            catalog.evict(row)
            return True
        order = CopyOrder(key=key, source=segment.index, purpose=Purpose.DEMOTE)
        if not self._copying.order_at_once(order, row, now):
            return False
        self._demoted[key] = space
        self._leaving[segment.index] = self._leaving.get(segment.index, 0) + space
        self._last_s[segment.node.name] = now
        return True

    def _is_kept(self, row: int) -> bool:
        """Tell whether a copy should go to the SSD before it goes from DRAM."""
        table = self._catalog.table
        key = table.keys[row]
        if len(self._catalog.copies(key)) > 1:
            return False
        return table.pin[row] != Pin.NONE or self._admission.admits(key)
