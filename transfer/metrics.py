"""An engine's statistics as Prometheus metrics.

    registry.register(TransferCollector(engine.statistics))

They are read when they are scraped, so nothing is counted twice, and rails of peers that are gone
leave no stale values. METRICS is the whole list; docs/transfer-metrics.md shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from transfer.statistics import TransferStatistics

LabelsT = TypeVar("LabelsT", bound=tuple[str, ...])
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric. A counter's name gets `_total` when it is told."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return an empty family of this metric."""
        return self.kind(self.name, self.help, labels=self.labels)


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(
        name=f"moe_transfer_{name}", kind=CounterMetricFamily, labels=labels, help=text
    )


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=f"moe_transfer_{name}", kind=GaugeMetricFamily, labels=labels, help=text)


BYTES: Final = _counter("bytes", "Moved by our writes and reads.", "backend", "operation")
SERVED: Final = _counter("served_bytes", "Moved by peers through our thread.", "backend")
OPERATIONS: Final = _counter("operations", "Writes and reads of ours.", "backend", "outcome")
# Names of `BackendStatistics` -> metric.
OF_BACKENDS: Final = {
    "immediates": _counter("immediates_sent", "Immediates of our writes.", "backend"),
    "resends": _counter("resends", "Slices sent again after a connection broke.", "backend"),
    "refused": _counter("refused", "Accesses refused, of peers and of ours.", "backend"),
}
# Names of `PriorityStatistics` -> metric.
OF_CLASSES: Final = {
    "operations": _counter("class_operations", "Writes and reads of a class.", "priority"),
    "bytes": _counter("class_bytes", "That they were asked to move.", "priority"),
    "queued": _counter("class_queued", "Of these operations, over rails.", "priority"),
    "queue_s": _counter("class_queue_seconds", "Waited before the first slice left.", "priority"),
}
# Names of `RailStatistics` -> metric.
OF_RAILS: Final = {
    "bytes": _counter("rail_bytes", "Of slices that ended over a rail.", "peer", "rail"),
    "slices": _counter("rail_slices", "Slices that ended over a rail.", "peer", "rail"),
    "failures": _counter("rail_failures", "Breaks, stalls, refusals.", "peer", "rail"),
    "retries": _counter("rail_retries", "Slices lost and sent again.", "peer", "rail"),
    "bandwidth": _gauge(
        "rail_bandwidth_bytes_per_second", "Estimate; 0 before any.", "peer", "rail"
    ),
    "bytes_in_flight": _gauge("rail_bytes_in_flight", "Posted and not ended.", "peer", "rail"),
}
RAIL_STATE: Final = _gauge("rail_state", "1 for the state a rail is in.", "peer", "rail", "state")
RAIL_STATES: Final = ("healthy", "cooling", "probing")
# Names of `TransferStatistics` -> metric.
TOTALS: Final = {
    "immediates_received": _counter("immediates_received", "Counted here."),
    "refused_handshakes": _counter("refused_handshakes", "Callers that were not let in."),
    "malformed": _counter("malformed_connections", "Closed for bytes that make no sense."),
    "notifies_received": _counter("notifies_received", "Given to the handlers."),
    "control_resumes": _counter("control_resumes", "Control connections that went on elsewhere."),
    "peers": _gauge("peers", "Connected now."),
    "offers": _gauge("offers", "Windows of our memory that are offered now."),
}
METRICS: Final = (
    *(BYTES, SERVED, OPERATIONS),
    *OF_BACKENDS.values(),
    *OF_CLASSES.values(),
    *OF_RAILS.values(),
    RAIL_STATE,
    *TOTALS.values(),
)


class TransferCollector(Collector):
    """The statistics of one engine. Thread-safe.

    Args:
        statistics: `TransferEngine.statistics` of it.
    """

    def __init__(self, statistics: Callable[[], TransferStatistics]) -> None:
        self._statistics = statistics

    def describe(self) -> Iterable[Metric]:
        """Name the metrics without counting."""
        return [spec.family() for spec in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Read the statistics once."""
        now = self._statistics()
        yield from _backends(now)
        classes = {(priority.name.lower(),): row for priority, row in now.priorities.items()}
        yield from _columns(OF_CLASSES, classes)
        rails = {(row.peer, row.rail): row for row in now.rails}
        yield from _columns(OF_RAILS, rails)
        states = RAIL_STATE.family()
        for labels, rail in rails.items():
            for state in RAIL_STATES:
                states.add_metric([*labels, state], float(rail.state == state))
        yield states
        yield from _columns(TOTALS, {(): now})


def _backends(now: TransferStatistics) -> Iterator[Metric]:
    moved, served, operations = BYTES.family(), SERVED.family(), OPERATIONS.family()
    for backend, row in now.backends.items():
        moved.add_metric([backend, "write"], row.bytes_written)
        moved.add_metric([backend, "read"], row.bytes_read)
        served.add_metric([backend], row.bytes_served)
        operations.add_metric([backend, "done"], row.operations - row.failures)
        operations.add_metric([backend, "failed"], row.failures)
    yield from (moved, served, operations)
    yield from _columns(OF_BACKENDS, {(name,): row for name, row in now.backends.items()})


def _columns(specs: Mapping[str, MetricSpec], rows: Mapping[LabelsT, object]) -> Iterator[Metric]:
    """Return a family per figure, with a value per row."""
    for figure, spec in specs.items():
        family = spec.family()
        for labels, row in rows.items():
            family.add_metric(list(labels), float(getattr(row, figure)))
        yield family
