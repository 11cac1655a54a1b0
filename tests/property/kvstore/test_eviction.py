"""Every eviction policy against a slow, plain model, under random orders of operations."""

from __future__ import annotations

import random
import secrets
from array import array

import pytest

from configs.schema import Eviction
from kvstore.eviction import EvictionRows, named_policy, new_policy
from kvstore.eviction.gone import GoneBlocks
from kvstore.eviction.hit_rate import (
    AGE_CLASSES,
    EPOCH_BITS,
    KEPT_SHARE,
    REFIT_EVENTS,
    USE_CLASSES,
    WAITING_SHARE,
    HitRates,
)
from tests.support.eviction_models import MODELS

STEPS = 1500


@pytest.fixture
def rng():
    seed = secrets.randbits(32)
    print("seed", seed)  # shown when the test fails
    return random.Random(seed)


class AllBut:
    """May go: all but these."""

    def __init__(self, stays):
        self._stays = stays

    def __call__(self, row):
        return row not in self._stays

    def all_may(self, rows):
        return self._stays.isdisjoint(rows)


def parent_of(name):
    """Blocks 10, 11, ... 19 are one chain; every chain hangs on block 0, the chains' root."""
    if name == 0:
        return None
    return name - 1 if name % 10 else 0


@pytest.mark.parametrize("kind", Eviction)
def test_a_policy_does_what_its_model_does(kind, rng):
    for _ in range(4):
        policy, model, held = named_policy(kind), MODELS[kind](), set()
        names = rng.choice([12, 40, 200])
        for _ in range(STEPS):
            name = rng.randrange(names)
            action = rng.choices(
                ["use", "hold", "unhold", "remove", "evict"], [8, 2, 2, 1, rng.choice([1, 6])]
            )[0]
            if action == "use":
                if name in policy:
                    policy.touch(name)
                    model.touch(name)
                else:
                    policy.admit(name, parent_of(name))
                    model.admit(name, parent_of(name))
            elif action == "hold" and name in policy:
                held.add(name)
                policy.hold(name)
                model.hold(name)
            elif action == "unhold":
                held.discard(name)
                policy.unhold(name)
                model.unhold(name)
            elif action == "remove":
                held.discard(name)
                policy.remove(name)
                model.remove(name, evicted=False)
            elif action == "evict":
                victim = policy.victim()
                assert victim == model.victim()
                assert victim == policy.victim(), "asking changes nothing"
                if victim is not None:
                    assert victim not in held
                    policy.remove(victim, evicted=True)
                    model.remove(victim, evicted=True)
            assert len(policy) == len(model.known)
            assert (name in policy) == (name in model.known)
            free = list(policy.evictable())
            assert len(free) == len(set(free))
            assert set(free) == set(model.known) - held
            assert held <= set(model.known)


