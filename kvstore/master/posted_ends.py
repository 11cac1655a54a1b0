"""Ends of puts of many blocks that were posted: what `Finish` does, without an answer."""

from __future__ import annotations

import logging
from array import array

from kvstore import row_loops
from kvstore.master.books.catalog import Catalog

logger = logging.getLogger(__name__)


def take_end(
    catalog: Catalog, client: str, number: int, checksums: bytes, count: int, now: float
) -> None:
    """Make blocks of all of a batch; of what is not legal, nothing.

    Args:
        catalog: The pool's books.
        client: Who posted it.
        number: Of the batch.
        checksums: 8 bytes for each block, in their order.
        count: How many blocks.
        now: As everywhere in the master.
    """
    batch = catalog.puts.find(client, number)
    places = [] if batch is None or batch.is_reserved else sorted(batch.rows)
    is_legal = batch is not None and batch.unsummed and batch.replicas == 1
    if batch is None or not is_legal or not len(places) == count == len(checksums) / 8:
        logger.error("%s posted the end of batch %d, not its own", client, number)
        return
    rows = [batch.rows[place] for place in places]
    row_loops.scatter(catalog.table.checksum, rows, array("Q", checksums).tolist())
    # From the last to the first, so that the root of a chain is the youngest.
    if not all(catalog.commit_all(batch, places[::-1], now)):
        logger.error("%s posted the end of batch %d, which was over", client, number)
