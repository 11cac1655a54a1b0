"""Copies by the master's order under random use and faults: leases hold, bytes are conserved.

Every few steps the master's books are checked (every byte is in one state) and committed copies
have their block's bytes; after each, what is leased still lies where its reader was told.
"""

from __future__ import annotations

import random
import secrets

import pytest

from configs.kvstore_policies import (
    Admission,
    CopyBounds,
    FillingPolicy,
    HotBlockPolicy,
    PolicyConfig,
    TierPolicy,
)
from kvstore.wire import messages as m
from tests.support.planned_pool import LENGTH, PlannedPool

STEPS = 120


class Use:
    """Random steps. `hits` are leases that run: id -> (client, [(place, key)])."""

    def __init__(self, rng: random.Random, policies: PolicyConfig, *, faults: bool) -> None:
        self.rng = rng
        self.faults = faults
        self.pool = PlannedPool(policies, lease_s=1e6, check_every=5)
        self.keys: list[bytes] = []
        self.hits: dict[int, tuple[str, list[tuple[tuple[str, int, int], bytes]]]] = {}
        self.done: dict[str, list[int]] = {}
        self.names = 0
        for _ in range(3):
            self.join()

    def join(self) -> None:
        self.names += 1
        name = f"node {self.names}"
        domain = self.rng.choice(["", "", "rack"])
        self.pool.join(name, self.rng.randint(8, 24), domain=domain)
        if self.rng.random() < 0.5:
            blocks = self.rng.randint(8, 40)
            self.pool.join(name, blocks, medium=m.Medium.SSD, segment=1, domain=domain)

    def nodes(self) -> list[str]:
        return [node.name for node in self.pool.catalog.pool.nodes]

    def put(self) -> None:
        keys = [self.rng.randbytes(16) for _ in range(self.rng.randint(1, 5))]
        keys += self.rng.sample(self.keys, min(2, len(self.keys)))
        self.pool.put(list(dict.fromkeys(keys)), replicas=self.rng.choice([1, 1, 2, 3]))
        self.keys += keys

    def read(self) -> None:
        if not self.keys:
            return
        client = self.rng.choice(["reader", *self.nodes()])
        keys = self.rng.choices(self.keys[-60:], k=self.rng.randint(1, 6))
        reply = self.pool.read(list(dict.fromkeys(keys)), client=client, release=False)
        if reply.lease_id:
            places = [
                ((reply.nodes[n].node, reply.nodes[n].segment, offset), key)
                for key, n, offset in zip(
                    dict.fromkeys(keys), reply.node_idx, reply.offsets, strict=True
                )
                if n >= 0
            ]
            self.hits[reply.lease_id] = (client, places)

    def release(self) -> None:
        for lease_id in self.rng.sample(sorted(self.hits), min(2, len(self.hits))):
            client, _ = self.hits.pop(lease_id)
            self.pool.step(m.Release(client=client, lease_ids=[lease_id]))

    def work(self) -> None:
        node = self.rng.choice(self.nodes())
        report = {"done": self.done.pop(node, [])}
        copies = self.pool.ask_work(node, limit=self.rng.randint(0, 20), **report)
        failed, corrupt = [], []
        for copy in copies:
            fate = self.rng.random() if self.faults else 1.0
            if fate < 0.05:
                failed.append(copy.copy_id)
            elif fate < 0.08:
                corrupt.append(copy.copy_id)
            else:
                self.pool.make(node, copy)
                if fate > 0.12:
                    self.done.setdefault(node, []).append(copy.copy_id)
        if failed or corrupt:
            self.pool.ask_work(node, limit=0, failed=failed, corrupt=corrupt)

    def pass_time(self) -> None:
        self.pool.step(m.Observe(), later=self.rng.choice([0.05, 0.5, 3.0]))

    def drain(self) -> None:
        if len(self.nodes()) > 1:
            cancel = self.rng.random() < 0.4
            self.pool.step(m.Drain(self.rng.choice(self.nodes()), cancel=cancel))

    def rebalance(self) -> None:
        self.pool.step(m.Rebalance(self.rng.randint(0, 30) * LENGTH))

    def lose(self) -> None:
        if self.faults and len(self.nodes()) > 2:
            node = self.rng.choice(self.nodes())
            self.done.pop(node, None)
            for lease_id, (client, places) in list(self.hits.items()):
                kept = [(place, key) for place, key in places if place[0] != node]
                self.hits[lease_id] = (client, kept)
                if client == node:
                    del self.hits[lease_id]
            self.pool.step(m.Fence([node], dead=self.rng.random() < 0.7))

    def remove(self) -> None:
        if self.faults and self.keys:
            self.pool.step(m.Remove(keys=self.rng.choices(self.keys, k=2)))

    def pin(self) -> None:
        if self.keys:
            pin = self.rng.choice(list(m.Pin))
            keys = self.rng.choices(self.keys, k=2)
            self.pool.step(m.SetPin(client="x", keys=keys, pin=pin, pin_s=5.0))

    def check_leases(self) -> None:
        for _, places in self.hits.values():
            for place, key in places:
                assert self.pool.bytes[place] == key, "leased bytes were overwritten"

    def run(self) -> None:
        weights = {
            self.put: 6, self.read: 6, self.release: 4, self.work: 12, self.pass_time: 4,
            self.drain: 1, self.rebalance: 1, self.lose: 0.3, self.remove: 0.5, self.pin: 0.3,
            self.join: 0.3,
        }  # fmt: skip
        for _ in range(STEPS):
            (step,) = self.rng.choices(list(weights), list(weights.values()))
            step()
            self.check_leases()


