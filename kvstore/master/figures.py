"""The pool in figures, and whether all of its books agree."""

from __future__ import annotations

from collections import Counter

from kvstore.errors import InvariantViolated
from kvstore.master.books.catalog import Catalog
from kvstore.master.books.copy_state import COMMITTED, LOST, OPEN, QUARANTINED, RETIRED
from kvstore.wire.messages import MasterStatistics, Medium, Pin, PutOutcome


def statistics(catalog: Catalog) -> MasterStatistics:
    """Return the figures of the pool now. O(segments + open puts)."""
    counts, pool = catalog.counts, catalog.pool

    def total(state: int) -> int:
        return sum(segment.bytes_in[state] for segment in pool)

    def capacity(medium: Medium) -> int:
        return sum(segment.capacity for segment in pool if segment.medium is medium)

    def free(medium: Medium) -> int:
        return sum(segment.free for segment in pool if segment.medium is medium)

    return MasterStatistics(
        nodes=len(pool.nodes),
        blocks=len(catalog.index),
        leases=len(catalog.leases),
        open_puts=catalog.puts.count_open(),
        capacity_bytes=sum(segment.capacity for segment in pool),
        free_bytes=sum(segment.free for segment in pool),
        committed_bytes=total(COMMITTED),
        open_bytes=total(OPEN),
        retired_bytes=total(RETIRED),
        quarantined_bytes=total(QUARANTINED),
        hit_blocks=counts["hit"],
        missed_blocks=counts["missed"],
        stored_blocks=counts["stored"],
        evicted_blocks=counts["evicted"],
        corrupt_blocks=counts["corrupt"],
        unreachable_blocks=counts["unreachable"],
        lost_blocks=counts["lost"],
        moved_blocks=counts["moved"],
        demoted_blocks=counts["demoted"],
        promoted_blocks=counts["promoted"],
        replicated_blocks=counts["replicated"],
        no_space_blocks=counts[PutOutcome.NO_SPACE],
        too_large_blocks=counts[PutOutcome.TOO_LARGE],
        over_quota_blocks=counts[PutOutcome.OVER_QUOTA],
        segments=len(pool),
        copies=sum(segment.blocks for segment in pool),
        soft_pinned_blocks=len(catalog.pins.soft),
        hard_pinned_blocks=catalog.pins.num_hard,
        dram_capacity_bytes=capacity(Medium.DRAM),
        dram_free_bytes=free(Medium.DRAM),
        cxl_capacity_bytes=capacity(Medium.CXL),
        cxl_free_bytes=free(Medium.CXL),
        ssd_capacity_bytes=capacity(Medium.SSD),
        ssd_free_bytes=free(Medium.SSD),
    )


def check_invariants(catalog: Catalog) -> None:
    """Raise InvariantViolated unless index, segments, leases, puts and tenants agree. Slow."""
    table, index = catalog.table, catalog.index
    index.check_invariants()
    catalog.puts.check_invariants()
    for segment in catalog.pool:
        segment.check_invariants()
    rows = table.rows()
    by_state: dict[int, set[int]] = {state: set() for state in range(LOST + 1)}
    for row in rows:
        by_state[table.state[row]].add(row)
    leased = catalog.leases.counts()
    leased.update(batch.source for batch in catalog.puts if batch.source >= 0)
    _check(len(rows) == len(table), "rows in use are miscounted")
    _check(all(table.leases[row] == leased[row] for row in rows), "leases are miscounted")
    _check(leased.keys() <= set(rows), "leases on rows that are free")
    indexed = {row for first in index for row in table.copies(first)}
    _check(by_state[COMMITTED] == indexed, "committed is not indexed")
    _check(by_state[OPEN] | by_state[QUARANTINED] == catalog.puts.rows(), "puts have other rows")
    ending = by_state[RETIRED] | by_state[LOST]
    _check(all(table.leases[row] for row in ending), "retired or lost without a lease")
    _check_tenants(catalog, [row for row in rows if table.state[row] != LOST])
    _check_pins(catalog)
    _check_groups(catalog)


def _check_tenants(catalog: Catalog, rows: list[int]) -> None:
    table = catalog.table
    used: Counter[int] = Counter()
    for row in rows:
        used[table.tenant[row]] += table.space[row]
    blocks = Counter(table.tenant[first] for first in catalog.index)
    for tenant in catalog.tenants:
        _check(tenant.used_bytes == used[tenant.number], f"bytes of {tenant.name!r} miscounted")
        _check(tenant.blocks == blocks[tenant.number], f"blocks of {tenant.name!r} miscounted")
        for pin, order in enumerate(tenant.orders):
            theirs = {
                row
                for row in rows
                if tenant.number
                and table.tenant[row] == tenant.number
                and table.state[row] == COMMITTED
                and table.pin[row] == pin
            }
            _check(set(order) == theirs, f"order of {tenant.name!r} has other rows")
            _check(len(order) == len(theirs), f"order of {tenant.name!r} is miscounted")


def _check_pins(catalog: Catalog) -> None:
    pins = {catalog.table.keys[row]: catalog.table.pin[row] for row in catalog.index}
    soft = {key for key, pin in pins.items() if pin == Pin.SOFT}
    _check(all(key in catalog.pins.soft for key in soft), "a soft pin without an end")
    _check(len(soft) == len(catalog.pins.soft), "the end of a pin that is not")
    hard = sum(pin == Pin.HARD for pin in pins.values())
    _check(hard == catalog.pins.num_hard, "hard pins miscounted")


def _check_groups(catalog: Catalog) -> None:
    table = catalog.table
    listed = {(key, number) for number in catalog.groups for key in catalog.groups.keys(number)}
    marked = {(table.keys[row], table.group[row]) for row in catalog.index if table.group[row]}
    _check(listed == marked, "groups list other blocks than say so")


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise InvariantViolated(where="Catalog", problem=problem)
