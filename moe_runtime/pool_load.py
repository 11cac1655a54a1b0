"""What a worker tells the front about its ends of the KV pool, with each `Load` message."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore import StoreClient, StoreNode


def pool_counters(client: StoreClient, node: StoreNode) -> dict[str, float]:
    """Return what an open client and an open node of this life have counted."""
    statistics = node.statistics()
    groups = {
        "pool_client": asdict(client.statistics()),
        "pool_scrub": asdict(statistics.scrub),
        "pool_copies": asdict(statistics.copies),
    }
    return {
        f"{group}_{name}": float(value)
        for group, counts in groups.items()
        for name, value in counts.items()
        if name != "last_pass_s"  # no counter
    }
