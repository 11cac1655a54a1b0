"""Which blocks are pinned, and until when."""

from __future__ import annotations

from kvstore.master.books.block_index import BlockIndex
from kvstore.master.books.copy_table import CopyTable
from kvstore.master.books.pool import SegmentPool
from kvstore.master.books.soft_pins import SoftPins
from kvstore.master.books.tenants import TenantBook
from kvstore.master.books.untold_pins import UntoldPins
from kvstore.wire.messages import Pin


class Pins:
    """Pins of the committed blocks; all copies of a block are pinned alike. Not thread-safe.

    Args:
        table: The columns of the copies.
        index: The blocks.
        pool: Where the copies are.
        tenants: Whose they are.
        soft_pin_s: How long a soft pin lasts if nobody says.
    """

    def __init__(
        self,
        table: CopyTable,
        index: BlockIndex,
        pool: SegmentPool,
        tenants: TenantBook,
        *,
        soft_pin_s: float,
    ) -> None:
        self._table = table
        self._index = index
        self._pool = pool
        self._tenants = tenants
        self.soft = SoftPins(soft_pin_s)
        self.untold = UntoldPins(table, index, pool)
        self.num_hard = 0

    def enter(self, key: bytes, pin: int, pin_s: float, now: float) -> None:
        """Count the pin of a block that comes."""
        if pin == Pin.HARD:
            self.num_hard += 1
        elif pin == Pin.SOFT:
            self.soft.set(key, pin_s, now)

    def leave(self, key: bytes, pin: int) -> None:
        """Count the pin of a block that went."""
        if pin == Pin.HARD:
            self.num_hard -= 1
        elif pin == Pin.SOFT:
            self.soft.clear(key)

    def set(self, key: bytes, pin: int, pin_s: float, now: float) -> bool:
        """Pin all copies of a block; False if it is not there."""
        first = self._index.rows.get(key)
        if first is None:
            return False
        self.leave(key, self._table.pin[first])
        self.enter(key, pin, pin_s, now)
        for row in self._table.copies(first):
            if self._table.pin[row] != pin:
                if Pin.HARD in (pin, self._table.pin[row]):
                    self.untold.changed(row)
                self._tenants.disorder(row)
                self._pool.of(row).set_pin(row, pin)
                self._tenants.order(row)
        return True

    def strengthen(self, row: int, pin: int, pin_s: float, now: float) -> None:
        """Give a block the stronger of its pin and this one, and of two soft ones the longer."""
        key, before = self._table.keys[row], self._table.pin[row]
        if pin > before:
            self.set(key, pin, pin_s, now)
        elif pin == before == Pin.SOFT:
            self.soft.set(key, pin_s, now, at_least=True)

    def end_soft(self, now: float) -> None:
        """Let blocks be evicted whose soft pins are over."""
        for key in self.soft.due(now):
            self.set(key, Pin.NONE, 0.0, now)
