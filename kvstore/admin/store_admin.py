"""Administration over the masters' wire: one question to each master, one answer of the pool.

status, segments, tenants    every master, added up
blocks                       one page of every master, merged in the order of the keys
drain, rebalance, set_quota  every master, as each holds a share of every segment
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Final, TypeVar

import msgspec

from kvstore.admin.drains import report_of
from kvstore.admin.reports import (
    BlockPage,
    BlockReport,
    CopyReport,
    DrainReport,
    MasterReport,
    PoolReport,
    RebalanceReport,
    SegmentReport,
    TenantPage,
    WriterPage,
)
from kvstore.admin.silent_master import why_silent
from kvstore.discovery.directory import MasterDirectory, as_directory
from kvstore.errors import KVStoreError, MasterRefused
from kvstore.keys import KEY_BYTES
from kvstore.wire import messages as m
from kvstore.wire.master_link import MasterLink
from kvstore.wire.standing import MasterRecord
from transfer import RpcTimeout

ReplyT = TypeVar("ReplyT", bound=m.Reply)
PAGE_MAX: Final = 1 << 14
BYTES_MAX: Final = (1 << 63) - 1  # what the wire and every allocator can count


class StoreAdmin:
    """An administrator of one pool. Thread-safe; every call has a deadline.

    Args:
        masters: The address of the only master, those of all in the order of their shards, or a
            directory of them, which is followed.
        secret: The cluster secret.
        timeout_s: Deadline of one request to a master.
    """

    def __init__(
        self,
        masters: str | Sequence[str] | MasterDirectory,
        *,
        secret: bytes,
        timeout_s: float = 5.0,
    ) -> None:
        self._directory = as_directory(masters)
        records = self._directory.masters()
        if not records:
            raise ValueError("a pool has at least one master")
        self.name: Final = f"admin-{secrets.token_hex(8)}"
        self._links = [
            MasterLink(
                record.address,
                secret=secret,
                identity=f"{self.name}.{record.shard}",
                timeout_s=timeout_s,
            )
            for record in records
        ]
        self._directory.subscribe(self._meet)

    def close(self) -> None:
        """Ask no more."""
        self._directory.unsubscribe(self._meet)
        for link in self._links:
            link.close()

    def __enter__(self) -> StoreAdmin:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _meet(self, record: MasterRecord) -> None:
        if record.address:
            self._links[record.shard].redirect(record.address, term=record.term)

    # -- questions ----------------------------------------------------------------------------

    def status(self) -> PoolReport:
        """Return figures of masters and segments; a master that is away is a row that says so."""
        masters: list[MasterReport] = []
        figures: list[m.SegmentFigures] = []
        totals: dict[str, int] = {}
        for link in self._links:
            try:
                statistics = msgspec.structs.asdict(link.ask(m.Observe(), m.MasterStatistics))
                figures += link.ask(m.ListSegments(), m.SegmentList).segments
            except KVStoreError as error:
                problem = _problem_of(link.address, error)
                masters.append(MasterReport(address=link.address, problem=problem, figures={}))
                continue
            masters.append(MasterReport(address=link.address, problem=None, figures=statistics))
            for name, value in statistics.items():
                totals[name] = totals.get(name, 0) + value
        segments = _added_up(figures)
        if masters:
            totals["nodes"] = len({segment.node for segment in segments})
        return PoolReport(masters=masters, segments=segments, totals=totals)

    def blocks(
        self,
        *,
        after: str = "",
        limit: int = 1000,
        tenant: str | None = None,
        group: str | None = None,
    ) -> BlockPage:
        """Return a page of blocks in the order of their keys.

        Args:
            after: Hexadecimal key that the page begins behind; "" is the start.
            limit: Most blocks.
            tenant: Only of this tenant.
            group: Only of this group.

        Raises:
            ValueError: `after` is no key, or the limit is out of range.
            MasterUnavailable: A master did not answer; half a page would be a wrong one.
        """
        if not 1 <= limit <= PAGE_MAX:
            raise ValueError(f"limit must be between 1 and {PAGE_MAX}, not {limit}")
        request = m.ListBlocks(after=parse_key(after), limit=limit, tenant=tenant, group=group)
        pages = [link.ask(request, m.BlockList) for link in self._links]
        rows = list(merge(*map(_rows, pages), key=lambda row: row.key))
        more = len(rows) > limit or any(page.more for page in pages)
        # What lies behind the last key of a page that was cut is not known from that page.
        known = min((p.keys[-1].hex() for p in pages if p.more and p.keys), default=None)
        blocks = [row for row in rows if known is None or row.key <= known][:limit]
        return BlockPage(blocks=blocks, next_after=blocks[-1].key if more and blocks else None)

    def tenants(self) -> TenantPage:
        """Return what tenants may use, and do. Raises as `blocks`."""
        found: dict[str, m.TenantFigures] = {}
        for link in self._links:
            for row in link.ask(m.ListTenants(), m.TenantList).tenants:
                other = found.get(row.tenant)
                found[row.tenant] = row if other is None else _both(row, other)
        return TenantPage(tenants=[found[name] for name in sorted(found)])

    def writers(self) -> WriterPage:
        """Return who may still write to what, all masters added up. Raises as `blocks`."""
        found: dict[str, list[m.WriterFigures]] = {}
        for link in self._links:
            for row in link.ask(m.ListWriters(), m.WriterList).writers:
                found.setdefault(row.writer, []).append(row)
        return WriterPage(
            writers=[
                m.WriterFigures(
                    writer=name,
                    open_bytes=sum(row.open_bytes for row in rows),
                    quarantined_bytes=sum(row.quarantined_bytes for row in rows),
                )
                for name, rows in sorted(found.items())
            ]
        )

    # -- orders -------------------------------------------------------------------------------

    def drain(
        self, node: str, *, cancel: bool = False, fewer_copies: bool = False, again: bool = False
    ) -> DrainReport:
        """Move everything away from a node, or stop that; return how far it is.

        Args:
            node: Its whole name.
            cancel: Stop; what was moved stays where it is.
            fewer_copies: From now on one copy elsewhere is enough, however many were wanted.
            again: Do not begin anew what somebody cancelled.

        Raises:
            MasterRefused: No master knows the node.
            MasterUnavailable: A master did not answer; asking again goes on where it was.
        """
        request = m.Drain(node, cancel=cancel, fewer_copies=fewer_copies, again=again)
        reports: list[m.Draining] = []
        unknown: MasterRefused | None = None
        for link in self._links:
            try:
                reports.append(link.ask(request, m.Draining))
            except MasterRefused as error:
                if error.reason != m.RefusalReason.UNKNOWN_NODE:
                    raise
                unknown = error
        if not reports and unknown is not None:
            raise unknown
        return report_of(node, reports)

    def rebalance(self, nbytes_max: int) -> RebalanceReport:
        """Move blocks from full segments to empty ones, at most so many bytes in all."""
        _check_bytes("nbytes_max", nbytes_max)
        each = -(-nbytes_max // len(self._links))
        done = [link.ask(m.Rebalance(each), m.Done).count for link in self._links]
        return RebalanceReport(planned=sum(done))

    def set_quota(self, tenant: str, nbytes: int | None) -> None:
        """Let a tenant use so many bytes of the whole pool; None: as many as there are."""
        if nbytes is not None:
            _check_bytes("a quota", nbytes)
        each = None if nbytes is None else -(-nbytes // len(self._links))
        for link in self._links:
            link.ask(m.SetQuota(tenant, each), m.Done)

    def confirm_dead(self, writer: str) -> None:
        """Tell the masters that an incarnation certainly runs no more: they reuse its places.

        If it does run, what it still writes lands in others' blocks; checksums find that.
        """
        for link in self._links:
            link.ask(m.Fence([writer], dead=True), m.Done)

    def report_corrupt(self, key: str, where: m.NodeAddress, offset: int) -> int:
        """Tell the master that holds a key of a copy with wrong bytes; return how many went."""
        name = parse_key(key)
        request = m.ReportBad(
            client=self.name,
            keys=[name],
            nodes=[where.node],
            offsets=[offset],
            corrupt=[True],
            segments=[where.segment],
        )
        return sum(link.ask(request, m.Done).count for link in self._links)


def parse_key(text: str) -> bytes:
    """Return the key that hexadecimal text names; "" is no key.

    Raises:
        ValueError: It is neither.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if text and len(key) != KEY_BYTES:
        raise ValueError(f"a key is {2 * KEY_BYTES} hexadecimal digits, not {text!r}")
    return key