@pytest.mark.parametrize("kind", Eviction)
def test_a_run_does_what_single_steps_do(kind, rng):
    """Two policies, one told of each block alone, one of many at once; names are the rows."""
    single, several = (EvictionRows() for _ in range(2))
    for columns in (single, several):
        columns.grow(200)
        columns.names.extend(range(200))
        columns.find = lambda name, row: name
    step, run = new_policy(kind, single), new_policy(kind, several)
    known, busy, runs = set(), array("i", bytes(4 * 200)), 0
    for _ in range(STEPS // 5):
        rows = rng.sample(range(200), rng.randrange(1, 30))
        new, old = [r for r in rows if r not in known], [r for r in rows if r in known]
        run.admit(new, [parent_of(row) for row in new])
        run.touch(old)
        for row in new:
            step.admit([row], [parent_of(row)])
        for row in old:
            step.touch([row])
        known.update(new)
        for row in rng.sample(range(200), 3):
            busy[row] = not busy[row]
            if row in known and not busy[row]:
                step.unhold(row)
                run.unhold(row)
        stays, count = set(rng.sample(range(200), 5)), rng.randrange(1, 40)
        gone = []
        while len(gone) < count and (victim := step.victim()) is not None:
            if busy[victim]:
                step.hold(victim)
            elif victim in stays:
                break
            else:
                gone.append(victim)
                step.remove(victim, evicted=True)
        assert run.evict(count, busy, AllBut(stays)) == gone
        known.difference_update(gone)
        runs += len(gone) > 1
        assert run.victim() == step.victim()
        assert len(run) == len(step) == len(known)
        assert list(run.evictable()) == list(step.evictable())
    assert runs


def test_what_is_gone_is_forgotten_in_its_order(rng):
    gone, order, number = GoneBlocks(), [], 0
    for _ in range(STEPS):
        new = rng.sample(range(100), rng.randrange(8))
        expected = [next((n for name, n in order if name == one), None) for one in new]
        assert gone.returned(new) == expected
        order = [entry for entry in order if entry[0] not in new]
        order += zip(new, range(number, number + len(new)), strict=True)
        gone.extend(new, range(number, number + len(new)))
        number += len(new)
        length = rng.randrange(120)
        cut = max(0, len(order) - length)
        assert gone.shrink(length) == [n for _, n in order[:cut]]
        order = order[cut:]
        assert len(gone) == len(order)


@pytest.mark.parametrize("kind", Eviction)
def test_everything_not_held_can_be_evicted_and_nothing_else(kind, rng):
    policy = named_policy(kind)
    names = [name for name in range(200) if name % 10 < 7]
    rng.shuffle(names)
    for name in names:
        policy.admit(name, parent_of(name))
    held = set(rng.sample(names, 30))
    for name in held:
        policy.hold(name)
    gone = []
    while (victim := policy.victim()) is not None:
        gone.append(victim)
        policy.remove(victim, evicted=True)
    assert sorted(gone) == sorted(set(names) - held)
    assert len(policy) == len(held)


def test_leaves_go_before_roots_whatever_was_used(rng):
    policy = named_policy(Eviction.PREFIX_AWARE)
    known = set()
    for _ in range(5000):
        name = rng.randrange(300)
        if name in known:
            policy.touch(name)
        else:
            policy.admit(name, parent_of(name))
            known.add(name)
        while len(known) > 60:
            victim = policy.victim()
            assert not any(parent_of(other) == victim for other in known), victim
            policy.remove(victim, evicted=True)
            known.remove(victim)


def test_rates_are_those_of_the_whole_record(rng):
    rates = HitRates()
    record = []  # (use class, age class, was it a hit, weight)
    waiting = []  # (use class, tick)
    now = 1 << 23
    for _ in range(3):
        for event in range(REFIT_EVENTS):
            use_class, age, hit = rng.randrange(USE_CLASSES), rng.randrange(1 << 20), rng.random()
            age >>= rng.randrange(20)
            now += rng.randrange(3)
            if event % 3 == 0:
                waiting.append((use_class, now - age))
                rates.wait(use_class, now - age)
            if event % 9 == 0:
                rates.leave(*waiting.pop(rng.randrange(len(waiting))))
            rates.wait(use_class, now - age)
            if hit < 0.3:
                rates.hit(use_class, now - age, now)
            else:
                rates.missed([(use_class, now - age)], now)
            record.append((use_class, age.bit_length(), hit < 0.3, 1.0))
        present = [
            (use_class, age_of(tick, now).bit_length(), False, WAITING_SHARE)
            for use_class, tick in waiting
        ]
        for _ in range(50):
            use_class, age = rng.randrange(USE_CLASSES), rng.randrange(1 << 22)
            seen = [e[1:] for e in (*record, *present) if e[0] == use_class]
            assert rates.rate(use_class, age) == pytest.approx(rate_of(seen, age.bit_length()))
        record = [(*event[:3], event[3] * KEPT_SHARE) for event in record]


def age_of(tick, now):
    """Ticks of a span are known by its middle."""
    span = 1 << EPOCH_BITS
    return max(0, now - (tick // span * span + span // 2))


def rate_of(events, age_class):
    """Of all horizons the best: hits until then per tick that the blocks lay there until then."""
    best = gained = spent = 0.0
    for horizon in range(age_class, AGE_CLASSES):
        width = max(1, 2 ** (horizon - 1))
        gained += sum(weight for at, hit, weight in events if hit and at == horizon)
        spent += width * sum(weight for at, _, weight in events if at > horizon)
        spent += width / 2 * sum(weight for at, _, weight in events if at == horizon)
        best = max(best, gained / (spent + 1))
    return best
