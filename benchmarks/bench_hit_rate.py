"""Hit rates of the eviction policies on recorded requests: exact counts, by replay.

    python -m benchmarks.bench_hit_rate --traces FOLDER

FOLDER holds `conversation_trace.jsonl` and `synthetic_trace.jsonl` of Mooncake (FAST'25 release,
kvcache-ai/Mooncake, Apache-2.0). Each line is a request with the ids of its blocks of 512 tokens;
ids are chained. A block is a hit when it and every block before it in the request are present.

The policies are the store's own objects. Requests come one after the other; each uses or stores
all its blocks, the last first. Two tiers: what leaves DRAM goes to the SSD, what is hit there
goes back to DRAM, and a block is in one of them. `prefix_aware+lru` is prefix-aware in DRAM and
LRU on the SSD; else both tiers have a policy of the same kind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import Recorder
from configs.schema import Eviction
from kvstore.eviction import named_policy

TRACES = ("conversation", "synthetic")
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
TIERS = ((1_000, 4_000), (5_000, 20_000), (10_000, 40_000))  # DRAM, SSD
PAIRS = (*((kind, kind) for kind in Eviction), (Eviction.PREFIX_AWARE, Eviction.LRU))
Requests = Sequence[Sequence[int]]


class Cache:
    """Tiers of so many blocks each, the fastest first; no capacity is no bound."""

    def __init__(self, policies: Sequence[Eviction], capacities: Sequence[int | None]) -> None:
        self.tiers = list(zip(map(named_policy, policies), capacities, strict=True))
        self.hits = [0] * len(capacities)

    def find(self, block: int) -> int | None:
        """Return the tier that a block is in."""
        return next((i for i, (policy, _) in enumerate(self.tiers) if block in policy), None)

    def count(self, request: Sequence[int]) -> None:
        """Count the hits of a request."""
        for block in request:
            tier = self.find(block)
            if tier is None:
                break
            self.hits[tier] += 1

    def use(self, block: int, parents: dict[int, int]) -> None:
        """Use a block or store it; either way it is in the first tier afterwards."""
        tier = self.find(block)
        if tier is not None:
            self.tiers[tier][0].touch(block)
        if tier == 0:
            return
        if tier is not None:
            self.tiers[tier][0].remove(block)
        self._enter(0, block, parents)

    def _enter(self, tier: int, block: int, parents: dict[int, int]) -> None:
        if tier == len(self.tiers):
            return
        policy, capacity = self.tiers[tier]
        if len(policy) == capacity:
            victim = policy.victim()
            assert isinstance(victim, int), victim
            policy.remove(victim, evicted=True)
            self._enter(tier + 1, victim, parents)
        policy.admit(block, parents.get(block))


def replay(
    requests: Requests, policies: Sequence[Eviction], capacities: Sequence[int | None]
) -> list[float]:
    """Return the share of all block references that each tier served."""
    cache = Cache(policies, capacities)
    parents: dict[int, int] = {}
    for request in requests:
        parents.update((block, parent) for parent, block in pairwise(request))
        cache.count(request)
        for block in reversed(request):
            cache.use(block, parents)
    references = sum(map(len, requests))
    return [hits / references for hits in cache.hits]


def load(path: Path) -> Requests:
    """Read the block ids of every request, in file order."""
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    options = parser.parse_args()
    recorder = Recorder("hit_rate")
    for trace in TRACES:
        requests = load(options.traces / f"{trace}_trace.jsonl")
        for size in (*SIZES, None):
            for policy in Eviction:
                (rate,) = replay(requests, (policy,), (size,))
                recorder.add("hit rate", "share", [rate], trace=trace, policy=policy, blocks=size)
        for dram, ssd in TIERS:
            for pair in PAIRS:
                rates = replay(requests, pair, (dram, ssd))
                name = pair[0] if pair[0] == pair[1] else "+".join(pair)
                labels = {"trace": trace, "policy": name, "dram_blocks": dram, "ssd_blocks": ssd}
                recorder.add("hit rate of both tiers", "share", [sum(rates)], **labels)
                recorder.add("hit rate of DRAM", "share", [rates[0]], **labels)
    recorder.write()


if __name__ == "__main__":
    main()
