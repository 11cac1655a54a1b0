"""The chain of expert sources: order, report, failures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from elastic.errors import ExpertsUnavailable
from elastic.expert_source import EachExpert, ExpertId, ExpertLoader, place_of
from tests.support.small_bank import SmallBank
from transfer import PeerLost


class Some:
    """A source that has some experts, all bytes of which are `mark`."""

    def __init__(self, name: str, bank: SmallBank, has: set[ExpertId], mark: int) -> None:
        self.name, self.bank, self.holds, self.mark = name, bank, has, mark
        self.asked: list[tuple[ExpertId, ...]] = []

    def fetch(self, wanted: Sequence[ExpertId]) -> list[ExpertId]:
        self.asked.append(tuple(wanted))
        filled = [expert for expert in wanted if expert in self.holds]
        for expert in filled:
            place_of(self.bank, expert).fill_(self.mark)
        return filled


class Broken:
    name = "pool"

    def fetch(self, wanted: Sequence[ExpertId]) -> list[ExpertId]:
        raise PeerLost("pool", "cut")


def test_order_and_report() -> None:
    bank = SmallBank()
    bank.reserve(0, 0)
    bank.ready(0, 0)
    peer = Some("peer", bank, {(0, 1), (0, 0)}, 1)
    pool = Some("pool", bank, {(0, 1), (0, 2)}, 2)
    disk = Some("disk", bank, {(layer, e) for layer in range(2) for e in range(8)}, 3)
    served = ExpertLoader(bank, [peer, pool, disk]).load([(0, 0), (0, 1), (0, 2), (1, 7), (0, 1)])
    assert served.by_source == {
        "local": ((0, 0),),
        "peer": ((0, 1),),
        "pool": ((0, 2),),
        "disk": ((1, 7),),
    }
    assert pool.asked == [((0, 2), (1, 7))]
    for expert, mark in {(0, 1): 1, (0, 2): 2, (1, 7): 3}.items():
        assert bank.has(*expert)
        assert place_of(bank, expert).unique().tolist() == [mark]
    assert str(served) == "local 1, peer 1, pool 1, disk 1"


def test_a_broken_source_is_skipped_and_named() -> None:
    bank = SmallBank()
    disk = Some("disk", bank, {(0, 1)}, 3)
    served = ExpertLoader(bank, [Broken(), disk]).load([(0, 1)])
    assert served.by_source == {"disk": ((0, 1),)}
    assert served.failures == {"pool": "PeerLost: peer pool lost: cut"}


def test_nobody_has_it() -> None:
    bank = SmallBank()
    disk = Some("disk", bank, {(0, 1)}, 3)
    with pytest.raises(ExpertsUnavailable) as caught:
        ExpertLoader(bank, [disk]).load([(0, 1), (3, 4)])
    assert caught.value.experts == ((3, 4),)
    assert caught.value.tried == ("disk",)
    assert bank.has(0, 1)
    assert not bank.has(3, 4)


def test_other_errors_are_not_swallowed() -> None:
    class Wrong(Broken):
        def fetch(self, wanted: Sequence[ExpertId]) -> list[ExpertId]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ExpertLoader(SmallBank(), [Wrong()]).load([(0, 1)])


def test_nothing_wanted() -> None:
    served = ExpertLoader(SmallBank(), []).load([])
    assert served.by_source == {}
    assert str(served) == "nothing to load"


def test_each_expert() -> None:
    bank = SmallBank()

    def fill(layer: int, logical: int, blob: torch.Tensor) -> bool:
        blob.fill_(10 * layer + logical)
        return logical != 5

    served = ExpertLoader(
        bank, [EachExpert("disk", bank, fill), Some("last", bank, {(1, 5)}, 9)]
    ).load([(1, 2), (1, 5)])
    assert served.by_source == {"disk": ((1, 2),), "last": ((1, 5),)}
    assert place_of(bank, (1, 2)).unique().tolist() == [12]
