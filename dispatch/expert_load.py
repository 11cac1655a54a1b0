"""How busy the experts are: recent rows by rank, layer and expert, for placement and metrics.

The dispatcher counts anyway: a route needs the rows of each slot, and adding them up is one vector
addition per exchange. Here the totals become a moving picture, outside the pass:

    counters (totals) --LoadWindow.update--> ExpertLoad of one rank --encode--> another process
    ExpertLoad of every rank --GroupLoad--> by instance, by logical expert, by rank

What happened `half_life_s` ago counts half. Needs numpy only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dispatch.errors import InputInvalid

if TYPE_CHECKING:
    from dispatch.statistics import DispatchStatistics

Rows = npt.NDArray[np.float32]  # [L, E]

_HEADER = struct.Struct("<IiIId")  # magic, rank, layers, experts, half-life
_MAGIC = 0x4C45_4F4D  # "MOEL"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoad:
    """What one rank's experts had to do lately.

    Attributes:
        rank: Whose experts.
        half_life_s: Age at which a row counts half.
        rows: [L, E] fp32, decayed number of rows that arrived for each expert here; 0 for experts
            that live elsewhere.
    """

    rank: int
    half_life_s: float
    rows: Rows

    def rows_per_s(self) -> float:
        """Return the rate of all rows of the rank, rows per second."""
        return float(self.rows.sum(dtype=np.float64)) * math.log(2) / self.half_life_s

    def hottest_ratio(self) -> float:
        """Return the busiest expert's rows over the mean of its layer's experts here.

        Only experts that got rows count for the mean; 1.0 if nothing arrived.
        """
        busy = self.rows > 0
        num_busy = busy.sum(1)
        layers = num_busy > 0
        if not layers.any():
            return 1.0
        means = self.rows.sum(1)[layers] / num_busy[layers]
        return float((self.rows.max(1)[layers] / means).max())

    def encode(self) -> bytes:
        """Return the load as bytes, 24 + 4 * L * E of them."""
        num_layers, num_logical = self.rows.shape
        header = _HEADER.pack(_MAGIC, self.rank, num_layers, num_logical, self.half_life_s)
        return header + self.rows.astype("<f4").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> ExpertLoad:
        """Read what `encode` wrote.

        Raises:
            InputInvalid: The bytes are not a load.
        """
        if len(data) < _HEADER.size:
            raise _not_a_load(f"{len(data)} bytes")
        magic, rank, num_layers, num_logical, half_life_s = _HEADER.unpack_from(data)
        if magic != _MAGIC or rank < 0 or not 0 < half_life_s < math.inf:
            raise _not_a_load("another header")
        if len(data) != _HEADER.size + 4 * num_layers * num_logical:
            raise _not_a_load(f"{len(data)} bytes for {num_layers} layers of {num_logical}")
        rows = np.frombuffer(data, "<f4", offset=_HEADER.size).reshape(num_layers, num_logical)
        if not (np.isfinite(rows) & (rows >= 0)).all():
            raise _not_a_load("a number of rows that cannot be")
        return cls(rank=rank, half_life_s=half_life_s, rows=rows.astype(np.float32))


class LoadWindow:
    """Turns totals into a decayed load. Not thread-safe.

    Args:
        rank: This rank.
        half_life_s: Age at which a row counts half.
    """

    def __init__(self, rank: int, half_life_s: float = 60.0) -> None:
        if not half_life_s > 0:
            raise InputInvalid(name="half_life_s", observed=str(half_life_s), expected="> 0")
        self._rank = rank
        self._half_life_s = half_life_s
        self._rows: npt.NDArray[np.float64] | None = None
        self._seen: npt.NDArray[np.int64] | None = None
        self._at = 0.0

    def update(self, statistics: DispatchStatistics, now: float) -> ExpertLoad:
        """Take the totals as they are; return the load at this moment.

        Args:
            statistics: Of the dispatcher, the same one each time.
            now: Seconds on any clock that does not go back.
        """
        received = statistics.received
        if self._rows is None or self._seen is None:
            self._rows, self._seen = received.astype(np.float64), received.copy()
        else:
            self._rows *= 0.5 ** (max(0.0, now - self._at) / self._half_life_s)
            self._rows += received - self._seen
            self._seen = received.copy()
        self._at = now
        rows = self._rows.astype(np.float32)
        return ExpertLoad(rank=self._rank, half_life_s=self._half_life_s, rows=rows)


class GroupLoad:
    """The loads of a group together: what a new placement is computed from. Immutable.

    Args:
        loads: One of each rank, of equal size and half-life.

    Raises:
        InputInvalid: None, two of one rank, or loads of different models.
    """

    def __init__(self, loads: Iterable[ExpertLoad]) -> None:
        listed = list(loads)
        if len({(load.rows.shape, load.half_life_s) for load in listed}) != 1:
            raise InputInvalid(
                name="loads", observed=f"{len(listed)}", expected="some, of equal size"
            )
        self._rows = {load.rank: load.rows for load in listed}
        if len(self._rows) != len(listed):
            raise InputInvalid(name="loads", observed="two of a rank", expected="one of each rank")

    def logical(self) -> Rows:
        """Return [L, E]: rows of each logical expert, all its instances together."""
        total: Rows = np.sum(list(self._rows.values()), axis=0, dtype=np.float32)
        return total

    def instances(self, layer: int, logical: int) -> Mapping[int, float]:
        """Return rank -> rows of an expert's instance there, ranks with none left out."""
        return {
            rank: float(rows[layer, logical])
            for rank, rows in sorted(self._rows.items())
            if rows[layer, logical] > 0
        }

    def ranks(self) -> Mapping[int, float]:
        """Return rank -> all its rows, ascending."""
        return {rank: float(rows.sum()) for rank, rows in sorted(self._rows.items())}

    def imbalance(self) -> float:
        """Return the busiest rank's rows over the mean, over the layers weighed by their rows.

        A layer lasts as long as its busiest rank, so the maximum is taken layer by layer: 1.0 is
        even, the number of ranks is everything on one.
        """
        by_layer = np.stack([rows.sum(1, dtype=np.float64) for rows in self._rows.values()])
        total = by_layer.sum()
        return float(by_layer.max(0).sum() * len(by_layer) / total) if total else 1.0


def _not_a_load(observed: str) -> InputInvalid:
    return InputInvalid(name="expert load", observed=observed, expected="what encode returned")
