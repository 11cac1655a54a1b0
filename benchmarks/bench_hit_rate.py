"""Hit rates of the eviction policies on recorded requests: exact counts, by replay.

    python -m benchmarks.bench_hit_rate --traces FOLDER

FOLDER holds `conversation_trace.jsonl` and `synthetic_trace.jsonl` of Mooncake (FAST'25 release,
kvcache-ai/Mooncake, Apache-2.0). Each line is a request with the ids of its blocks of 512 tokens;
ids are chained. A block is a hit when it and every block before it in the request are present.

The policies are the store's own objects. Requests come one after the other; each uses or stores
all its blocks, the last first. Two tiers, a fifth of the blocks in DRAM: what leaves DRAM goes to
the SSD if it is admitted (`kvstore/master/copies/admission.py`), what is hit there often enough
goes back (`kvstore/master/copies/promotion.py`), and a block is in one of them. Copies take no
time.

Plots of both go to `results/hit_rate_one_tier.svg` and `results/hit_rate_two_tiers.svg`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import RESULTS, Recorder
from benchmarks.line_chart import Panel, line_charts
from configs.kvstore_policies import Admission
from configs.schema import Eviction
from kvstore.eviction import named_policy
from kvstore.master.copies.admission import SsdAdmission
from kvstore.master.copies.promotion import Promotion

TRACES = ("conversation", "synthetic")
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
TIER_SIZES = (1_000, 5_000, 25_000, 50_000)  # of both tiers
DRAM_SHARE = 5  # one in five blocks
ADMISSION_NAMES = 1 << 17
Requests = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Tiering:
    """What moves between the tiers; all of it at once when it is due."""

    admission: Admission
    promotion_hits: int

    @property
    def name(self) -> str:
        """As in the results."""
        return f"{self.admission}, promoted after {self.promotion_hits}"


TIERINGS = (
    Tiering(Admission.ALWAYS, 1),
    Tiering(Admission.ALWAYS, 2),
    Tiering(Admission.SECOND_HIT, 1),
)


class Cache:
    """DRAM and perhaps an SSD of so many blocks each; no capacity is no bound."""

    def __init__(
        self,
        policy: Eviction,
        capacities: Sequence[int | None],
        tiering: Tiering = TIERINGS[0],
    ) -> None:
        self.tiers = [(named_policy(policy), capacity) for capacity in capacities]
        self.hits = [0] * len(capacities)
        self.ssd_writes = 0
        self._admission = SsdAdmission(tiering.admission, names_max=ADMISSION_NAMES)
        self._promotion = Promotion(hits=tiering.promotion_hits, window_s=float("inf"))

    def find(self, block: int) -> int | None:
        """Return the tier that a block is in."""
        return next((i for i, (policy, _) in enumerate(self.tiers) if block in policy), None)

    def count(self, request: Sequence[int]) -> None:
        """Count the hits of a request."""
        for position, block in enumerate(request):
            tier = self.find(block)
            if tier is None:
                self._admission.used(request[:position])
                return
            self.hits[tier] += 1
        self._admission.used(request)

    def use(self, block: int, parents: dict[int, int]) -> None:
        """Use a block where it is, which may promote it; or store it in DRAM."""
        tier = self.find(block)
        if tier is not None:
            self.tiers[tier][0].touch(block)
            if tier == 0 or not self._promotion.hit(block, 0.0):
                return
            self.tiers[tier][0].remove(block)
        self._enter(0, block, parents)

    def _enter(self, tier: int, block: int, parents: dict[int, int]) -> None:
        policy, capacity = self.tiers[tier]
        if len(policy) == capacity:
            victim = policy.victim()
            assert isinstance(victim, int), victim
            policy.remove(victim, evicted=True)
            if tier + 1 < len(self.tiers) and self._admission.admits(victim):
                self.ssd_writes += 1
                self._enter(tier + 1, victim, parents)
        policy.admit(block, parents.get(block))


def replay(requests: Requests, cache: Cache) -> list[float]:
    """Return the share of all block references that each tier served."""
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


def one_tier(recorder: Recorder, trace: str, requests: Requests) -> Panel:
    """Record every policy at every size; return their plot."""
    panel = Panel(title=trace, x="blocks", y="hit rate")
    for policy in Eviction:
        for size in SIZES:
            (rate,) = replay(requests, Cache(policy, (size,)))
            recorder.add("hit rate", "share", [rate], trace=trace, policy=policy, blocks=size)
            panel.add(str(policy), size, rate)
    # Without a bound nothing is ever evicted: one figure for all.
    (rate,) = replay(requests, Cache(Eviction.LRU, (None,)))
    recorder.add("hit rate", "share", [rate], trace=trace, policy="any", blocks=None)
    return panel


def two_tiers(recorder: Recorder, trace: str, requests: Requests) -> Panel:
    """Record every policy and tiering at every size; return their plot."""
    panel = Panel(title=trace, x="blocks, a fifth of them in DRAM", y="hit rate of both tiers")
    references = sum(map(len, requests))
    for policy in Eviction:
        for tiering in TIERINGS:
            for size in TIER_SIZES:
                dram = size // DRAM_SHARE
                cache = Cache(policy, (dram, size - dram), tiering)
                rates = replay(requests, cache)
                labels = {
                    "trace": trace,
                    "policy": policy,
                    "admission": tiering.admission,
                    "promotion_hits": tiering.promotion_hits,
                    "dram_blocks": dram,
                    "ssd_blocks": size - dram,
                }
                recorder.add("hit rate of both tiers", "share", [sum(rates)], **labels)
                recorder.add("hit rate of DRAM", "share", [rates[0]], **labels)
                writes = cache.ssd_writes / references
                recorder.add("writes to the SSD", "per reference", [writes], **labels)
                panel.add(f"{policy}: {tiering.name}", size, sum(rates))
    return panel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    options = parser.parse_args()
    recorder = Recorder("hit_rate")
    panels: dict[str, list[Panel]] = {"one_tier": [], "two_tiers": []}
    for trace in TRACES:
        requests = load(options.traces / f"{trace}_trace.jsonl")
        panels["one_tier"].append(one_tier(recorder, trace, requests))
        panels["two_tiers"].append(two_tiers(recorder, trace, requests))
    recorder.write()
    for name, charts in panels.items():
        (RESULTS / f"hit_rate_{name}.svg").write_text(line_charts(charts), encoding="utf-8")


if __name__ == "__main__":
    main()
