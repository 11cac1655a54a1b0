"""Storing blocks: allocate at the master, write one-sided, commit at the master.

put      Allocate ─▶ granted rows ─▶ one write per segment ─▶ Finish, checksums ─▶ outcomes
         NO_SPACE, and the caller waits: a pause, and again for those blocks alone
         NO_SPACE of a master that has just started: so too, whatever the caller says
         written, but the master knows nothing of it (it is a new one), or granted by one that is
         known to have a successor: again for those alone
         its node is not reached, or what was sent to it is not confirmed: again, without that node,
         a few times. Where bytes may be under way the place is the master's to quarantine, and what
         is tried again has places of its own
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.client.allocating import Allocating
from kvstore.client.block_writer import Begun
from kvstore.client.early_writes import EarlyWrites
from kvstore.client.open_put import PAUSE_S_MIN, Attempt, OpenPut
from kvstore.client.put_options import check_group
from kvstore.client.steps import Steps, pause, work
from kvstore.errors import InvalidValue, KVStoreError, MasterUnavailable
from kvstore.timeouts import check_timeout
from kvstore.wire import messages as m
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from kvstore.client.block_writer import BlockWriter
    from kvstore.client.client_record import ClientRecord
    from kvstore.client.disk_places import DiskPlaces
    from kvstore.client.master_access import MasterAccess
    from kvstore.client.post_box import PostBoxes
    from kvstore.client.source import Source
    from kvstore.client.writes_under_way import WritesUnderWay

Ints = NDArray[np.int64]
ELSEWHERE_MAX: Final = 2  # how often a put is tried again because nodes did not take it
# What goes to disks: of so much the disk has these first bytes to write while the rest is asked
# for; and of so much at a time the master learns while others are being written.
SPLIT_BYTES_MIN: Final = 40 << 20
HEAD_BYTES: Final = 20 << 20
LAST_BYTES: Final = 8 << 20  # of them: while they are written, the rest is committed
COMMIT_BYTES: Final = 32 << 20


class Writing:
    """The writing operations of one client. Thread-safe.

    Args:
        record: What the client remembers.
        master: Its requests.
        writer: Moves the bytes.
        under_way: Knows what may still be written.
        posts: Where the ends of puts are posted.
        ahead: Places on disks that are had ahead of a put; None: never.
    """

    def __init__(
        self,
        record: ClientRecord,
        master: MasterAccess,
        writer: BlockWriter,
        under_way: WritesUnderWay,
        posts: PostBoxes,
        ahead: DiskPlaces | None = None,
    ) -> None:
        self._record = record
        self._master = master
        self._writer = writer
        self._under_way = under_way
        self._posts = posts
        self._ahead = ahead
        self._allocating = Allocating(record, master, ahead)
        self._to_disks = False  # where the last blocks went

    def put(self, source: Source, *, deadline_s: float) -> Steps[list[PutOutcome]]:
        """Store blocks, each whole or not at all.

        Raises:
            MasterUnavailable: It did not answer. What it granted and did not commit is given back.
            Fenced, TenantRefused: Nothing was stored; of a large put to disks perhaps some was,
                before it was refused.
        """
        attempt = yield from self._put_once(source, deadline_s, is_first=True)
        outcomes, lost, elsewhere = attempt.outcomes, attempt.lost, attempt.elsewhere
        num_elsewhere = 0
        while True:
            num_elsewhere += bool(elsewhere)
            again = lost | elsewhere if num_elsewhere <= ELSEWHERE_MAX else set(lost)
            if source.options.wait_for_space or attempt.provisional:
                again |= {i for i, o in enumerate(outcomes) if o is PutOutcome.NO_SPACE}
            waiting = sorted(again)
            left_s = deadline_s - time.monotonic()
            if not waiting or left_s <= PAUSE_S_MIN:
                break
            yield from pause(min(attempt.pause_s, left_s))
            attempt = yield from self._put_once(source.of(waiting), deadline_s)
            for block, outcome in zip(waiting, attempt.outcomes, strict=True):
                ours = block in lost and outcome is PutOutcome.EXISTS  # it was known after all
                # That there is no other place for it does not mean that there is none.
                waits = source.options.wait_for_space or attempt.provisional
                failed = block in elsewhere and outcome is PutOutcome.NO_SPACE and not waits
                outcomes[block] = (
                    PutOutcome.STORED if ours else PutOutcome.FAILED if failed else outcome
                )
            lost = {waiting[i] for i in attempt.lost}
            elsewhere = {waiting[i] for i in attempt.elsewhere}
        self._count(outcomes)
        return outcomes

    def set_pin(
        self,
        keys: Sequence[bytes],
        pin: m.Pin,
        *,
        pin_s: float = 0.0,
        group: str = "",
        timeout_s: float | None = None,
    ) -> Steps[int]:
        """Pin blocks that are there, or let them go again; return how many were found."""
        check_timeout(timeout_s)
        check_group(group)
        if not isinstance(pin, m.Pin):
            raise InvalidValue(problem=f"a pin is a kvstore.Pin, not {pin!r:.40}")
        if not 0 <= pin_s < math.inf:
            raise InvalidValue(problem=f"pin_s must be seconds from 0 on, not {pin_s}")
        request = m.SetPin(self._record.name, list(keys), pin, pin_s, group)
        return (yield from self._master.ask(request, m.Done, timeout_s=timeout_s)).count

    def remove(
        self, keys: Sequence[bytes], *, group: str = "", timeout_s: float | None = None
    ) -> Steps[int]:
        """Forget blocks, pinned ones too; return how many were there."""
        check_timeout(timeout_s)
        check_group(group)
        request = m.Remove(list(keys), self._record.name, group)
        return (yield from self._master.ask(request, m.Done, timeout_s=timeout_s)).count

    def _put_once(
        self, source: Source, deadline_s: float, *, is_first: bool = False
    ) -> Steps[Attempt]:
        """Put blocks; of much that goes to disks the first are begun before the rest is asked for.

        ```text
        places had ahead
        master   [places of 16..]                      [commit 60..]      [commit 0..]
        disk   [0..15][................ 16.. ................]
        none
        master   [places of 0..]       [places of 8..]            [commit 8..]    [commit 0..]
        disk                    [4..7][............... 8.. ......][ 0..3 ]
        ```
        """
        puts: list[OpenPut] = []
        early: EarlyWrites | None = None
        with ExitStack() as stack:
            try:
                if is_first:
                    early = yield from self._begin_early(source, stack, deadline_s)
                if self._ahead is not None:
                    stack.enter_context(self._ahead.counting(source.pieces.nbytes))
                if early is not None:
                    yield from self._take_over(early, source, puts, stack, deadline_s)
                else:
                    yield from self._begin_all(source, puts, stack, deadline_s)
                for put in puts:
                    yield from self._writer.sum_up(put.begun)
                for _ in range(puts[0].num_first):
                    yield from self._writer.end(puts[0].begun)
                for put in reversed(puts):
                    yield from self._end(put)
            except KVStoreError:
                if early is not None and not puts:
                    yield from self._drop(early)
                for put in puts:
                    yield from self._give_up(put)
                raise
        attempts = [put.attempt for put in puts]
        return attempts[0] if len(attempts) == 1 else attempts[0].followed_by(attempts[1])

    # -- in places that were had ahead: see `kvstore/client/early_writes.py` ---------------------

    def _begin_early(
        self, source: Source, stack: ExitStack, deadline_s: float
    ) -> Steps[EarlyWrites | None]:
        """Begin to write the first blocks, if there are places for them."""
        if self._ahead is None or not self._to_disks:
            return None
        write = self._under_way.begin()  # of all segments, before places of any are taken
        places = self._ahead.take(source)
        if not places or not all(self._writer.knows(place.where) for place in places):
            self._ahead.give_back(places)
            write.end()
            return None
        early = EarlyWrites.of(source, places, stack.enter_context(write))
        left_s = early.until_s - time.monotonic()
        write.granted(early.targets, put_s=2 * left_s)
        yield from self._writer.begin(
            early.begun, write, reach_s=0.0, deadline_s=min(deadline_s, early.until_s)
        )
        early.started()
        return early

    def _take_over(
        self,
        early: EarlyWrites,
        source: Source,
        puts: list[OpenPut],
        stack: ExitStack,
        deadline_s: float,
    ) -> Steps[None]:
        """Ask for the keys of what was begun early, and for all else."""
        yield from self._open(source, puts, stack, deadline_s, early=early)
        put = puts[0]
        put.early, put.num_early = early, len(early.places)
        rows = early.hand_over(put.begun)
        if len(rows):
            yield from self._begin(put, rows, deadline_s)

    def _drop(self, early: EarlyWrites) -> Steps[None]:
        """The master has not granted what was begun: wait for its end, and give it back."""
        early.let_go()
        while early.begun.under_way:
            yield from self._writer.end(early.begun)
        at_rest = self._end_early(early)
        if early.batch is not None and at_rest == early.numbers:
            self._record.abandon(early.batch)  # it may have been granted, whoever was told

    def _end_early(self, early: EarlyWrites) -> list[int]:
        """Give back what is at rest and no block; return that."""
        assert self._ahead is not None
        at_rest = early.end()
        self._ahead.give_up(at_rest)
        return at_rest

    # -- all else -----------------------------------------------------------------------------

    def _head_of(self, source: Source) -> tuple[int, int]:
        """Return how many blocks to ask for first, and how many of them to write last.

        (0, 0): all of them are asked for at once.
        """
        if not self._to_disks or source.pieces.nbytes < SPLIT_BYTES_MIN:
            return 0, 0
        ends = np.cumsum(source.lengths)
        last, count = np.searchsorted(ends, (LAST_BYTES, HEAD_BYTES), side="right").tolist()
        few = not 0 < last < count or int(ends[-1] - ends[count - 1]) < HEAD_BYTES
        return (0, 0) if few else (count, last)

    def _begin_all(
        self, source: Source, puts: list[OpenPut], stack: ExitStack, deadline_s: float
    ) -> Steps[None]:
        """Ask for places and begin to write, in two parts if it is much; see `_put_once`."""
        count, last = self._head_of(source)
        if not count:
            yield from self._open(source, puts, stack, deadline_s)
            yield from self._begin(puts[0], None, deadline_s)
            return
        numbers = range(source.num_blocks)
        yield from self._open(source.of(numbers[:count]), puts, stack, deadline_s)
        rows = np.arange(len(puts[0].begun.granted.node_idx))
        last *= puts[0].begun.replicas
        yield from self._begin(puts[0], rows[last:], deadline_s)
        puts[0].num_first = len(puts[0].begun.under_way)
        yield from self._open(source.of(numbers[count:]), puts, stack, deadline_s)
        yield from self._begin(puts[1], None, deadline_s)
        yield from self._begin(puts[0], rows[:last], deadline_s)

    def _open(
        self,
        source: Source,
        puts: list[OpenPut],
        stack: ExitStack,
        deadline_s: float,
        *,
        early: EarlyWrites | None = None,
    ) -> Steps[None]:
        """Ask for places, and note what is to be ended."""
        write = stack.enter_context(self._under_way.begin())
        batch, generation = self._record.next_batch(), self._posts.known_generation()
        try:
            places = [] if early is None else early.numbers
            granted, summed = yield from self._allocating.ask(
                batch, source, places, deadline_s, ahead=self._to_disks
            )
        except MasterUnavailable:
            if early is None:
                self._record.abandon(batch)
            else:
                early.batch = batch
            raise
        put = OpenPut(
            batch=batch, write=write, begun=Begun.of(source, granted), summed=summed,
            granted_s=time.monotonic(), generation=generation,
            attempt=Attempt(list(granted.outcomes), granted.retry_s, granted.provisional),
        )  # fmt: skip
        puts.append(put)
        if granted.checksums:
            yield from _compare(source, granted, put.attempt.outcomes)
        if granted.nodes:
            write.granted([(n.node, n.segment) for n in granted.nodes], put_s=granted.put_s)
            self._to_disks = all(node.medium is m.Medium.SSD for node in granted.nodes)

    def _begin(self, put: OpenPut, rows: Ints | None, deadline_s: float) -> Steps[None]:
        """Begin to write what was granted, or some rows of it."""
        granted = put.begun.granted
        if not granted.nodes:
            return
        write_s = min(deadline_s, put.granted_s + granted.put_s / 2)
        reach_s = min(write_s, (put.granted_s + deadline_s) / 2)  # leaves time for another node
        yield from self._writer.begin(
            put.begun, put.write, reach_s=reach_s, deadline_s=write_s, rows=rows
        )

    def _end(self, put: OpenPut) -> Steps[None]:
        """Wait for what is under way, and commit it; portions while others are being written."""
        begun, lengths = put.begun, put.begun.source.lengths
        in_portions = begun.in_portions and begun.replicas == 1
        while begun.under_way:
            yield from self._writer.end(begun)
            fresh = begun.result.written[len(put.committed) :]
            fresh = [row for row in fresh if row >= put.num_early]
            if in_portions and fresh and begun.under_way:
                is_much = int(lengths[fresh].sum()) >= COMMIT_BYTES
                if is_much or len(begun.under_way) == 1:
                    yield from self._finish(put)
        self._end_writes(put)
        self._record.shun(begun.result.lost_nodes)
        if begun.granted.nodes:
            yield from self._finish(put)
            put.settle()

    def _give_up(self, put: OpenPut) -> Steps[None]:
        """After an error of the master's: let nobody read the caller's bytes any more."""
        while put.begun.under_way:
            yield from self._writer.end(put.begun)
        self._end_writes(put)
        if not put.begun.result.unsettled:
            # Whatever the master granted or will still grant of it, we write it no more.
            self._record.abandon(put.batch)

    def _end_writes(self, put: OpenPut) -> None:
        """Nothing is under way any more that anybody waits for."""
        put.write.end(put.in_doubt())
        if put.early is not None:
            self._end_early(put.early)

    def _finish(self, put: OpenPut) -> Steps[None]:
        """Commit what was written since the last time; end the put, if nothing is under way."""
        result, source = put.begun.result, put.begun.source
        is_end = not put.begun.under_way
        # In the order of the blocks: the master takes the first of them as the youngest.
        fresh = sorted(result.written[len(put.committed) :])
        later: list[int] = []
        if not is_end:  # the first blocks are the last, whenever they were written
            later = [row for row in fresh if row < put.num_early]
            fresh = fresh[len(later) :]
        result.written[len(put.committed) :] = [*fresh, *later]
        blocks = np.array(fresh, dtype=np.int64) // put.begun.replicas
        if is_end and put.post_end(self._posts.box, blocks):
            put.committed += [True] * len(fresh)
            return
        request = m.Finish(
            client=self._record.name,
            batch=put.batch,
            committed=fresh,
            aborted=result.aborted if is_end else [],
            unsettled=result.unsettled if is_end else [],
            # What it was told before it need not be told again.
            checksums=[] if put.summed else source.sums.values[blocks].tolist(),
        )
        # Its own deadline: the bytes are there, and giving up now would waste them.
        finished = yield from self._master.ask(request, m.Finished)
        put.committed += finished.stored

    def _count(self, outcomes: Sequence[PutOutcome]) -> None:
        stored, failed = outcomes.count(PutOutcome.STORED), outcomes.count(PutOutcome.FAILED)
        self._record.count(
            stored_blocks=stored,
            failed_blocks=failed,
            skipped_blocks=len(outcomes) - stored - failed,
        )


def _compare(source: Source, granted: m.Allocated, outcomes: list[PutOutcome]) -> Steps[None]:
    """Tell blocks that exist from others of their names and lengths."""
    exist = np.flatnonzero([outcome is PutOutcome.EXISTS for outcome in outcomes])
    yield from work(int(source.lengths[exist].sum()))
    theirs = np.array(granted.checksums, dtype=np.uint64)[exist]
    for block in exist[source.sum_up(exist) != theirs].tolist():
        outcomes[block] = PutOutcome.CONFLICT
