"""Reading values in place, beside the copying gets: a figure of its own, which no bar is about.

Ours is verified each time. What peers call so is measured likewise (Mooncake's `get_buffer`, which
copies the value into a buffer of its client and gives the address of that).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from benchmarks.transfer_bars import Case, Figures, ratios

VIEWS: Final = ("view", "view and read")
_SIZES: Final = ((65536, VIEWS[:1]), (1 << 20, VIEWS[:1]), (16 << 20, VIEWS))
_OURS: Final = "ours"
_MEMCPY: Final = "memcpy"


def in_place_cases(clients: tuple[int, ...]) -> list[Case]:
    """Every size and number of clients; of the largest also with a reader of all bytes."""
    return [
        Case(transport=f"{count} client{'s' if count > 1 else ''}", op=op, size=size, blocks=1)
        for count in clients
        for size, ops in _SIZES
        for op in ops
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Ours in place, and one figure beside it.

    Attributes:
        case: What is read in place.
        what: The figure beside it.
        ours: GB/s, median over rounds.
        theirs: Likewise.
        ratio: Median over rounds of ours over theirs.
        rounds: That have both.
    """

    case: Case
    what: str
    ours: float
    theirs: float
    ratio: float
    rounds: int


def beside(figures: Figures) -> Iterator[Beside]:
    """Ours in place beside our get, memcpy, and what of the peers is best at either."""
    names = {name for _, name, _ in figures}
    peers = sorted(names - {_OURS, "ours tcp", _MEMCPY})
    for case, name, figure in figures:
        if case.op not in VIEWS or (name, figure) != (_OURS, "gb_s"):
            continue
        get = Case(transport=case.transport, op="get", size=case.size, blocks=1)
        for against, those in ((get, [_OURS]), (get, [_MEMCPY]), (get, peers), (case, peers)):
            rates = {n: figures.get((against, n, "gb_s"), {}) for n in those}
            best = max((n for n in those if rates[n]), key=lambda n: _median(rates[n]), default="")
            found = ratios(figures[case, _OURS, "gb_s"], rates[best]) if best else []
            if found:
                yield Beside(
                    case=case,
                    what=f"{best}, {against.op}",
                    ours=_median(figures[case, _OURS, "gb_s"]),
                    theirs=_median(rates[best]),
                    ratio=statistics.median(found),
                    rounds=len(found),
                )


def in_place_table(figures: Figures) -> Table:
    """A row for each figure beside ours."""
    table = Table(title="in place (no bar)", title_justify="left")
    for column in ("case", "ours, GB/s", "beside", "GB/s", "ratio", "rounds"):
        table.add_column(column, no_wrap=True)
    for one in beside(figures):
        table.add_row(
            str(one.case), f"{one.ours:.3g}", one.what, f"{one.theirs:.3g}", f"{one.ratio:.3f}",
            str(one.rounds),
        )  # fmt: skip
    return table


def in_place_lines(figures: Figures) -> list[dict[str, Any]]:
    """The same for the results file."""
    return [
        {"figure": "in place", "case": str(one.case), "beside": one.what, "value": one.ratio,
         "rounds": one.rounds}
        for one in beside(figures)
    ]  # fmt: skip


def _median(rounds: dict[int, float]) -> float:
    return statistics.median(rounds.values())
