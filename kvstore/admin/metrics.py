"""The store's Prometheus metrics: of its masters, of a node, of a client.

Each collector reads its figures when it is scraped, so nothing is counted twice and what is gone
leaves no stale value. METRICS is the whole list; docs/kvstore-admin.md shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvstore.errors import KVStoreError
from transfer.metrics import MetricSpec

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from kvstore.admin.reports import MasterReport
    from kvstore.admin.store_admin import StoreAdmin
    from kvstore.node.store_node import NodeStatistics


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind=GaugeMetricFamily, labels=labels, help=text)


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind=CounterMetricFamily, labels=labels, help=text)


MASTER_UP: Final = _gauge("moe_kvstore_master_up", "1 if the master answered.", "master")
# Names of `MasterStatistics` -> metric.
MASTER_GAUGES: Final = {
    "nodes": _gauge("moe_kvstore_nodes", "Store nodes in the pool.", "master"),
    "blocks": _gauge("moe_kvstore_blocks", "Blocks that can be found.", "master"),
    "leases": _gauge("moe_kvstore_leases", "Leases running.", "master"),
    "open_puts": _gauge("moe_kvstore_open_puts", "Puts between grant and commit.", "master"),
    "segments": _gauge("moe_kvstore_segments", "Segments lent.", "master"),
    "copies": _gauge("moe_kvstore_copies", "Copies of blocks.", "master"),
    "soft_pinned_blocks": _gauge("moe_kvstore_soft_pinned_blocks", "Softly pinned.", "master"),
    "hard_pinned_blocks": _gauge("moe_kvstore_hard_pinned_blocks", "Pinned for good.", "master"),
    "capacity_bytes": _gauge("moe_kvstore_capacity_bytes", "Bytes lent.", "master"),
}
MEDIA: Final = ("dram", "cxl", "ssd")
# `<medium>_<figure>` of `MasterStatistics` -> metric.
MEDIUM_GAUGES: Final = {
    "capacity_bytes": _gauge(
        "moe_kvstore_medium_capacity_bytes", "Bytes lent in a medium.", "master", "medium"
    ),
    "free_bytes": _gauge(
        "moe_kvstore_medium_free_bytes", "Bytes of a medium in no copy.", "master", "medium"
    ),
}
# `<state>_bytes` of `MasterStatistics`; together they are the capacity.
STATES: Final = ("free", "committed", "open", "retired", "quarantined")
STATE_BYTES: Final = _gauge(
    "moe_kvstore_bytes",
    "Memory by what it is used for; adds up to the capacity.",
    "master",
    "state",
)
LOOKUPS: Final = _counter(
    "moe_kvstore_lookups", "Blocks looked up.", "master", "outcome"
)  # hit, missed
CHANGES: Final = _counter(
    "moe_kvstore_block_changes", "What happened to copies of blocks.", "master", "change"
)
REFUSALS: Final = _counter(
    "moe_kvstore_put_refusals",
    "Blocks of puts that got no place, as often as they were asked for.",
    "master",
    "reason",
)
# `<reason>_blocks` of `MasterStatistics`.
REFUSAL_REASONS: Final = ("no_space", "too_large", "over_quota")
LOOKUP_OUTCOMES: Final = ("hit", "missed")
# `<change>_blocks` of `MasterStatistics`.
CHANGE_WORDS: Final = (
    *("stored", "evicted", "corrupt", "unreachable", "lost"),
    *("moved", "demoted", "promoted", "replicated"),
)
SEGMENT_LABELS: Final = ("node", "segment", "medium")
SEGMENT_GAUGES: Final = {
    "capacity_bytes": _gauge(
        "moe_kvstore_segment_capacity_bytes", "Bytes lent in a segment.", *SEGMENT_LABELS
    ),
    "free_bytes": _gauge(
        "moe_kvstore_segment_free_bytes", "Bytes of a segment in no block.", *SEGMENT_LABELS
    ),
    "largest_free_bytes": _gauge(
        "moe_kvstore_segment_largest_free_bytes", "The largest block that fits.", *SEGMENT_LABELS
    ),
    "blocks": _gauge("moe_kvstore_segment_blocks", "Copies in a segment.", *SEGMENT_LABELS),
    "silent_s": _gauge(
        "moe_kvstore_segment_silent_seconds", "Since its node was heard of.", *SEGMENT_LABELS
    ),
    "draining": _gauge("moe_kvstore_segment_draining", "1 if it is drained.", *SEGMENT_LABELS),
}
TENANT_BYTES: Final = _gauge("moe_kvstore_tenant_bytes", "What a tenant uses.", "tenant")
TENANT_QUOTA: Final = _gauge(
    "moe_kvstore_tenant_quota_bytes", "What a tenant may use, if limited.", "tenant"
)
CLIENT_BLOCKS: Final = _counter(
    "moe_kvstore_client_blocks", "Blocks by what became of them at this client.", "event"
)
NODE_EVENTS: Final = _counter("moe_kvstore_node_events", "What a store node counted.", "event")
NODE_SUSPENDED: Final = _gauge(
    "moe_kvstore_node_index_suspended",
    "1 if the disk takes no more of a segment's index: a restart would tell nothing of it.",
    "segment",
)

METRICS: Final = (
    MASTER_UP,
    *MASTER_GAUGES.values(),
    *MEDIUM_GAUGES.values(),
    STATE_BYTES,
    LOOKUPS,
    CHANGES,
    REFUSALS,
    *SEGMENT_GAUGES.values(),
    TENANT_BYTES,
    TENANT_QUOTA,
    CLIENT_BLOCKS,
    NODE_EVENTS,
    NODE_SUSPENDED,
)


_WORDS: Final = {
    LOOKUPS: LOOKUP_OUTCOMES,
    CHANGES: CHANGE_WORDS,
    REFUSALS: REFUSAL_REASONS,
}


class MasterCollector(Collector):
    """Figures of all masters, their segments and tenants. A master that is away has only `up`."""

    def __init__(self, admin: StoreAdmin) -> None:
        self._admin = admin

    def describe(self) -> Iterable[Metric]:
        """Name no metrics when registered: that would ask the masters."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Ask all masters once."""
        report = self._admin.status()
        up = MASTER_UP.family()
        for master in report.masters:
            up.add_metric([master.address], float(master.problem is None))
        yield up
        answered = [master for master in report.masters if master.problem is None]
        for name, spec in MASTER_GAUGES.items():
            yield _family(spec, answered, {name: ()})
        for name, spec in MEDIUM_GAUGES.items():
            yield _family(spec, answered, {f"{medium}_{name}": (medium,) for medium in MEDIA})
        yield _family(STATE_BYTES, answered, {f"{state}_bytes": (state,) for state in STATES})
        for spec, words in _WORDS.items():
            yield _family(spec, answered, {f"{word}_blocks": (word,) for word in words})
        segments = {name: spec.family() for name, spec in SEGMENT_GAUGES.items()}
        for segment in report.segments:
            labels = [segment.node, str(segment.segment), segment.medium]
            for name, family in segments.items():
                family.add_metric(labels, float(getattr(segment, name)))
        yield from segments.values()
        yield from self._tenants()

    def _tenants(self) -> Iterator[Metric]:
        used, quota = TENANT_BYTES.family(), TENANT_QUOTA.family()
        try:
            rows = self._admin.tenants().tenants
        except KVStoreError:  # `up` tells
            rows = []
        for row in rows:
            used.add_metric([row.tenant], row.used_bytes)
            if row.quota_bytes is not None:
                quota.add_metric([row.tenant], row.quota_bytes)
        yield from (used, quota)


