"""Machines under a seeded network: whatever happens, one view per epoch, and it ends."""

from __future__ import annotations

import random

import pytest

from elastic.phase import Phase
from tests.support.membership_network import Network, Process

SEEDS = [random.SystemRandom().randrange(1 << 32) for _ in range(60)]


def alive(network: Network) -> list[Process]:
    return [p for p in network.processes.values() if p.alive]


def members(network: Network) -> list[Process]:
    assert network.record is not None
    found = (network.processes[m.incarnation] for m in network.record.members)
    return [p for p in found if p.alive]


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_stalls_and_joins(seed: int) -> None:
    network = Network(seed)
    choose = random.Random(seed ^ 1)
    network.start_group(range(choose.randint(2, 6)))
    network.run(1.0)
    network.check_settled()
    lives = 1
    for _ in range(choose.randint(1, 8)):
        what = choose.choice(("kill", "kill", "kill two", "stall", "join", "join", "join two"))
        present = members(network)
        if what.startswith("kill"):
            count = min(len(present) - 1, 2 if "two" in what else 1)
            victims = choose.sample(present, max(count, 0))
            for victim in victims:
                network.at(choose.choice((0.0, 0.001, 0.01)), lambda v=victim: network.kill(v))
        elif what == "stall" and len(present) > 1:
            network.stall(choose.choice(present), choose.choice((0.5, 1.5, 3.0, 8.0)))
        elif what.startswith("join"):
            taken = {p.me.rank for p in alive(network)}
            free = [rank for rank in range(8) if rank not in taken]
            for rank in free[: 2 if "two" in what else 1]:
                joiner = network.spawn(rank, life=lives)
                lives += 1
                network.join(joiner)
                if choose.random() < 0.2:
                    network.at(choose.uniform(0, 0.3), lambda j=joiner: network.kill(j))
        # Sometimes the next thing happens in the middle of what the last one set off.
        network.run(network.now + choose.choice((0.003, 0.02, 0.1, 1.0, 6.0)))
    network.run(network.now + 60.0)
    if any(p.alive for p in network.processes.values() if p.machine.phase is Phase.SERVING):
        network.check_settled()
    else:
        assert not members(network), f"seed {seed}: the members live and don't serve"


@pytest.mark.parametrize("seed", SEEDS[:30])
def test_winners_that_die_before_they_tell(seed: int) -> None:
    network = Network(seed)
    choose = random.Random(seed ^ 2)
    network.start_group(range(5))
    network.run(1.0)
    network.die_after_commit = 0.5
    for life in range(1, 6):
        present = members(network)
        if len(present) > 2:
            network.kill(choose.choice(present))
        joiner = network.spawn(life + 5, life)
        network.join(joiner)
        network.run(network.now + choose.choice((0.01, 0.1, 3.0)))
    network.run(network.now + 60.0)
    network.check_settled()


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_kill_costs_no_healthy_member(seed: int) -> None:
    network = Network(seed)
    network.start_group(range(4))
    network.run(1.0)
    victims = random.Random(seed).sample(members(network), random.Random(seed).choice((1, 2)))
    for victim in victims:
        network.kill(victim)
    network.run(network.now + 10.0)
    network.check_settled()
    left = {p.me.rank for p in members(network)}
    assert left == set(range(4)) - {v.me.rank for v in victims}, f"seed {seed}"
    assert network.record is not None
    assert network.record.epoch <= 1 + len(victims), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_stalled_member_is_evicted_and_accuses_nobody(seed: int) -> None:
    network = Network(seed)
    network.start_group(range(4))
    network.run(1.0)
    sleeper = random.Random(seed).choice(members(network))
    network.stall(sleeper, 5.0)
    network.run(network.now + 20.0)
    network.check_settled()
    assert sleeper.machine.phase is Phase.EVICTED, f"seed {seed}"
    assert {p.me.rank for p in members(network)} == set(range(4)) - {sleeper.me.rank}


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_cut_link_removes_one_side_only(seed: int) -> None:
    network = Network(seed)
    network.start_group(range(5))
    network.run(1.0)
    a, b = random.Random(seed).sample(members(network), 2)
    network.cut_link(a.name, b.name)
    network.run(network.now + 20.0)
    network.check_settled()
    assert len(members(network)) == 4, f"seed {seed}"
