"""Which block makes room for another: one protocol, and one file per policy."""

from __future__ import annotations

from configs.schema import Eviction
from kvstore.eviction.lru import LeastRecentlyUsed
from kvstore.eviction.policy import EvictionPolicy
from kvstore.eviction.prefix_aware import PrefixAware
from kvstore.eviction.s3_fifo import S3Fifo

__all__ = ["EvictionPolicy", "LeastRecentlyUsed", "PrefixAware", "S3Fifo", "new_policy"]


def new_policy(chosen: Eviction) -> EvictionPolicy:
    """Make an empty policy of the kind that the configuration names."""
    match chosen:
        case Eviction.LRU:
            return LeastRecentlyUsed()
        case Eviction.S3_FIFO:
            return S3Fifo()
        case Eviction.PREFIX_AWARE:
            return PrefixAware()
