"""Views and members: round trips and refusals."""

from __future__ import annotations

import pickle
import random

import pytest

from dispatch import ExpertMap
from elastic import errors
from elastic.errors import RecordInvalid
from elastic.view import Member, Role, View
from tests.support.membership_network import member


def view_of(ranks: list[int], epoch: int = 3) -> View:
    spread = ExpertMap.even(num_layers=2, num_logical=8, ranks=ranks)
    members = tuple(member(rank) for rank in sorted(ranks))
    return View(epoch=epoch, members=members, expert_map=spread, weights_version="v1")


def test_round_trip() -> None:
    seed = random.randrange(1 << 32)
    choose = random.Random(seed)
    for _ in range(50):
        view = view_of(choose.sample(range(100), choose.randint(1, 9)), choose.randint(1, 1 << 40))
        assert View.decode(view.encode()) == view, f"seed {seed}"
        assert View.decode(view.encode()).encode() == view.encode()


def test_bytes_are_ascii_text() -> None:
    assert view_of([0, 5]).encode().isascii()


def test_member_round_trip() -> None:
    me = Member(rank=7, incarnation="ab" * 8, role=Role.EXPERT, node="n", address="h:1", pid=5)
    assert Member.decode(me.encode()) == me


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'{"epoch":0,"members":[],"expert_map":{},"weights_version":""}',
        b"\xff\xfe",
        view_of([0]).encode()[:-5],
        view_of([0]).encode().replace(b'"epoch":3', b'"epoch":"x"'),
        view_of([0]).encode().replace(b'"epoch":3', b'"epoch":0'),
        view_of([0]).encode().replace(b'"epoch":3', b'"epoch":3,"more":1'),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RecordInvalid):
        View.decode(data)


def test_contradictions_are_refused() -> None:
    good = view_of([0, 1])
    with pytest.raises(RecordInvalid, match="unique"):
        View(epoch=1, members=(member(1), member(0)), expert_map=good.expert_map)
    with pytest.raises(RecordInvalid, match="not members"):
        View(epoch=1, members=(member(0),), expert_map=good.expert_map)
    with pytest.raises(RecordInvalid, match="not empty"):
        View(epoch=1, members=(), expert_map=ExpertMap(num_layers=1, num_logical=1, placement={}))


def test_lookups() -> None:
    view = view_of([0, 4])
    assert view.ranks == (0, 4)
    assert view.member(4) == member(4)
    assert view.member(1) is None
    assert view.named(member(0).incarnation) == member(0)
    assert [m.rank for m in view.others(member(0).incarnation)] == [4]


def test_errors_survive_pickling() -> None:
    found = [
        errors.StoreUnavailable(operation="read", problem="x"),
        errors.StoreKeyMissing(key="k", waited_s=1.0),
        errors.Evicted(epoch=3, rank=1, incarnation="a"),
        errors.JoinTimeout(rank=1, waited_s=2.0, obstacle="o"),
        errors.NoSurvivors(epoch=2),
        errors.ExpertsUnavailable(experts=((0, 1),), tried=("disk",)),
        errors.RestartsExhausted(local_rank=0, restarts=3),
        errors.AgreementTimeout(
            epoch=1, phase="agreeing", waited_s=1.0, waiting_for=(2,), story="s"
        ),
    ]
    for error in found:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), again.fields) == (str(error), error.fields)