def _problem_of(address: str, error: KVStoreError) -> str:
    silent = isinstance(error.__cause__, RpcTimeout)
    return why_silent(address) if silent else str(error)


def _check_bytes(what: str, nbytes: int) -> None:
    if not 0 <= nbytes <= BYTES_MAX:
        raise ValueError(f"{what} must be in [0, {BYTES_MAX}], and is {nbytes}")


def _rows(page: m.BlockList) -> Iterator[BlockReport]:
    for i, key in enumerate(page.keys):
        offsets = page.offsets[i] if page.offsets else [0] * len(page.copies[i])
        yield BlockReport(
            key=key.hex(),
            nbytes=page.lengths[i],
            checksum=page.checksums[i] if page.checksums else 0,
            chunk_bytes=page.chunk_bytes[i] if page.chunk_bytes else 0,
            pin=page.pins[i].name.lower(),
            leased=page.leased[i],
            tenant=page.tenants[i],
            group=page.groups[i],
            copies=[
                _copy(page.nodes[node], offset)
                for node, offset in zip(page.copies[i], offsets, strict=True)
            ],
        )


def _copy(where: m.NodeAddress, offset: int) -> CopyReport:
    return CopyReport(
        node=where.node,
        address=where.address,
        segment=where.segment,
        medium=str(where.medium),
        offset=offset,
    )


def _added_up(figures: Sequence[m.SegmentFigures]) -> list[SegmentReport]:
    shares: dict[tuple[str, int], list[m.SegmentFigures]] = {}
    for row in figures:
        shares.setdefault((row.where.node, row.where.segment), []).append(row)
    return [
        SegmentReport(
            node=node,
            segment=segment,
            medium=str(rows[0].where.medium),
            address=rows[0].where.address,
            domain=rows[0].domain,
            capacity_bytes=sum(row.capacity_bytes for row in rows),
            free_bytes=sum(row.free_bytes for row in rows),
            largest_free_bytes=max(row.largest_free_bytes for row in rows),
            blocks=sum(row.blocks for row in rows),
            silent_s=max(row.silent_s for row in rows),
            draining=any(row.draining for row in rows),
        )
        for (node, segment), rows in sorted(shares.items())
    ]


def _both(row: m.TenantFigures, other: m.TenantFigures) -> m.TenantFigures:
    unlimited = row.quota_bytes is None or other.quota_bytes is None
    return m.TenantFigures(
        tenant=row.tenant,
        quota_bytes=None if unlimited else (row.quota_bytes or 0) + (other.quota_bytes or 0),
        used_bytes=row.used_bytes + other.used_bytes,
        blocks=row.blocks + other.blocks,
    )
