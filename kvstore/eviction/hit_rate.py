"""How often blocks of one kind and age are used, learned while they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

USE_CLASSES: Final = 4  # used 0, 1, 2, 3 or more times
AGE_CLASSES: Final = 32  # powers of two of ticks since the last use
REFIT_EVENTS: Final = 4096
KEPT_SHARE: Final = 0.9  # of the counts, at each refit: what is older weighs less
EPOCH_BITS: Final = 12  # those that wait for a use are counted by ticks of this size
WAITING_SHARE: Final = 0.3  # weight of one that waits, beside one that was used or given up
_TICKS: Final = np.array([1 << max(0, age - 1) for age in range(AGE_CLASSES)], np.float64)
_NOT_YOUNGER: Final = np.triu(np.ones((AGE_CLASSES, AGE_CLASSES)))  # [age, horizon]


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
        age_class = age.bit_length()
        return self._rates[use_class][age_class if age_class < AGE_CLASSES else -1]

    def wait(self, use_class: int, used_at: int, count: int = 1) -> None:
        """So many blocks wait for a use from this tick, and the ones behind it, on."""
        epochs = self._waiting[use_class]
        while count:
            epoch = used_at >> EPOCH_BITS
            here = min(count, ((epoch + 1) << EPOCH_BITS) - used_at)
            epochs[epoch] = epochs.get(epoch, 0) + here
            used_at += here
            count -= here

    def hit(self, use_class: int, used_at: int, now: int) -> None:
        """Count a use of a block that waited since `used_at`."""
        self.leave(use_class, used_at)
        age_class = (now - used_at).bit_length()
        self._hits[use_class][age_class if age_class < AGE_CLASSES else -1] += 1
        self._count(1, now)

    def missed(self, blocks: Sequence[tuple[int, int]], now: int) -> None:
        """Count blocks, each a use class and a last tick, that were given up, unused until now."""
        waiting, misses = self._waiting, self._misses
        for use_class, used_at in blocks:
            epochs, epoch = waiting[use_class], used_at >> EPOCH_BITS
            left = epochs[epoch] - 1
            if left:
                epochs[epoch] = left
            else:
                del epochs[epoch]
            age_class = (now - used_at).bit_length()
            misses[use_class][age_class if age_class < AGE_CLASSES else -1] += 1
        self._count(len(blocks), now)

    def leave(self, use_class: int, used_at: int) -> None:
        """A block waits no more, and that tells nothing."""
        epochs, epoch = self._waiting[use_class], used_at >> EPOCH_BITS
        left = epochs[epoch] - 1
        if left:
            epochs[epoch] = left
        else:
            del epochs[epoch]

    def _count(self, events: int, now: int) -> None:
        self._events += events
        if self._events >= REFIT_EVENTS:
            self._events -= REFIT_EVENTS
            self._refit(now)

    def _refit(self, now: int) -> None:
        hits, misses = np.array(self._hits), np.array(self._misses)
        ends = hits + misses
        for use_class, waiting in enumerate(self._waiting):
            for epoch, blocks in waiting.items():
                middle = (epoch << EPOCH_BITS) + (1 << (EPOCH_BITS - 1))
                age = min(max(0, now - middle).bit_length(), AGE_CLASSES - 1)
                ends[use_class, age] += WAITING_SHARE * blocks
        older = np.zeros_like(ends)
        older[:, :-1] = np.cumsum(ends[:, :0:-1], axis=1)[:, ::-1]
        exposed = _TICKS * (older + ends / 2)
        # [use class, age, horizon]: sums from the age on; what is younger does not count.
        gained = np.cumsum(hits[:, None, :] * _NOT_YOUNGER, axis=2)
        spent = np.cumsum(exposed[:, None, :] * _NOT_YOUNGER, axis=2)
        self._rates = (gained / (spent + 1)).max(axis=2).tolist()
        self._hits = (KEPT_SHARE * hits).tolist()
        self._misses = (KEPT_SHARE * misses).tolist()
