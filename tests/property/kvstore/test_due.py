"""A master that looks at the time only when something may be due is one that always looks.

Two masters get the same random requests at the same random times, also such as a clock that
stands still, long pauses, durations below the policies' own tick; one of them does what is due
before each request, whatever it believes. Their replies must be the same.
"""

from __future__ import annotations

import math
import random
import secrets

import pytest

from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

KEYS = [bytes([i]) * 16 for i in range(6)]
NODES = ["n0", "n1"]
STEPS = 500
TIMINGS = [
    MasterTiming(lease_s=5.0, silence_s=8.0, put_s=6.0, soft_pin_s=4.0),
    MasterTiming(lease_s=0.004, silence_s=0.5, put_s=0.01, soft_pin_s=0.003),
    MasterTiming(lease_s=1.0, silence_s=0.006, put_s=0.1, soft_pin_s=0.01),
]


class Requests:
    """Random requests; what they name was told by an earlier reply."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._leases: list[int] = []
        self._batches = 0

    def next(self) -> m.Request:
        rng = self._rng
        keys = rng.sample(KEYS, rng.randint(1, 3))
        match rng.randrange(10):
            case 0:
                return m.Register(rng.choice(NODES), "a:1", 512, True, m.HeldBlocks())
            case 1:
                return m.Heartbeat(rng.choice(NODES))
            case 2 | 3:
                return m.Lookup("c", keys, [], True)
            case 4:
                return m.Renew("c", rng.sample(self._leases, min(2, len(self._leases))))
            case 5:
                return m.Release("c", rng.sample(self._leases, min(1, len(self._leases))))
            case 6 | 7:
                self._batches += 1
                pin, pin_s = rng.choice(list(m.Pin)), rng.choice([0.0, 0.001, 2.0])
                lengths, sums = [64] * len(keys), [7] * len(keys)
                return m.Allocate("c", self._batches, keys, lengths, sums, pin=pin, pin_s=pin_s)
            case 8:
                return m.Finish("c", max(1, self._batches), [0])
        return m.SetPin("c", keys, rng.choice(list(m.Pin)), rng.choice([0.0, 0.002, 1.0]))

    def learn(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Located) and reply.lease_id:
            self._leases.append(reply.lease_id)


@pytest.mark.parametrize("timing", TIMINGS)
def test_who_looks_at_the_time_when_needed_sees_what_who_always_looks_sees(
    timing: MasterTiming,
) -> None:
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    lazy, eager = StoreMaster(timing), StoreMaster(timing)
    requests, now, skipped = Requests(rng), rng.uniform(0.0, 1e6), 0
    for number in range(STEPS):
        shortest = min(timing.lease_s, timing.silence_s, timing.put_s)
        now += rng.choice([0.0, 1e-4, 0.001, shortest, shortest / 2, rng.expovariate(1.0)])
        request = requests.next()
        eager._due_s = -math.inf
        due_s, told = lazy._due_s, lazy.step(request, now)
        skipped += lazy._due_s == due_s
        assert told == eager.step(request, now), (seed, number, request)
        requests.learn(told)
        lazy.check_invariants()
        eager.check_invariants()
    assert lazy.statistics() == eager.statistics(), seed
    assert skipped, "nothing was ever left for later"
