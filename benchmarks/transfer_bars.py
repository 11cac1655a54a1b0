"""The bars that the engine has to reach, as ratios of one run, and the table of verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.table import Table

IDLE_CORES_MAX = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is moved, and how its processes are placed."""

    transport: str
    op: str
    size: int
    blocks: int
    placement: str = "free"

    def __str__(self) -> str:
        size = f"{self.size >> 20}M" if self.size >= 1 << 20 else f"{self.size >> 10}K"
        what = size if self.blocks == 1 else f"{self.blocks} x {size}"
        place = "" if self.placement == "free" else f", {self.placement}"
        return f"{self.transport} {self.op} {what}{place}"


#: (case, contestant, figure) -> round -> value
Figures = dict[tuple[Case, str, str], dict[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One bar.

    Attributes:
        ratio: median over rounds of ours over theirs; None if one of them has no figure.
        at_least: or "at most", if False.
    """

    bar: str
    case: str
    wanted: float
    at_least: bool
    ratio: float | None
    rounds: int

    @property
    def word(self) -> str:
        """Met, missed, or not measured."""
        if self.ratio is None:
            return "not measured"
        good = self.ratio >= self.wanted if self.at_least else self.ratio <= self.wanted
        return "met" if good else "MISSED"


def paired(figures: Figures, case: Case, ours: str, theirs: str, figure: str) -> list[float]:
    """Ours over theirs, in each round that has both."""
    return ratios(figures.get((case, ours, figure), {}), figures.get((case, theirs, figure), {}))


def ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Ours over theirs by round, in each round that has both."""
    return [ours[n] / theirs[n] for n in sorted(ours.keys() & theirs.keys()) if theirs[n] > 0]


def verdicts(
    figures: Figures, cases: list[Case], connections: int, idle: dict[str, float]
) -> Iterator[Verdict]:
    """Judge every bar that has a case."""

    def judge(case: Case, ours: str, theirs: str, figure: str, wanted: float, *,
              at_least: bool) -> Verdict:  # fmt: skip
        found = paired(figures, case, ours, theirs, figure)
        sign = ">=" if at_least else "<="
        return Verdict(
            bar=f"{figure} {sign} {wanted:g} x {theirs}", case=str(case), wanted=wanted,
            at_least=at_least, ratio=statistics.median(found) if found else None,
            rounds=len(found),
        )  # fmt: skip

    for case in cases:
        if case.transport == "shared_memory":
            yield from _shared_memory(case, figures, judge)
        elif case.size == 4096:
            for theirs in ("nixl", "mooncake"):
                for figure in ("p50_us", "p99_us"):
                    yield judge(case, "ours", theirs, figure, 1.0, at_least=False)
        else:
            yield judge(case, "ours", f"raw-{connections}", "gb_s", 0.85, at_least=True)
            yield judge(case, "ours", "mooncake", "gb_s", 2.0, at_least=True)
            yield judge(case, "ours", "nixl", "gb_s", 1.0, at_least=True)
            for theirs in ("mooncake", "nixl"):
                yield judge(case, "ours", theirs, "cpu_s_per_gb", 1.0, at_least=False)
    for name in (name for name in idle if name.startswith("ours")):
        yield Verdict(
            bar=f"idle cores <= {IDLE_CORES_MAX}", case=name, wanted=IDLE_CORES_MAX,
            at_least=False, ratio=idle[name], rounds=1,
        )  # fmt: skip


def _shared_memory(
    case: Case, figures: Figures, judge: Callable[..., Verdict]
) -> Iterator[Verdict]:
    if case.size == 4096:
        if case.op == "write":
            prepared = (case, "ours prepared", "p50_us") in figures
            ours = "ours prepared" if prepared else "ours"
            yield judge(case, ours, "nixl", "p50_us", 1.0, at_least=False)
    else:
        wanted = 0.7 if case.blocks > 1 else 0.9
        yield judge(case, "ours", "memcpy", "gb_s", wanted, at_least=True)


def verdict_table(found: list[Verdict]) -> Table:
    """Each bar with its value."""
    table = Table(title="bars", title_justify="left")
    for column in ("case", "bar", "value", "rounds", "verdict"):
        table.add_column(column, no_wrap=True)
    for verdict in found:
        value = "-" if verdict.ratio is None else f"{verdict.ratio:.3f}"
        table.add_row(verdict.case, verdict.bar, value, str(verdict.rounds), verdict.word)
    return table


def figure_table(figures: Figures, cases: list[Case], contestants: list[str], figure: str) -> Table:
    """Medians of one figure: a row per case, a column per contestant."""
    table = Table(title=figure, title_justify="left")
    table.add_column("case", no_wrap=True)
    used = [name for name in contestants if any((c, name, figure) in figures for c in cases)]
    for name in used:
        table.add_column(name, justify="right")
    for case in cases:
        row = [figures.get((case, name, figure)) for name in used]
        if any(row):
            table.add_row(
                str(case), *(f"{statistics.median(v.values()):.3g}" if v else "-" for v in row)
            )
    return table
