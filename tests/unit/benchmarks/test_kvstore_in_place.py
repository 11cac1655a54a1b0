"""What stands beside a figure of reading in place, and that no bar is about it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bench_kvstore_peers import HAVE_VIEWS, OURS, cases_of, verdicts_of
from benchmarks.kvstore_in_place import (
    VIEWS,
    beside,
    in_place_cases,
    in_place_lines,
    in_place_table,
)
from benchmarks.transfer_bars import Case, Figures

GET = Case(transport="1 client", op="get", size=16 << 20, blocks=1)
VIEW = Case(transport="1 client", op="view", size=16 << 20, blocks=1)


def rates(case: Case, **medians: float) -> Figures:
    return {
        (case, name.replace("_", " "), "gb_s"): {0: value, 1: value, 2: value}
        for name, value in medians.items()
    }


def test_ours_stands_beside_the_best_peer_s_get_and_the_best_peer_s_view() -> None:
    figures = rates(GET, ours=40, ours_tcp=4, memcpy=30, mooncake_dummy=20, redis=2, valkey=6)
    figures |= rates(VIEW, ours=60, mooncake_dummy=15, mooncake_local=3)
    found = {one.what: one.ratio for one in beside(figures)}
    assert found == pytest.approx(
        {"ours, get": 1.5, "memcpy, get": 2, "mooncake dummy, get": 3, "mooncake dummy, view": 4}
    )
    assert [line["value"] for line in in_place_lines(figures)] == pytest.approx([1.5, 2, 3, 4])
    assert in_place_table(figures).row_count == 4
    del figures[VIEW, OURS, "gb_s"]
    assert not list(beside(figures))


def test_no_bar_is_about_it_and_its_cases_are_those_of_gets() -> None:
    cases = in_place_cases((1, 4))
    assert len(cases) == 8
    gets = {(c.transport, c.size) for c in cases_of((1, 4)) if c.op == "get" and c.blocks == 1}
    assert {(c.transport, c.size) for c in cases} <= gets
    assert {case.op for case in cases} == set(VIEWS)
    figures: Figures = {}
    for case in cases:
        figures |= rates(case, **{name.replace(" ", "_"): 1.0 for name in HAVE_VIEWS})
    assert verdicts_of(figures, cases) == []


def test_a_reader_reads_every_byte() -> None:
    from benchmarks.peers.store_side import read_all

    value = np.random.default_rng().integers(0, 256, 4096, dtype=np.uint8)
    before = read_all(value)
    value[np.random.default_rng().integers(4096)] ^= 1
    assert read_all(value) != before
