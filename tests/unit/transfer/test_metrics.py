"""An engine's statistics as Prometheus reads them, beside the statistics themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engines import BACKENDS, engine_pair
from transfer import Access, AccessRefused, TransferEngine, allocate
from transfer.metrics import METRICS, TransferCollector

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "transfer-metrics.md"


def scraped(engine: TransferEngine) -> dict[tuple[str, ...], float]:
    """All samples, by name and sorted labels."""
    registry = CollectorRegistry()
    registry.register(TransferCollector(engine.statistics))
    text = generate_latest(registry).decode()
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for value in [sample.value]
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_scraped_is_what_was_counted(backend: str) -> None:
    memories = [allocate(4096), allocate(4096)]
    with engine_pair(backend) as (one, two):
        source, target = one.register(memories[0]), two.register(memories[1])
        key = two.offer(target, to=one.name, access=Access.WRITE)
        peer = one.peer(two.name)
        for _ in range(3):
            one.write(peer, source, key, 0, 0, 1000, immediate=7).wait(20.0)
        two.expect({(one.name, 7): 3}, timeout_s=20.0)
        with pytest.raises(AccessRefused):
            one.read(peer, source, key, 0, 0, 1).wait(20.0)
        used = one.explain(peer).backend
        told, there = scraped(one), scraped(two)
        assert told["moe_transfer_bytes_total", f"backend={used}", "operation=write"] == 3000
        assert told["moe_transfer_bytes_total", f"backend={used}", "operation=read"] == 0
        assert told["moe_transfer_operations_total", f"backend={used}", "outcome=done"] >= 3
        assert told["moe_transfer_immediates_sent_total", f"backend={used}"] == 3
        assert told["moe_transfer_refused_total", f"backend={used}"] >= 1
        assert told["moe_transfer_class_bytes_total", "priority=activations"] >= 3000
        assert told["moe_transfer_peers",] == 1
        assert there["moe_transfer_immediates_received_total",] == 3
        assert there["moe_transfer_offers",] == 1
        for rail in one.statistics().rails:
            labels = (f"peer={two.name}", f"rail={rail.rail}")
            states = {s: told["moe_transfer_rail_state", *labels, f"state={s}"]
                      for s in ("healthy", "cooling", "probing")}  # fmt: skip
            assert sum(states.values()) == states[rail.state] == 1
    for memory in memories:
        memory.close()


def test_the_document_has_all_metrics() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(moe_transfer_\w+)` \| (\w+) \| (.*?) \|", text, re.MULTILINE)
    expected = [
        (
            spec.name + "_total" * ("Counter" in spec.kind.__name__),
            "counter" if "Counter" in spec.kind.__name__ else "gauge",
            ", ".join(f"`{label}`" for label in spec.labels),
        )
        for spec in METRICS
    ]
    assert documented == expected
