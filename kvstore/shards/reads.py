"""Lookups and leases over several masters.

A lookup asks all masters at once for every key of theirs, since which of them has the next key of
a chain is as good as random. What lies behind the first gap is given back.

    keys       0   1   2   3   4   5          shard 0 has 0, 3, 4      shard 1 has 1, 2, 5
    there?     y   y   y   -   y   y    ──▶   the run is [0, 3); block 4 stays leased for as long
                                              as block 0, and a lease of 5 alone would be released

A lease of the merged run is the leases of its masters, 64 bits each: that of shard i is
`lease_id >> 64 * i & 2**64 - 1`. So nobody has to remember which belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from kvstore.errors import MasterUnavailable
from kvstore.shards.plan import Merged, NodeNames, Outcome, Plan, arrived, by_shard, pick
from kvstore.wire import messages as m

LEASE_BITS: Final = 64


def join_leases(leases: dict[int, int]) -> int:
    """Return the lease that stands for one lease of each of these shards."""
    return sum(lease_id << LEASE_BITS * shard for shard, lease_id in leases.items())


def split_lease(lease_id: int) -> dict[int, int]:
    """Return the leases by shard that a joined lease stands for."""
    found, shard = {}, 0
    while lease_id:
        part = lease_id & (1 << LEASE_BITS) - 1
        if part:
            found[shard] = part
        lease_id >>= LEASE_BITS
        shard += 1
    return found


class _Rows:
    """The rows of a merged `Located`, by position of their keys."""

    def __init__(self, num_keys: int) -> None:
        self.names = NodeNames()
        self.node_idx = [-1] * num_keys
        self.offsets = [-1] * num_keys
        self.lengths = [0] * num_keys
        self.checksums = [0] * num_keys
        self.chunk_bytes = [0] * num_keys
        self.lease_s = float("inf")

    def enter(self, positions: Sequence[int], reply: m.Located) -> None:
        """Enter what one master says of the keys at these positions."""
        self.lease_s = min(self.lease_s, reply.lease_s)
        translated = self.names.translate(reply.nodes)
        for row, position in enumerate(positions[: len(reply.node_idx)]):
            if reply.node_idx[row] < 0:
                continue
            self.node_idx[position] = translated[reply.node_idx[row]]
            self.offsets[position] = reply.offsets[row]
            self.lengths[position] = reply.lengths[row]
            self.checksums[position] = reply.checksums[row]
            if reply.chunk_bytes:
                self.chunk_bytes[position] = reply.chunk_bytes[row]

    def located(self, count: int, lease_id: int) -> m.Located:
        """Return the first so many rows as a reply."""
        chunk_bytes = self.chunk_bytes[:count]
        return m.Located(
            lease_id=lease_id,
            lease_s=self.lease_s,
            nodes=self.names.nodes,
            node_idx=self.node_idx[:count],
            offsets=self.offsets[:count],
            lengths=self.lengths[:count],
            checksums=self.checksums[:count],
            chunk_bytes=chunk_bytes if any(chunk_bytes) else [],
        )


def plan_lookup(request: m.Lookup, num_shards: int) -> Plan:
    """Ask every master for all of its keys; the leading run, or all if `every`, is the reply.

    A master that does not answer makes its keys missing; if nothing is left of the run therefore,
    that is MasterUnavailable.
    """
    positions = by_shard(request.keys, num_shards)
    shards = list(positions)

    def merge(outcomes: Sequence[Outcome]) -> Merged:
        rows, leases = _Rows(len(request.keys)), dict[int, int]()
        lost: dict[int, MasterUnavailable] = {}
        for shard, outcome in zip(shards, outcomes, strict=True):
            if isinstance(outcome, MasterUnavailable):
                lost[shard] = outcome
                continue
            reply = arrived("Lookup", outcome, m.Located)
            rows.enter(positions[shard], reply)
            if reply.lease_id:
                leases[shard] = reply.lease_id
        missing = rows.node_idx.index(-1) if -1 in rows.node_idx else len(request.keys)
        if lost and (missing == 0 or request.every):
            raise next(iter(lost.values()))
        count = len(request.keys) if request.every else missing
        used = {shard for shard in leases if positions[shard][0] < count}
        return Merged(
            reply=rows.located(count, join_leases({s: leases[s] for s in used})),
            leftovers=tuple(
                (shard, m.Release(request.client, [lease_id]))
                for shard, lease_id in leases.items()
                if shard not in used
            ),
        )

    parts = [
        m.Lookup(request.client, pick(request.keys, positions[shard]), request.avoid, every=True)
        for shard in shards
    ]
    return Plan(parts=tuple(zip(shards, parts, strict=True)), merge=merge)


def _leases_by_shard(lease_ids: Sequence[int]) -> dict[int, dict[int, int]]:
    """Map each shard to its leases, by their positions in `lease_ids`."""
    found: dict[int, dict[int, int]] = {}
    for position, joined in enumerate(lease_ids):
        for shard, lease_id in split_lease(joined).items():
            found.setdefault(shard, {})[position] = lease_id
    return found


def plan_renew(request: m.Renew) -> Plan:
    """A lease runs on if all of its parts do."""
    leases = _leases_by_shard(request.lease_ids)

    def merge(outcomes: Sequence[Outcome]) -> Merged:
        running, lease_s = [bool(lease_id) for lease_id in request.lease_ids], float("inf")
        for positions, outcome in zip(leases.values(), outcomes, strict=True):
            reply = arrived("Renew", outcome, m.Renewed)
            lease_s = min(lease_s, reply.lease_s)
            for position, runs in zip(positions, reply.running, strict=True):
                running[position] &= runs
        return Merged(reply=m.Renewed(running, lease_s))

    parts = ((s, m.Renew(request.client, list(ids.values()))) for s, ids in leases.items())
    return Plan(parts=tuple(parts), merge=merge)


def plan_release(request: m.Release) -> Plan:
    """Each master ends its part of the leases."""
    leases = _leases_by_shard(request.lease_ids)

    def merge(outcomes: Sequence[Outcome]) -> Merged:
        ended = [arrived("Release", outcome, m.Done).count for outcome in outcomes]
        return Merged(reply=m.Done(min(sum(ended), len(request.lease_ids))))

    parts = ((s, m.Release(request.client, list(ids.values()))) for s, ids in leases.items())
    return Plan(parts=tuple(parts), merge=merge)


def plan_exists(request: m.Exists, num_shards: int) -> Plan:
    """Every master says which of its keys are there."""
    positions = by_shard(request.keys, num_shards)

    def merge(outcomes: Sequence[Outcome]) -> Merged:
        flags = [False] * len(request.keys)
        for theirs, outcome in zip(positions.values(), outcomes, strict=True):
            reply = arrived("Exists", outcome, m.Present)
            for position, flag in zip(theirs, reply.flags, strict=True):
                flags[position] = flag
        return Merged(reply=m.Present(flags))

    parts = (
        (s, replace(request, keys=pick(request.keys, theirs))) for s, theirs in positions.items()
    )
    return Plan(parts=tuple(parts), merge=merge)
