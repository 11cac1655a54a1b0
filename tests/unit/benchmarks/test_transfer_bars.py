"""Verdicts are drawn from pairs of one round, and a figure that is missing is never a success."""

from __future__ import annotations

import pytest

from benchmarks.bench_transfer import cases_of, contestants_of, placement_of
from benchmarks.transfer_bars import Case, Figures, paired, verdicts

BULK = Case(transport="tcp", op="write", size=1 << 20, blocks=1)


def figures(ours: dict[int, float], theirs: dict[int, float]) -> Figures:
    return {(BULK, "ours", "gb_s"): ours, (BULK, "raw-2", "gb_s"): theirs}


def bar(found: Figures, idle: dict[str, float] | None = None) -> str:
    (verdict,) = (v for v in verdicts(found, [BULK], 2, idle or {}) if "raw-2" in v.bar)
    return verdict.word


def test_ratios_are_of_rounds_that_both_have() -> None:
    found = figures({1: 8.0, 2: 6.0, 3: 5.0}, {2: 3.0, 3: 5.0, 4: 1.0})
    assert paired(found, BULK, "ours", "raw-2", "gb_s") == [2.0, 1.0]


@pytest.mark.parametrize(
    ("ours", "word"), [([0.9, 0.9, 0.1], "met"), ([0.8, 0.8, 9.0], "MISSED"), ([], "not measured")]
)
def test_the_median_decides(ours: list[float], word: str) -> None:
    theirs = dict.fromkeys(range(3), 1.0)
    assert bar(figures(dict(enumerate(ours)), theirs)) == word


def test_a_peer_that_crashed_is_not_beaten() -> None:
    assert bar({(BULK, "ours", "gb_s"): {1: 5.0}}) == "not measured"


def test_idle_cores_have_a_bar() -> None:
    found = {v.case: v.word for v in verdicts({}, [], 2, {"ours tcp": 0.5, "nixl tcp": 1.0})}
    assert found == {"ours tcp": "MISSED"}


def test_every_case_is_placed_and_has_rivals() -> None:
    cases = cases_of({"tcp", "shared_memory", "latency", "idle"})
    assert len(set(cases)) == len(cases)
    for case in cases:
        names = [contestant.name for contestant in contestants_of(case)]
        assert names[0] == "ours"
        assert "nixl" in names
        assert len(set(names)) == len(names)
        assert all(placement_of(case))
    wanted = {(size, blocks) for size, blocks in ((1 << 16, 1), (1 << 20, 1), (1 << 24, 1),
                                                  (1 << 28, 1), (1 << 14, 1000))}  # fmt: skip
    assert wanted <= {(case.size, case.blocks) for case in cases if case.transport == "tcp"}
