"""Where the weights of missing experts come from: a chain of sources, the nearest first.

    local  ->  peer (one-sided read)  ->  pool (the backup in the KV store)  ->  disk

`ExpertLoader` is the chain. It reserves a place in the bank for every wanted expert, asks each
source in turn for what is still missing, and tells which source served what.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic.errors import ElasticError, ExpertsUnavailable
from transfer import TransferError

logger = logging.getLogger(__name__)

ExpertId = tuple[int, int]
"""Layer (ordinal among those with experts) and logical expert."""

LOCAL = "local"


class Slab(Protocol):
    """Memory that experts lie in; `transfer.Memory` is one."""

    @property
    def tensor(self) -> torch.Tensor:
        """All of it: uint8 [nbytes]."""


class Bank(Protocol):
    """The rank's expert memory, as far as sources need it."""

    def has(self, layer: int, logical: int, /) -> bool:
        """Whether the expert's weights are complete here."""

    def location(self, layer: int, logical: int, /) -> tuple[int, int, int]:
        """Where it lies: index into `memories()`, byte offset, bytes."""

    def memories(self) -> Sequence[Slab]:
        """All slabs; the sequence only grows at its end."""

    def reserve(self, layer: int, logical: int, /) -> torch.Tensor:
        """Give it a place to be filled: uint8 [bytes]. It is not `has` until `ready`."""

    def ready(self, layer: int, logical: int, /) -> None:
        """Declare a reserved expert complete."""


class ExpertSource(Protocol):
    """One place that weights can come from."""

    @property
    def name(self) -> str:
        """What the report calls it: `peer`, `pool`, `disk`."""

    def fetch(self, wanted: Sequence[ExpertId]) -> Iterable[ExpertId]:
        """Fill the reserved places of as many of `wanted` as this source has.

        An expert may be returned only with all its bytes in place and verified. An error that
        the loader knows as recoverable moves everything of this call to the next source.

        Returns:
            The experts that were filled.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a load went.

    Attributes:
        by_source: Source name -> experts it served; only sources that served any.
        failures: Source name -> why it gave up, of sources that failed.
        elapsed_s: Seconds the whole load took.
    """

    by_source: dict[str, tuple[ExpertId, ...]]
    failures: dict[str, str]
    elapsed_s: float

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {len(experts)}" for name, experts in self.by_source.items())
        failed = "".join(f"; {name} failed: {why}" for name, why in self.failures.items())
        return (counts or "nothing to load") + failed


class ExpertLoader:
    """Brings experts into the bank from the first source that has them.

    Used from the rank loop only; blocks it. Deadlines are the sources' own.

    Args:
        bank: Where they go.
        sources: In the order to be asked.
        recoverable: Errors of a source that only mean "ask the next one".
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        bank: Bank,
        sources: Sequence[ExpertSource],
        *,
        recoverable: tuple[type[Exception], ...] = (TransferError, ElasticError, OSError),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bank = bank
        self._sources = tuple(sources)
        self._recoverable = recoverable
        self._clock = clock

    def load(self, wanted: Iterable[ExpertId]) -> Served:
        """Make all of `wanted` complete in the bank, and say who served what.

        Raises:
            ExpertsUnavailable: No source had some of them; the others are in the bank.
        """
        start = self._clock()
        asked = tuple(dict.fromkeys((int(layer), int(expert)) for layer, expert in wanted))
        here = tuple(expert for expert in asked if self._bank.has(*expert))
        by_source = {LOCAL: here} if here else {}
        failures: dict[str, str] = {}
        missing = tuple(expert for expert in asked if expert not in set(here))
        for expert in missing:
            self._bank.reserve(*expert)
        for source in self._sources:
            if not missing:
                break
            try:
                filled = set(source.fetch(missing))
            except self._recoverable as error:
                failures[source.name] = f"{type(error).__name__}: {error}"
                logger.warning("expert source %s gave up: %s", source.name, error)
                continue
            served = tuple(expert for expert in missing if expert in filled)
            for expert in served:
                self._bank.ready(*expert)
            if served:
                by_source[source.name] = served
            missing = tuple(expert for expert in missing if expert not in filled)
        if missing:
            names = tuple(source.name for source in self._sources)
            raise ExpertsUnavailable(experts=missing, tried=names)
        elapsed_s = self._clock() - start
        return Served(by_source=by_source, failures=failures, elapsed_s=elapsed_s)


class EachExpert:
    """A source that is asked for one expert at a time, such as the checkpoint on disk.

    Args:
        name: What the report calls it.
        bank: Where they go.
        fill: Writes the expert's bytes (uint8 [bytes]); False if it does not have it.
    """

    def __init__(
        self, name: str, bank: Bank, fill: Callable[[int, int, torch.Tensor], bool]
    ) -> None:
        self.name = name
        self._bank = bank
        self._fill = fill

    def fetch(self, wanted: Sequence[ExpertId]) -> list[ExpertId]:
        """Fill what `fill` has, one after the other."""
        return [e for e in wanted if self._fill(*e, place_of(self._bank, e))]


def place_of(bank: Bank, expert: ExpertId) -> torch.Tensor:
    """Return the expert's bytes in the bank, complete or only reserved: uint8 [bytes], a view."""
    slab, offset, nbytes = bank.location(*expert)
    return bank.memories()[slab].tensor[offset : offset + nbytes]
