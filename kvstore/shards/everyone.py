"""What all masters are asked: membership, figures, lists, administration.

Every master has an equal share of each segment and of each quota, so figures add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import asdict, replace

from kvstore.shards.plan import Merge, Merged, NodeNames, Outcome, Plan, ReplyT, arrived
from kvstore.wire import messages as m


def plan_for_everyone(request: m.Request, num_shards: int) -> Plan | None:
    """Return the plan of a request that goes to all masters, or None if this is none."""
    found = _MERGES.get(type(request))
    if found is None:
        return None
    part = _share(request, num_shards)
    return Plan(parts=tuple((shard, part) for shard in range(num_shards)), merge=found(request))


def _share(request: m.Request, num_shards: int) -> m.Request:
    if isinstance(request, m.Rebalance):
        return replace(request, nbytes_max=-(-request.nbytes_max // num_shards))
    if isinstance(request, m.SetQuota) and request.nbytes is not None:
        return replace(request, nbytes=-(-request.nbytes // num_shards))
    return request


def _all(
    request: m.Request, expected: type[ReplyT], join: Callable[[list[ReplyT]], m.Reply]
) -> Merge:
    operation = type(request).__name__

    def merge(outcomes: Sequence[Outcome]) -> Merged:
        return Merged(reply=join([arrived(operation, o, expected) for o in outcomes]))

    return merge


def _summed(request: m.Request) -> Merge:
    return _all(request, m.Done, lambda replies: m.Done(sum(reply.count for reply in replies)))


def _largest(request: m.Request) -> Merge:
    return _all(request, m.Done, lambda replies: m.Done(max(reply.count for reply in replies)))


def _figures(request: m.Request) -> Merge:
    def join(replies: list[m.MasterStatistics]) -> m.Reply:
        columns = [asdict(reply) for reply in replies]
        total = {name: sum(column[name] for column in columns) for name in columns[0]}
        return m.MasterStatistics(**{**total, "nodes": max(reply.nodes for reply in replies)})

    return _all(request, m.MasterStatistics, join)


def _entered(request: m.Request) -> Merge:
    def join(replies: list[m.Entered]) -> m.Reply:
        used = sum(reply.used_bytes for reply in replies)
        return m.Entered(replies[0].tenant, _total([r.quota_bytes for r in replies]), used)

    return _all(request, m.Entered, join)


def _drained(request: m.Request) -> Merge:
    def join(replies: list[m.Draining]) -> m.Reply:
        columns = [asdict(reply) for reply in replies]
        return m.Draining(**{name: sum(column[name] for column in columns) for name in columns[0]})

    return _all(request, m.Draining, join)


def _tenants(request: m.Request) -> Merge:
    def join(replies: list[m.TenantList]) -> m.Reply:
        found: dict[str, list[m.TenantFigures]] = {}
        for reply in replies:
            for figures in reply.tenants:
                found.setdefault(figures.tenant, []).append(figures)
        return m.TenantList(
            [
                m.TenantFigures(
                    tenant,
                    _total([part.quota_bytes for part in parts]),
                    sum(part.used_bytes for part in parts),
                    sum(part.blocks for part in parts),
                )
                for tenant, parts in sorted(found.items())
            ]
        )

    return _all(request, m.TenantList, join)


def _segments(request: m.Request) -> Merge:
    def join(replies: list[m.SegmentList]) -> m.Reply:
        found: dict[m.NodeAddress, list[m.SegmentFigures]] = {}
        for reply in replies:
            for figures in reply.segments:
                found.setdefault(figures.where, []).append(figures)
        return m.SegmentList([_whole_segment(parts) for parts in found.values()])

    return _all(request, m.SegmentList, join)


def _whole_segment(parts: list[m.SegmentFigures]) -> m.SegmentFigures:
    return m.SegmentFigures(
        where=parts[0].where,
        domain=parts[0].domain,
        capacity_bytes=sum(part.capacity_bytes for part in parts),
        free_bytes=sum(part.free_bytes for part in parts),
        largest_free_bytes=max(part.largest_free_bytes for part in parts),
        blocks=sum(part.blocks for part in parts),
        silent_s=max(part.silent_s for part in parts),
        draining=any(part.draining for part in parts),
    )


def _blocks(request: m.Request) -> Merge:
    """Merge pages of keys: beyond the last key that all incomplete pages reach, nothing is sure."""
    assert isinstance(request, m.ListBlocks), request

    def join(replies: list[m.BlockList]) -> m.Reply:
        names = NodeNames()
        rows = []
        for reply in replies:
            idx = names.translate(reply.nodes)
            for row, key in enumerate(reply.keys):
                rows.append((key, reply, row, [idx[copy] for copy in reply.copies[row]]))
        rows.sort(key=lambda row: row[0])
        bounds = [reply.keys[-1] for reply in replies if reply.more and reply.keys]
        sure = [row for row in rows if not bounds or row[0] <= min(bounds)][: request.limit]

        def column(name: str) -> list:  # type: ignore[type-arg]
            full = all(getattr(reply, name) for _, reply, _, _ in sure)
            return [getattr(reply, name)[row] for _, reply, row, _ in sure] if full else []

        return m.BlockList(
            **{name: column(name) for name in _BLOCK_COLUMNS},
            nodes=names.nodes,
            copies=[copies for _, _, _, copies in sure],
            more=len(sure) < len(rows) or any(reply.more for reply in replies),
        )

    return _all(request, m.BlockList, join)


_BLOCK_COLUMNS = (
    *("keys", "lengths", "pins", "leased", "tenants", "groups"),
    *("offsets", "checksums", "chunk_bytes"),
)


def _total(quotas: list[int | None]) -> int | None:
    known = [quota for quota in quotas if quota is not None]
    return sum(known) if len(known) == len(quotas) else None


_MERGES: dict[type, Callable[[m.Request], Merge]] = {
    m.Drain: _drained,
    m.Enter: _entered,
    m.Fence: _summed,
    m.ListBlocks: _blocks,
    m.ListSegments: _segments,
    m.ListTenants: _tenants,
    m.Observe: _figures,
    m.Rebalance: _summed,
    m.SetQuota: _largest,
}
