"""Batches kept to be told again, and what the forgotten ones added up to.

    forgotten: folded into a set of keys │ kept: batch │ batch │ ... │ batch
                      up to `folded`     │  oldest                    newest

Who asks from a number that is kept gets the batches from there on. Who asks from one that is
forgotten gets the folded state first, under the number of the last batch folded into it. So a
subscriber that was away for any time is right again after one answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.events.event_log import Change, EventBatch, EventFold


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    batch: EventBatch
    payload: bytes


class ReplayBuffer:
    """The last batches within two bounds. Not thread-safe.

    Args:
        batches_max: Most batches kept.
        bytes_max: Most payload bytes kept.
        encode: Returns the payload of changes that are told now.
    """

    def __init__(
        self,
        *,
        batches_max: int,
        bytes_max: int,
        encode: Callable[[Sequence[Change]], bytes],
    ) -> None:
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._encode = encode
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._fold = EventFold()
        self._folded: int | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, batch: EventBatch, payload: bytes) -> None:
        """Keep a batch that was sent, and forget the oldest ones beyond the bounds."""
        self._kept.append(_Kept(batch=batch, payload=payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._batches_max or self._kept_bytes > self._bytes_max:
            oldest = self._kept.popleft()
            self._kept_bytes -= len(oldest.payload)
            self._fold.apply(oldest.batch.changes)
            self._folded = oldest.batch.sequence

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Iterate over (number, payload) of what takes a subscriber from `start` to now."""
        if self._folded is not None and start <= self._folded:
            yield self._folded, self._encode(self._fold.changes())
        for kept in self._kept:
            if kept.batch.sequence >= start:
                yield kept.batch.sequence, kept.payload
