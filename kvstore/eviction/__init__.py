"""Which block makes room for another: one protocol, and one file per policy."""

from __future__ import annotations

from configs.schema import Eviction
from kvstore.eviction.lru import LeastRecentlyUsed
from kvstore.eviction.named import NamedPolicy
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.prefix_aware import PrefixAware
from kvstore.eviction.rows import EvictionRows, RowQueue
from kvstore.eviction.s3_fifo import S3Fifo

__all__ = [
    "EvictionPolicy",
    "EvictionRows",
    "LeastRecentlyUsed",
    "NamedPolicy",
    "PrefixAware",
    "RowQueue",
    "S3Fifo",
    "named_policy",
    "new_policy",
]


def new_policy(chosen: Eviction, rows: EvictionRows) -> EvictionPolicy:
    """Make an empty policy of the kind that the configuration names, over these columns."""
    match chosen:
        case Eviction.LRU:
            return LeastRecentlyUsed(rows)
        case Eviction.S3_FIFO:
            return S3Fifo(rows)
        case Eviction.PREFIX_AWARE:
            return PrefixAware(rows)


def named_policy(chosen: Eviction) -> NamedPolicy:
    """Make an empty policy for blocks known by name."""
    rows = EvictionRows()
    return NamedPolicy(rows, new_policy(chosen, rows))
