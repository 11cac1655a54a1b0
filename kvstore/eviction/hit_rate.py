"""How often blocks of one kind and age are used, learned while they are."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

USE_CLASSES: Final = 4  # used 0, 1, 2, 3 or more times
AGE_CLASSES: Final = 32  # powers of two of ticks since the last use
REFIT_EVENTS: Final = 4096
KEPT_SHARE: Final = 0.7  # of the counts, at each refit: what is older weighs less


class HitRates:
    """Hits per block and tick, by number of uses and age since the last.

    An age class begins at `2**(i-1)` ticks and lasts as many. A block that was used, or given up,
    in class i has spent all of the younger ones and half of that one unused. So the time spent in
    class i is, with ends = hits + misses,

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
        self._events = 0

    def rate(self, use_class: int, age: int) -> float:
        """Return the rate, per tick, of blocks of this many uses, `age` ticks after the last."""
        return self._rates[use_class][_age_class(age)]

    def hit(self, use_class: int, age: int) -> None:
        """Count a use at this age."""
        self._hits[use_class][_age_class(age)] += 1
        self._count()

    def missed(self, use_class: int, age: int) -> None:
        """Count a block that was given up, unused until this age."""
        self._misses[use_class][_age_class(age)] += 1
        self._count()

    def _count(self) -> None:
        self._events += 1
        if self._events % REFIT_EVENTS == 0:
            for use_class in range(USE_CLASSES):
                self._refit(use_class)

    def _refit(self, use_class: int) -> None:
        hits, misses = self._hits[use_class], self._misses[use_class]
        exposed = [0.0] * AGE_CLASSES
        older = 0.0
        for age in reversed(range(AGE_CLASSES)):
            ends = hits[age] + misses[age]
            exposed[age] = (1 << max(0, age - 1)) * (older + ends / 2)
            older += ends
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
