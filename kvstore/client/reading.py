"""Looking blocks up and copying them in, with another copy where one is bad or out of reach.

locate   keys ─▶ master: what is there, leased in the same step ─▶ Hit
copy     pieces of a hit ─▶ one read per segment ─▶ checksums ─▶ Copied
         bad ones ─▶ reported, located again elsewhere, copied from there
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.client.block_reader import Copied
from kvstore.client.locations import Hit
from kvstore.client.pieces import Pieces
from kvstore.client.steps import Steps
from kvstore.errors import InvalidValue, KVStoreError, MasterUnavailable
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore.client.block_reader import BlockReader
    from kvstore.client.client_record import ClientRecord
    from kvstore.client.master_access import MasterAccess

logger = logging.getLogger(__name__)

FAILOVERS_MAX: Final = 3


class Reading:
    """The reading operations of one client. Thread-safe.

    Args:
        record: What the client remembers.
        master: Its requests.
        reader: Moves and verifies the bytes.
    """

    def __init__(self, record: ClientRecord, master: MasterAccess, reader: BlockReader) -> None:
        self._record = record
        self._master = master
        self._reader = reader

    def locate(
        self, keys: Sequence[bytes], *, every: bool, timeout_s: float | None = None
    ) -> Steps[Hit]:
        """Find blocks and lease them: the leading run, or every one that is there.

        Args:
            keys: As the pool knows them, at most `KEYS_MAX`.
            every: Not only the leading run.
            timeout_s: For the request.
        """
        hit = yield from self._locate(keys, every, timeout_s)
        self._record.count(hit_blocks=hit.num_blocks, missed_blocks=len(keys) - hit.num_blocks)
        return hit

    def copy(self, hit: Hit, pieces: Pieces, *, deadline_s: float) -> Steps[Copied]:
        """Copy pieces of a hit's blocks; what is bad is reported and fetched from another copy.

        Raises:
            LeaseExpired: The lease ended before the copy did.
            InvalidValue: A piece leaves its block or its region.
        """
        check_inside(hit, pieces)
        copied = yield from self._reader.copy(hit, pieces, deadline_s=deadline_s)
        if copied.corrupt and hit.lease.adrift:
            raise hit.lease.expired()  # they have moved: nobody's bytes are wrong
        if copied.bad:
            yield from self._report(hit, copied)
            copied = yield from self._fail_over(hit, pieces, copied, deadline_s)
        self._record.count(read_blocks=copied.num_good)
        return copied

    def release(self, lease_ids: Sequence[int]) -> Steps[None]:
        """End leases. An unreachable master is no error: they run out."""
        try:
            request = m.Release(self._record.name, list(lease_ids))
            yield from self._master.ask(request, m.Done)
        except KVStoreError as error:
            logger.debug("leases %s not released: %s", lease_ids, error)

    def exists(self, keys: Sequence[bytes], *, timeout_s: float | None) -> Steps[list[bool]]:
        """Tell which blocks are there now. Nothing is leased."""
        request = m.Exists(list(keys), self._record.name)
        return (yield from self._master.ask(request, m.Present, timeout_s=timeout_s)).flags

    def _locate(self, keys: Sequence[bytes], every: bool, timeout_s: float | None) -> Steps[Hit]:
        asked_s = time.monotonic()
        request = m.Lookup(self._record.name, list(keys), self._record.avoided(), every)
        reply = yield from self._master.ask(request, m.Located, timeout_s=timeout_s)
        return Hit.from_reply(keys, reply, asked_s=asked_s)

    def _fail_over(
        self, hit: Hit, pieces: Pieces, copied: Copied, deadline_s: float
    ) -> Steps[Copied]:
        """Copy what is bad from other copies, as long as there are any."""
        corrupt, unreached = set(copied.corrupt), set(copied.unreached)
        lost = list(copied.lost_nodes)
        for _ in range(FAILOVERS_MAX):
            bad = sorted(corrupt | unreached)
            left_s = deadline_s - time.monotonic()
            if not bad or left_s <= 0:
                break
            try:
                other = yield from self._locate([hit.keys[i] for i in bad], True, left_s)
            except MasterUnavailable:
                break
            if not other.num_blocks:
                break
            blocks = np.array(bad, dtype=np.int64)[other.positions]
            again = yield from self._copy_other(other, pieces.renumbered(blocks), deadline_s)
            lost += again.lost_nodes
            corrupt -= set(blocks.tolist())
            unreached -= set(blocks.tolist())
            corrupt |= {int(blocks[i]) for i in again.corrupt}
            unreached |= {int(blocks[i]) for i in again.unreached}
        return Copied(
            num_good=min((*corrupt, *unreached, hit.num_blocks)),
            corrupt=tuple(sorted(corrupt)),
            unreached=tuple(sorted(unreached)),
            lost_nodes=tuple(lost),
        )

    def _copy_other(self, other: Hit, pieces: Pieces, deadline_s: float) -> Steps[Copied]:
        try:
            copied = yield from self._reader.copy(other, pieces, deadline_s=deadline_s)
            if copied.bad:
                yield from self._report(other, copied)
            return copied
        finally:
            yield from self.release([other.lease_id])

    def _report(self, hit: Hit, copied: Copied) -> Steps[None]:
        self._record.shun(copied.lost_nodes)
        bad = [*copied.corrupt, *copied.unreached]
        self._record.count(
            corrupt_blocks=len(copied.corrupt), unreachable_blocks=len(copied.unreached)
        )
        logger.warning(
            "of %s blocks, %s are corrupt and %s out of reach (nodes %s)",
            hit.num_blocks,
            len(copied.corrupt),
            len(copied.unreached),
            copied.lost_nodes,
        )
        where = [hit.nodes[hit.node_idx[i]] for i in bad]
        request = m.ReportBad(
            client=self._record.name,
            keys=[hit.keys[i] for i in bad],
            nodes=[place.node for place in where],
            offsets=hit.offsets[bad].tolist(),
            corrupt=[True] * len(copied.corrupt) + [False] * len(copied.unreached),
            segments=[place.segment for place in where],
        )
        try:
            yield from self._master.ask(request, m.Done)
        except KVStoreError as error:
            logger.warning("bad blocks not reported: %s", error)


def check_inside(hit: Hit, pieces: Pieces) -> None:
    """Raise InvalidValue unless every piece lies in a block of the hit and in its region."""
    pieces.check()
    if pieces.one_each and np.array_equal(pieces.lengths, hit.lengths):
        return
    if not len(pieces):
        return
    if int(pieces.blocks.min()) < 0 or int(pieces.blocks.max()) >= hit.num_blocks:
        raise InvalidValue(problem=f"the hit has {hit.num_blocks} blocks")
    if int(pieces.starts.min()) < 0:
        raise InvalidValue(problem="a piece starts before its block")
    beyond = pieces.lengths > hit.lengths[pieces.blocks] - pieces.starts  # a sum could overflow
    if beyond.any():
        row = int(np.flatnonzero(beyond)[0])
        start, nbytes = int(pieces.starts[row]), int(pieces.lengths[row])
        size = int(hit.lengths[pieces.blocks[row]])
        raise InvalidValue(problem=f"bytes [{start}, {start + nbytes}) of a block of {size}")