def policies(rng: random.Random) -> PolicyConfig:
    return PolicyConfig(
        copies=CopyBounds(
            per_node=rng.choice([1, 4, 32]),
            bytes_per_node=1 << 16,
            queued_max=rng.choice([5, 1000]),
            deadline_s=rng.choice([1.0, 20.0]),
        ),
        tiers=TierPolicy(
            admission=rng.choice(list(Admission)),
            demotion_low=0.2,
            demotion_high=0.4,
            promotion_hits=rng.choice([0, 1, 2]),
        ),
        hot_blocks=HotBlockPolicy(hits=rng.choice([0, 3])),
        filling=FillingPolicy(bytes_per_s=rng.choice([0, 5 * LENGTH])),
    )


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("turn", range(3))
def test_books_bytes_and_leases_hold(turn, faults):
    rng = random.Random(seed := secrets.randbits(32))
    try:
        Use(rng, policies(rng), faults=faults).run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, faults {faults}") from error


@pytest.mark.parametrize("turn", range(2))
def test_a_drain_under_use_loses_no_block_that_fits_elsewhere(turn):
    rng = random.Random(seed := secrets.randbits(32))
    calm = PolicyConfig(tiers=TierPolicy(demotion_low=0.0, demotion_high=0.1))
    pool = PlannedPool(calm, check_every=5)
    for name in "abcd":
        pool.join(name, 100)
    keys = [rng.randbytes(16) for _ in range(150)]
    pool.put(keys[:100], replicas=rng.choice([1, 2]))
    rest, done = keys[100:], []
    while rest or pool.step(m.Drain("a")).left_blocks:
        if rest:
            pool.put([rest.pop()])
        copies = pool.ask_work("a", limit=rng.randint(1, 8), done=done)
        done = [copy.copy_id for copy in copies]
        for copy in copies:
            pool.make("a", copy)
        assert pool.there(keys) == len(keys) - len(rest), seed
        assert all(index >= 0 for index in pool.read(keys[:100]).node_idx), seed
        pool.step(m.Observe(), later=rng.choice([0.01, 0.3, 1.1]))
    pool.step(m.Leave("a"))
    assert pool.there(keys) == 150, seed
