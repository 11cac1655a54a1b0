"""The benchmark's ranks answer, their sums are right, and what cannot be measured says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench_dispatch import CONTESTANTS, Pair
from benchmarks.dispatch_ranks import RankGroup, RankGroupFailed
from tests.support.moe_reference import identity_expert, reference


def test_every_contestant_of_ours_answers(tmp_path: Path):
    with RankGroup("ours", Path(sys.executable), 2, tmp_path) as group:
        group.wait_ready()
        for name, kind in CONTESTANTS.items():
            if kind != "ours":
                continue
            asked = {"tokens": 3, "seed": 5, "contestant": name}
            assert group.ask(asked) == [{}, {}]
            found = group.ask({**asked, "iterations": 2})
            assert all(each["seconds"] > 0 for each in found)
            assert all((each["sent_bytes"] > 0) == (name != "gloo bytes") for each in found)
        with pytest.raises(RankGroupFailed, match="no such"):
            group.ask({"tokens": 3, "seed": 5, "contestant": "no such"})


def test_a_rank_that_cannot_start_says_why(tmp_path: Path):
    with RankGroup("no such kind", Path(sys.executable), 1, tmp_path) as group:
        group.wait_ready()
        with pytest.raises(RankGroupFailed, match="rank 0 ended"):
            group.ask({"tokens": 1, "seed": 1, "contestant": "x"})


def test_the_pair_computes_an_exchange():
    pair = Pair(8)
    x, ids, weights = pair.tokens[0]
    out = pair.exchange()
    here = torch.where(ids < 32, ids, -1)  # the other rank's results are of its first exchange
    assert out.shape == x.shape
    assert torch.equal(out, reference(x, ids, weights, 0, identity_expert))
    row_bytes = 2 * 2048
    assert pair.moved_bytes >= int((here >= 0).sum()) * row_bytes
