"""How often blocks of one kind and age are used, learned while they are."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

USE_CLASSES: Final = 4  # used 0, 1, 2, 3 or more times
AGE_CLASSES: Final = 32  # powers of two of ticks since the last use
REFIT_EVENTS: Final = 4096
KEPT_SHARE: Final = 0.9  # of the counts, at each refit: what is older weighs less
EPOCH_BITS: Final = 12  # those that wait for a use are counted by ticks of this size
WAITING_SHARE: Final = 0.3  # weight of one that waits, beside one that was used or given up


class HitRates:
    """Hits per block and tick, by number of uses and age since the last.

    An age class begins at `2**(i-1)` ticks and lasts as many. A block that was used, or given up,
    in class i has spent all of the younger ones and half of that one unused. One that still waits
    for its next use has spent as much: without those, a cache that holds nearly everything would
    learn from the lucky only. So the time spent in class i is, with ends = hits + misses +
    WAITING_SHARE * waiting,

        exposed[i] = ticks[i] * (ends in older classes + ends[i] / 2)

    A block of class i may be kept until the end of any class j >= i; its rate is that of the best

        rate[i] = max over j >= i of sum(hits[i..j]) / (sum(exposed[i..j]) + 1)

    which looks over the quiet time that follows a use (after Beckmann, Chen and Cidon, "LHD:
    improving cache hit rate by maximizing hit density", NSDI 2018, with a horizon).
    """

    def __init__(self) -> None:
        self._hits = [[0.0] * AGE_CLASSES for _ in range(USE_CLASSES)]
        self._misses = [[0.0] * AGE_CLASSES for _ in range(USE_CLASSES)]
        # Before anything is learned, the older and the less used is worth less: LRU, nearly.
        self._rates = [
            [(use_class + 1) * 2.0**-age for age in range(AGE_CLASSES)]
            for use_class in range(USE_CLASSES)
        ]
        self._waiting: list[dict[int, int]] = [{} for _ in range(USE_CLASSES)]  # epoch -> blocks
        self._events = 0

    def rate(self, use_class: int, age: int) -> float:
        """Return the rate, per tick, of blocks of this many uses, `age` ticks after the last."""
        return self._rates[use_class][_age_class(age)]

    def wait(self, use_class: int, used_at: int) -> None:
        """A block waits for a use from this tick on: it came, or was used."""
        epochs, epoch = self._waiting[use_class], used_at >> EPOCH_BITS
        epochs[epoch] = epochs.get(epoch, 0) + 1

    def hit(self, use_class: int, used_at: int, now: int) -> None:
        """Count a use of a block that waited since `used_at`."""
        self.leave(use_class, used_at)
        self._hits[use_class][_age_class(now - used_at)] += 1
        self._count(now)

    def missed(self, use_class: int, used_at: int, now: int) -> None:
        """Count a block that was given up, unused until now."""
        self.leave(use_class, used_at)
        self._misses[use_class][_age_class(now - used_at)] += 1
        self._count(now)

    def leave(self, use_class: int, used_at: int) -> None:
        """A block waits no more, and that tells nothing."""
        epochs, epoch = self._waiting[use_class], used_at >> EPOCH_BITS
        left = epochs[epoch] - 1
        if left:
            epochs[epoch] = left
        else:
            del epochs[epoch]

    def _count(self, now: int) -> None:
        self._events += 1
        if self._events % REFIT_EVENTS == 0:
            for use_class in range(USE_CLASSES):
                self._refit(use_class, now)

    def _refit(self, use_class: int, now: int) -> None:
        hits, misses = self._hits[use_class], self._misses[use_class]
        ends = [hit + miss for hit, miss in zip(hits, misses, strict=True)]
        for epoch, blocks in self._waiting[use_class].items():
            middle = (epoch << EPOCH_BITS) + (1 << (EPOCH_BITS - 1))
            ends[_age_class(max(0, now - middle))] += WAITING_SHARE * blocks
        exposed = [0.0] * AGE_CLASSES
        older = 0.0
        for age in reversed(range(AGE_CLASSES)):
            exposed[age] = (1 << max(0, age - 1)) * (older + ends[age] / 2)
            older += ends[age]
        for age in range(AGE_CLASSES):
            hits_until, exposed_until = accumulate(hits[age:]), accumulate(exposed[age:])
            self._rates[use_class][age] = max(
                gained / (spent + 1)
                for gained, spent in zip(hits_until, exposed_until, strict=True)
            )
        self._hits[use_class] = [KEPT_SHARE * count for count in hits]
        self._misses[use_class] = [KEPT_SHARE * count for count in misses]


def _age_class(age: int) -> int:
    return min(age.bit_length(), AGE_CLASSES - 1)
