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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.client.put_options import check_group
from kvstore.client.steps import Steps, pause, work
from kvstore.errors import InvalidValue, MasterUnavailable
from kvstore.timeouts import check_timeout
from kvstore.wire import messages as m
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from kvstore.client.block_writer import BlockWriter, WriteResult
    from kvstore.client.client_record import ClientRecord
    from kvstore.client.master_access import MasterAccess
    from kvstore.client.source import Source
    from kvstore.client.writes_under_way import WritesUnderWay

PAUSE_S_MIN: Final = 0.005
PAUSE_S_MAX: Final = 0.25
ELSEWHERE_MAX: Final = 2  # how often a put is tried again because nodes did not take it
SETTLING_S: Final = 0.05  # until a master that has just started is asked again


@dataclass(slots=True)
class _Attempt:
    """What became of blocks, and of which of them when to try again.

    Attributes:
        outcomes: Of each.
        retry_s: When there may be space, as the master says.
        provisional: It has just started, and there may be space soon.
        lost: Blocks that were granted or written in vain.
        elsewhere: Blocks that their nodes did not get or did not confirm; other nodes may.
    """

    outcomes: list[PutOutcome]
    retry_s: float
    provisional: bool
    lost: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)

    @property
    def pause_s(self) -> float:
        if self.provisional:
            return SETTLING_S
        return min(max(self.retry_s, PAUSE_S_MIN), PAUSE_S_MAX)


class Writing:
    """The writing operations of one client. Thread-safe.

    Args:
        record: What the client remembers.
        master: Its requests.
        writer: Moves the bytes.
        under_way: Knows what may still be written.
    """

    def __init__(
        self,
        record: ClientRecord,
        master: MasterAccess,
        writer: BlockWriter,
        under_way: WritesUnderWay,
    ) -> None:
        self._record = record
        self._master = master
        self._writer = writer
        self._under_way = under_way

    def put(self, source: Source, *, deadline_s: float) -> Steps[list[PutOutcome]]:
        """Store blocks, each whole or not at all.

        Raises:
            MasterUnavailable: It did not answer. What it granted is given back.
            Fenced, TenantRefused: Nothing was stored.
        """
        attempt = yield from self._put_once(source, deadline_s)
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

    def _put_once(self, source: Source, deadline_s: float) -> Steps[_Attempt]:
        batch = self._record.next_batch()
        try:
            return (yield from self._put_batch(batch, source, deadline_s))
        except MasterUnavailable:
            # Whatever of this batch the master granted or will still grant, we write it no more.
            self._record.abandon(batch)
            raise

    def _put_batch(self, batch: int, source: Source, deadline_s: float) -> Steps[_Attempt]:
        options = source.options
        abandoned = self._record.abandoned()
        request = m.Allocate(
            client=self._record.name,
            batch=batch,
            keys=list(source.keys),
            lengths=source.lengths.tolist(),
            checksums=source.sums.values.tolist() if source.sums.complete else [],
            chunk_bytes=options.chunk_bytes,
            pin=options.pin,
            pin_s=options.pin_s,
            group=options.group,
            replicas=options.replicas,
            media=list(options.media),
            prefer=list(options.prefer),
            avoid=self._record.avoided(),
            abandoned=abandoned,
        )
        left_s = max(0.001, deadline_s - time.monotonic())
        with self._under_way.begin() as write:
            granted = yield from self._master.ask(request, m.Allocated, timeout_s=left_s)
            self._record.told_abandoned(abandoned)
            attempt = _Attempt(list(granted.outcomes), granted.retry_s, granted.provisional)
            if granted.checksums:
                yield from _compare(source, granted, attempt.outcomes)
            if not granted.nodes:
                return attempt
            write.granted([(n.node, n.segment) for n in granted.nodes], put_s=granted.put_s)
            # A master that knows no replicas grants one row per block.
            replicas = len(granted.node_idx) // source.num_blocks
            now = time.monotonic()
            write_s = min(deadline_s, now + granted.put_s / 2)
            reach_s = min(write_s, (now + deadline_s) / 2)  # leaves time for another node
            result = yield from self._writer.write(
                source, granted, write, replicas=replicas, reach_s=reach_s, deadline_s=write_s
            )
            in_doubt = {granted.node_idx[row] for row in result.unsettled}
            write.end((n.node, n.segment) for i, n in enumerate(granted.nodes) if i in in_doubt)
        self._record.shun(result.lost_nodes)
        written = np.array(result.written, dtype=np.int64) // replicas
        # What it was told before it need not be told again.
        sums = [] if request.checksums else source.sums.values[written].tolist()
        committed = yield from self._finish(batch, result, sums)
        if len(committed) == len(granted.node_idx) and committed.all():  # as nearly always
            attempt.outcomes = [PutOutcome.STORED] * source.num_blocks
            return attempt
        stored = np.zeros(source.num_blocks, dtype=bool)
        stored[written[committed]] = True
        attempt.outcomes = [
            outcome if outcome is not PutOutcome.GRANTED
            else PutOutcome.STORED if good else PutOutcome.FAILED
            for outcome, good in zip(attempt.outcomes, stored.tolist(), strict=True)
        ]  # fmt: skip
        granted_to = np.array([*result.written, *result.void], dtype=np.int64) // replicas
        attempt.lost = set(granted_to[~stored[granted_to]].tolist())
        missed = np.array([*result.unreached, *result.unsettled], dtype=np.int64) // replicas
        attempt.elsewhere = set(missed[~stored[missed]].tolist()) - attempt.lost
        return attempt

    def _finish(
        self, batch: int, result: WriteResult, checksums: list[int]
    ) -> Steps[NDArray[np.bool_]]:
        """End a put; return which of the written copies are copies of blocks now."""
        request = m.Finish(
            client=self._record.name,
            batch=batch,
            committed=result.written,
            aborted=result.aborted,
            unsettled=result.unsettled,
            checksums=checksums,
        )
        # Its own deadline: the bytes are there, and giving up now would waste them.
        finished = yield from self._master.ask(request, m.Finished)
        return np.array(finished.stored, dtype=bool)

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