def _family(
    spec: MetricSpec, masters: Sequence[MasterReport], labels: Mapping[str, tuple[str, ...]]
) -> Metric:
    """Return a metric of all masters; `labels` are those behind `master`, by figure."""
    family = spec.family()
    for master in masters:
        for figure, more in labels.items():
            family.add_metric([master.address, *more], master.figures.get(figure, 0))
    return family


class NodeCollector(Collector):
    """Counts of one store node: scrubbed blocks, copies, and indices that are suspended.

    Args:
        statistics: `StoreNode.statistics` of it.
    """

    def __init__(self, statistics: Callable[[], NodeStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Name the metrics without counting."""
        return (NODE_EVENTS.family(), NODE_SUSPENDED.family())

    def collect(self) -> Iterator[Metric]:
        """Read the statistics once."""
        now = self._statistics()
        events, suspended = NODE_EVENTS.family(), NODE_SUSPENDED.family()
        for group, counts in (("scrub", asdict(now.scrub)), ("copies", asdict(now.copies))):
            for name, value in counts.items():
                if name != "last_pass_s":  # no count
                    events.add_metric([f"{group}_{name.removesuffix('_blocks')}"], value)
        for number, segment in enumerate(now.segments):
            suspended.add_metric([str(number)], float(segment.log_suspended))
        yield from (events, suspended)


class CountsCollector(Collector):
    """The counts of one client (CLIENT_BLOCKS) or node (NODE_EVENTS) of this process.

    Args:
        spec: One of the two.
        statistics: Returns the counts, as a dataclass, a struct or a mapping of numbers.
    """

    def __init__(self, spec: MetricSpec, statistics: Callable[[], Any]) -> None:
        self._spec = spec
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Name the metric without counting."""
        return (self._spec.family(),)

    def collect(self) -> Iterator[Metric]:
        """Read the counts."""
        family = self._spec.family()
        for name, value in _as_mapping(self._statistics()).items():
            if isinstance(value, int | float):
                family.add_metric([name.removesuffix("_blocks")], value)
        yield family


def _as_mapping(statistics: Any) -> Mapping[str, Any]:
    if isinstance(statistics, Mapping):
        return statistics
    if is_dataclass(statistics) and not isinstance(statistics, type):
        return asdict(statistics)
    return msgspec.structs.asdict(statistics)
