"""A store master that answers what a test says: blocks, segments and tenants as plain data."""

from __future__ import annotations

from typing import Any

from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer, seal
from transfer.control import RpcServer

SECRET = b"only the members of this cluster know it"


def figures(**values: int) -> m.MasterStatistics:
    zeros = dict.fromkeys(m.MasterStatistics.__struct_fields__, 0)
    return m.MasterStatistics(**{**zeros, **values})


def segment(node: str, number: int = 0, **values: Any) -> m.SegmentFigures:
    defaults = {
        "domain": "",
        "capacity_bytes": 1 << 20,
        "free_bytes": 1 << 19,
        "largest_free_bytes": 1 << 18,
        "blocks": 3,
        "silent_s": 0.1,
        "draining": False,
    }
    where = m.NodeAddress(node, "127.0.0.1:1", number, m.Medium.DRAM)
    return m.SegmentFigures(where=where, **{**defaults, **values})


class ScriptedMaster:
    """Answers administrators from `keys`, `segments`, `statistics`, `tenants` and `drains`."""

    def __init__(self, keys=(), *, segments=(), tenants=(), statistics=None) -> None:
        self.keys = sorted(keys)
        self.segments = list(segments)
        self.tenants = list(tenants)
        self.statistics = statistics or figures(blocks=len(self.keys))
        self.drains: dict[str, list[m.Draining]] = {}
        self.writers: list[m.WriterFigures] = []
        self.asked: list[m.Request] = []
        self._server = RpcServer(SECRET, self._handle, host="127.0.0.1", port=0)

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> ScriptedMaster:
        self._server.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.close()

    def answer(self, request: m.Request) -> m.Reply:
        self.asked.append(request)
        match request:
            case m.Observe():
                return self.statistics
            case m.ListSegments():
                return m.SegmentList(self.segments)
            case m.ListTenants():
                return m.TenantList(self.tenants)
            case m.ListBlocks():
                return self._page(request)
            case m.ListWriters():
                return m.WriterList(self.writers)
            case m.Fence():
                self.writers = [w for w in self.writers if w.writer not in request.incarnations]
                return m.Done(1)
            case m.Drain():
                reports = self.drains.get(request.node)
                if reports is None:
                    return m.Refused(m.RefusalReason.UNKNOWN_NODE, f"no node {request.node}")
                return reports[0] if len(reports) == 1 else reports.pop(0)
            case m.SetQuota() if request.tenant == "nobody":
                return m.Refused(m.RefusalReason.UNKNOWN_TENANT, "no tenant nobody")
            case m.Rebalance() | m.SetQuota():
                return m.Done(2)
        return m.Refused(m.RefusalReason.MALFORMED, type(request).__name__)

    def _page(self, request: m.ListBlocks) -> m.BlockList:
        left = [key for key in self.keys if key > request.after]
        keys = left[: request.limit]
        one = [0] * len(keys)
        return m.BlockList(
            keys=keys,
            lengths=[100] * len(keys),
            pins=[m.Pin.NONE] * len(keys),
            leased=[False] * len(keys),
            tenants=[request.tenant or ""] * len(keys),
            groups=[request.group or ""] * len(keys),
            nodes=[m.NodeAddress("some-node", "127.0.0.1:1")],
            copies=[[0]] * len(keys),
            more=len(left) > request.limit,
            offsets=[[0]] * len(keys),
            checksums=one,
            chunk_bytes=one,
        )

    def _handle(self, identity: str, payload: bytes) -> bytes:
        return seal(Answer(reply=self.answer(m.decode_request(payload))))
