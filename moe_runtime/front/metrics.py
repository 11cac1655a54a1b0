"""Prometheus metrics: the names that vLLM dashboards read, and our own.

Counters and histograms are fed as things happen; gauges are read from journal and router when
scraped, so a worker that is gone leaves no stale value. `engine` is the rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moe_runtime.front.journal_records import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from moe_runtime.front.journal import Journal
    from moe_runtime.front.journal_records import Entry
    from moe_runtime.front.router import Router

LATENCY_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
#: name without prefix -> help; all in seconds
LATENCIES = {
    "time_to_first_token_seconds": "From acceptance to the first token.",
    "inter_token_latency_seconds": "Between two deliveries of tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time per token after the first.",
    "e2e_request_latency_seconds": "From acceptance to the end.",
    "request_queue_time_seconds": "From acceptance to the first worker.",
    "request_prefill_time_seconds": "From the first worker to the first token.",
    "request_decode_time_seconds": "From the first token to the end.",
}
#: counters of a worker's `Load` that have a vLLM name
WORKER_COUNTERS = {"preemptions": "vllm:num_preemptions"}
WORKER_COUNTER_NAMES_MAX = 64
#: gauges of a worker's `Load` -> metric, help; one time series for each rank
WORKER_GAUGES = {
    "dispatch_rows_per_s": (
        "moe_runtime_dispatch_rows_per_second",
        "Rows that arrived for the rank's experts, decayed rate.",
    ),
    "expert_load_ratio": (
        "moe_runtime_expert_load_ratio",
        "Busiest expert of the rank over the mean of its layer's there.",
    ),
}


class Metrics:
    """One registry per front, so that several can live in one process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "front"}
        self._histograms = {
            name: self._histogram(name, text, LATENCY_BUCKETS_S) for name, text in LATENCIES.items()
        }
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS
        )
        self._output_length = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKEN_BUCKETS
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens whose KV was found and not computed."
        )
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self.resubmitted = self._counter(
            "moe_runtime_requests_resubmitted", "Times a request went on at another worker."
        )
        self.refused = self._counter("moe_runtime_requests_refused", "Requests refused with 429.")
        self._worker_seen: dict[str, dict[str, float]] = {}
        self.worker_totals: dict[str, float] = {}

    def watch(self, journal: Journal, router: Router) -> None:
        """Read gauges from these from now on."""
        labels = self._labels
        self.registry.register(_State(labels["model_name"], journal, router, self.worker_totals))

    def observe_tokens(self, count: int, *, now: float, previous: float | None) -> None:
        """Tokens of one request were delivered; the ones before at `previous`."""
        self._generation_tokens.inc(count)
        if previous is not None:
            self._histograms["inter_token_latency_seconds"].observe(now - previous)

    def observe_closed(self, entry: Entry) -> None:
        """A request ended."""
        reasons = {RequestState.CANCELLED: "abort", RequestState.FAILED: "error"}
        num_output = len(entry.generated)
        exhausted = num_output >= entry.sampling.max_tokens
        reason = reasons.get(entry.state, "length" if exhausted else "stop")
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._prompt_tokens.inc(len(entry.prompt_ids))
        self._prompt_length.observe(len(entry.prompt_ids))
        self._output_length.observe(num_output)
        if entry.cached_tokens is not None:
            self._prefix_queries.inc(len(entry.prompt_ids))
            self._prefix_hits.inc(entry.cached_tokens)
        for name, seconds in _latencies(entry).items():
            self._histograms[name].observe(seconds)

    def add_worker_counters(self, incarnation: str, counters: Mapping[str, float]) -> None:
        """Add what a worker counted since it last said so; counters start at 0 with each life."""
        seen = self._worker_seen.setdefault(incarnation, {})
        for name, value in counters.items():
            if name in self.worker_totals or len(self.worker_totals) < WORKER_COUNTER_NAMES_MAX:
                fresh = max(0.0, value - seen.get(name, 0.0))
                self.worker_totals[name] = self.worker_totals.get(name, 0.0) + fresh
                seen[name] = value

    def forget_worker(self, incarnation: str) -> None:
        """A worker is gone; what it counted stays in the totals."""
        self._worker_seen.pop(incarnation, None)

    def expose(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(name, text, list(self._labels), registry=self.registry)
        return family.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(
            f"vllm:{name}",
            text,
            list(self._labels),
            registry=self.registry,
            buckets=tuple(buckets),
        )
        return family.labels(**self._labels)


def _latencies(entry: Entry) -> dict[str, float]:
    assert entry.closed_at is not None
    found = {"e2e_request_latency_seconds": entry.closed_at - entry.accepted_at}
    assigned, first = entry.first_assigned_at, entry.first_token_at
    if assigned is not None:
        found["request_queue_time_seconds"] = assigned - entry.accepted_at
    if assigned is not None and first is not None:
        found["time_to_first_token_seconds"] = first - entry.accepted_at
        found["request_prefill_time_seconds"] = first - assigned
        decode_s = entry.last_progress_at - first
        found["request_decode_time_seconds"] = decode_s
        if len(entry.generated) > 1:
            found["request_time_per_output_token_seconds"] = decode_s / (len(entry.generated) - 1)
    return found


class _State(Collector):
    """Gauges and totals as they are at the scrape."""

    def __init__(
        self, model_name: str, journal: Journal, router: Router, worker_totals: Mapping[str, float]
    ) -> None:
        self._model_name = model_name
        self._journal = journal
        self._router = router
        self._worker_totals = worker_totals

    def collect(self) -> Iterator[Metric]:
        yield from self._loads()
        yield from self._dispatch_loads()
        yield self._gauge("moe_runtime_view_epoch", "Current view.", self._router.epoch)
        yield self._gauge("moe_runtime_members", "In the view.", len(self._router.members))
        yield self._gauge(
            "moe_runtime_workers_routable", "Take requests.", len(self._router.routable())
        )
        yield self._gauge("moe_runtime_journal_open", "Open requests.", len(self._journal))
        events = CounterMetricFamily(
            "moe_runtime_journal_events", "What happened to requests.", labels=["event"]
        )
        for event, count in sorted(self._journal.counts.items()):
            events.add_metric([event], count)
        yield events
        worker_events = CounterMetricFamily(
            "moe_runtime_worker_events", "Counters of all workers, summed.", labels=["event"]
        )
        for event, total in sorted(self._worker_totals.items()):
            worker_events.add_metric([event], total)
        yield worker_events
        for event, name in WORKER_COUNTERS.items():
            family = CounterMetricFamily(
                name, f"Sum of all workers' {event}.", labels=["model_name"]
            )
            family.add_metric([self._model_name], self._worker_totals.get(event, 0.0))
            yield family

    def _loads(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        running = GaugeMetricFamily("vllm:num_requests_running", "Being computed.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Waiting.", labels=labels)
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "KV pages in use, 0-1.", labels=labels
        )
        waiting.add_metric([self._model_name, "front"], len(self._journal.queued()))
        for name, worker in sorted(self._router.workers.items()):
            load = worker.load
            if load is None or name not in self._router.members:
                continue
            values = [self._model_name, str(worker.hello.rank)]
            running.add_metric(values, load.running)
            waiting.add_metric(values, load.waiting)
            usage.add_metric(values, 1 - load.free_pages / max(1, load.num_pages))
        yield from (running, waiting, usage)

    def _dispatch_loads(self) -> Iterator[Metric]:
        workers = [
            (str(worker.hello.rank), worker.load.gauges)
            for name, worker in sorted(self._router.workers.items())
            if worker.load is not None and name in self._router.members
        ]
        for gauge, (name, text) in WORKER_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
            for rank, gauges in workers:
                if gauge in gauges:
                    family.add_metric([self._model_name, rank], gauges[gauge])
            yield family
        rates = [gauges.get("dispatch_rows_per_s", 0.0) for _, gauges in workers]
        even = sum(rates) / len(rates) if rates else 0.0
        yield self._gauge(
            "moe_runtime_rank_load_ratio",
            "Busiest rank's rows over the mean of the ranks; 1 is even.",
            max(rates) / even if even else 1.0,
        )

    @staticmethod
    def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, value=value)
