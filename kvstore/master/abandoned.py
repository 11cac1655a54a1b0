"""Puts and places that their writers gave up, because a reply never came or nothing was written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.master.books.catalog import Catalog

REMEMBERED_MAX: Final = 1 << 14


class AbandonedBatches:
    """Ends them, and remembers their numbers: what asks for them may still be on the way.

    Args:
        catalog: The pool's books.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._numbers: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __contains__(self, batch: tuple[str, int]) -> bool:
        """Whether a client's batch of this number was given up."""
        return batch in self._numbers

    def others(self, client: str, numbers: Sequence[int]) -> Sequence[int]:
        """Return those of a client's numbers that were not given up."""
        known = self._numbers
        if not known:
            return numbers
        return [number for number in numbers if (client, number) not in known]

    def end(self, client: str, numbers: Iterable[int]) -> None:
        """Free what was granted to these batches: nothing of it was or will be written any more."""
        for number in numbers:
            self.remember(client, number)
            batch = self._catalog.puts.find(client, number) if number >= 0 else None
            if batch is not None:
                self._catalog.end_batch(batch, at_rest=True)

    def remember(self, client: str, number: int) -> None:
        """Grant nothing to this batch any more."""
        self._numbers[client, number] = None
        self._numbers.move_to_end((client, number))
        while len(self._numbers) > REMEMBERED_MAX:
            self._numbers.popitem(last=False)
