"""Puts over several masters, and changes of blocks by their keys.

Rows of a merged `Allocated` are numbered as a single master would: `position * replicas + copy`.
`Finish` names rows only, so where each row came from is remembered between the two.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from kvstore.errors import MasterUnavailable
from kvstore.shards.plan import (
    Merge,
    Merged,
    NodeNames,
    Outcome,
    Plan,
    arrived,
    by_shard,
    pick,
    shard_of,
)
from kvstore.wire import messages as m

BATCHES_MAX: Final = 4096
ABANDONED_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the rows of a batch came from."""

    positions: dict[int, list[int]]  # shard -> positions of its keys
    replicas: int

    def local(self, rows: Sequence[int]) -> dict[int, dict[int, int]]:
        """Map each shard to its own numbers of these rows, with their indices in `rows`."""
        place = {
            position: (shard, at)
            for shard, theirs in self.positions.items()
            for at, position in enumerate(theirs)
        }
        found: dict[int, dict[int, int]] = {}
        for idx, row in enumerate(rows):
            position, copy = divmod(row, self.replicas)
            shard, at = place[position]
            found.setdefault(shard, {})[at * self.replicas + copy] = idx
        return found


class PutPlans:
    """Plans of one client's puts. Thread-safe.

    Args:
        num_shards: Masters that share the keys.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._lock = threading.Lock()
        self._origins: OrderedDict[int, _Origin] = OrderedDict()  # batch -> where its rows are
        self._abandoned: list[list[int]] = [[] for _ in range(num_shards)]

    def allocate(self, request: m.Allocate) -> Plan:
        """Each master places its own keys; those of one that does not answer are `FAILED`."""
        positions = by_shard(request.keys, self._num_shards)
        shards = list(positions)
        with self._lock:
            for batches in self._abandoned:
                batches += request.abandoned
                del batches[:-ABANDONED_MAX]
            told = {shard: list(self._abandoned[shard]) for shard in shards}

        def merge(outcomes: Sequence[Outcome]) -> Merged:
            lost = [o for o in outcomes if isinstance(o, MasterUnavailable)]
            if len(lost) == len(shards):
                raise lost[0]
            for shard, outcome in zip(shards, outcomes, strict=True):
                self._heard(shard, told[shard], request.batch, outcome)
            origin = _Origin(positions, _replicas(positions, outcomes))
            self._remember(request.batch, origin)
            return Merged(reply=_merge_allocated(request, origin, outcomes))

        parts = [
            replace(
                request,
                keys=pick(request.keys, positions[shard]),
                lengths=pick(request.lengths, positions[shard]),
                checksums=pick(request.checksums, positions[shard]),
                abandoned=told[shard],
            )
            for shard in shards
        ]
        return Plan(parts=tuple(zip(shards, parts, strict=True)), merge=merge)

    def finish(self, request: m.Finish) -> Plan:
        """Each master ends its own rows; those of one that does not answer are not stored."""
        with self._lock:
            origin = self._origins.pop(request.batch, _Origin({}, 1))
        columns = {
            name: origin.local(getattr(request, name) if origin.positions else [])
            for name in ("committed", "aborted", "unsettled")
        }
        shards = sorted({shard for column in columns.values() for shard in column})

        def merge(outcomes: Sequence[Outcome]) -> Merged:
            stored = [False] * len(request.committed)
            for shard, outcome in zip(shards, outcomes, strict=True):
                if isinstance(outcome, MasterUnavailable):
                    self._abandon(shard, request.batch)
                    continue
                reply = arrived("Finish", outcome, m.Finished)
                theirs = columns["committed"].get(shard, {})
                for idx, flag in zip(theirs.values(), reply.stored, strict=True):
                    stored[idx] = flag
            return Merged(reply=m.Finished(stored))

        parts = [
            replace(
                request,
                checksums=pick(request.checksums, list(columns["committed"].get(s, {}).values())),
                **{name: list(column.get(s, ())) for name, column in columns.items()},
            )
            for s in shards
        ]
        return Plan(parts=tuple(zip(shards, parts, strict=True)), merge=merge)

    def _remember(self, batch: int, origin: _Origin) -> None:
        with self._lock:
            self._origins[batch] = origin
            while len(self._origins) > BATCHES_MAX:
                self._origins.popitem(last=False)

    def _heard(self, shard: int, told: list[int], batch: int, outcome: Outcome) -> None:
        if isinstance(outcome, MasterUnavailable):
            self._abandon(shard, batch)
            return
        with self._lock:
            self._abandoned[shard] = [i for i in self._abandoned[shard] if i not in told]

    def _abandon(self, shard: int, batch: int) -> None:
        with self._lock:
            self._abandoned[shard].append(batch)


def _replicas(positions: dict[int, list[int]], outcomes: Sequence[Outcome]) -> int:
    """Rows per key: the masters may know fewer copies than were asked for."""
    found = [
        len(outcome.node_idx) // len(theirs)
        for theirs, outcome in zip(positions.values(), outcomes, strict=True)
        if isinstance(outcome, m.Allocated)
    ]
    return max(1, *found) if found else 1


def _merge_allocated(
    request: m.Allocate, origin: _Origin, outcomes: Sequence[Outcome]
) -> m.Allocated:
    names = NodeNames()
    num_rows = len(request.keys) * origin.replicas
    results = [m.PutOutcome.FAILED] * len(request.keys)
    node_idx, offsets = [-1] * num_rows, [-1] * num_rows
    checksums, told = [0] * len(request.keys), False
    put_s, retry_s = float("inf"), 0.0
    for theirs, outcome in zip(origin.positions.values(), outcomes, strict=True):
        if isinstance(outcome, MasterUnavailable):
            continue
        reply = arrived("Allocate", outcome, m.Allocated)
        put_s, retry_s = min(put_s, reply.put_s), max(retry_s, reply.retry_s)
        translated = names.translate(reply.nodes)
        for at, position in enumerate(theirs):
            results[position] = reply.outcomes[at]
            if reply.checksums:
                checksums[position], told = reply.checksums[at], True
            for copy in range(origin.replicas):
                row, mine = at * origin.replicas + copy, position * origin.replicas + copy
                if reply.node_idx[row] >= 0:
                    node_idx[mine] = translated[reply.node_idx[row]]
                    offsets[mine] = reply.offsets[row]
    return m.Allocated(
        outcomes=results,
        nodes=names.nodes,
        node_idx=node_idx,
        offsets=offsets,
        put_s=put_s,
        retry_s=retry_s,
        checksums=checksums if told else [],
    )


def plan_store(request: m.Reserve | m.Store, num_shards: int) -> Plan:
    """The master of the key is asked alone."""

    def merge(outcomes: Sequence[Outcome]) -> Merged:
        (outcome,) = outcomes
        if isinstance(outcome, MasterUnavailable):
            raise outcome
        return Merged(reply=outcome)

    return Plan(parts=((shard_of(request.key, num_shards), request),), merge=merge)


def plan_change(request: m.Remove | m.SetPin, num_shards: int) -> Plan:
    """Each master changes its own keys, and its own part of the group if one is named."""
    positions = by_shard(request.keys, num_shards)
    shards = range(num_shards) if request.group else sorted(positions)
    parts = ((s, replace(request, keys=pick(request.keys, positions.get(s, [])))) for s in shards)
    return Plan(parts=tuple(parts), merge=_sum(type(request).__name__))


def plan_description(request: m.Describe, num_shards: int) -> Plan:
    """Each master hears of its own blocks; what one did not take is told by its events alone."""

    def part(theirs: list[int]) -> m.Describe:
        columns = ("keys", "parents", "tokens")
        return replace(request, **{name: pick(getattr(request, name), theirs) for name in columns})

    positions = by_shard(request.keys, num_shards)
    parts = ((shard, part(theirs)) for shard, theirs in positions.items())
    return Plan(parts=tuple(parts), merge=_sum("Describe"))


def plan_report(request: m.ReportBad, num_shards: int) -> Plan:
    """Each master hears of its own blocks."""

    def part(theirs: list[int]) -> m.ReportBad:
        columns = ("keys", "nodes", "offsets", "corrupt", "segments")
        return replace(request, **{name: pick(getattr(request, name), theirs) for name in columns})

    positions = by_shard(request.keys, num_shards)
    parts = ((shard, part(theirs)) for shard, theirs in positions.items())
    return Plan(parts=tuple(parts), merge=_sum("ReportBad"))


def _sum(operation: str) -> Merge:
    def merge(outcomes: Sequence[Outcome]) -> Merged:
        counts = [arrived(operation, outcome, m.Done).count for outcome in outcomes]
        return Merged(reply=m.Done(sum(counts)))

    return merge
