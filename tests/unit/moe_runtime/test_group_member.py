"""What a worker does in a view change, with a real bank and loader."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from configs.schema import MissingExperts
from dispatch import ExpertMap
from elastic import ExpertLoader
from elastic.errors import ExpertsUnavailable
from elastic.expert_source import EachExpert
from elastic.view import View
from moe_runtime.group_member import WorkerMember
from moe_runtime.messages import ViewCommitted
from moe_runtime.models.experts import ExpertBank
from tests.support.generation import allocate
from tests.support.membership_network import member

LAYERS, EXPERTS = 2, 7


class Dispatcher:
    """Keeps what it is told."""

    def __init__(self):
        self.prepared, self.installed = [], []

    def prepare(self, **asked):
        self.prepared.append(asked)
        return {rank: b"window" for rank in asked["members"] if rank != asked["rank"]}

    def install(self, offers):
        self.installed.append(offers)


class Worker:
    def __init__(self, rank):
        spec = SimpleNamespace(
            expert_bytes=lambda dtype: 3 * 2 * 4 * dtype.itemsize,
            moe_intermediate_size=2,
            hidden_size=4,
        )
        self.read, self.sent, self.on_disk = [], [], True
        self.warm_ups = []
        self.bank = ExpertBank(spec, torch.float32, allocate)
        self.dispatcher = Dispatcher()
        disk = EachExpert("disk", self.bank, self.fill)
        self.member = WorkerMember(
            rank=rank,
            incarnation=member(rank).incarnation,
            dispatcher=self.dispatcher,
            bank=self.bank,
            loader=ExpertLoader(self.bank, [disk]),
            missing_experts=MissingExperts.DEGRADE,
            warm_up=lambda: self.warm_ups.append(self.bank.resident()),
            link=SimpleNamespace(send=self.sent.append),
        )

    def fill(self, layer, expert, place):
        self.read.append((layer, expert))
        place.fill_(10 * layer + expert)
        return self.on_disk


def view(epoch, ranks, expert_map=None):
    spread = ExpertMap.even(num_layers=LAYERS, num_logical=EXPERTS, ranks=ranks)
    return View(
        epoch=epoch,
        members=tuple(member(rank) for rank in ranks),
        expert_map=expert_map or spread,
        weights_version="v",
    )


def held(view, rank):
    return [(la, e) for la in range(LAYERS) for e in view.expert_map.experts_of(rank, la)]


def test_only_missing_experts_are_loaded_and_warmed_up():
    worker, first, second = Worker(1), view(1, [0, 1, 2]), view(2, [0, 1])
    worker.member.load(first)
    assert worker.read == held(first, 1)
    assert worker.warm_ups == [tuple(held(first, 1))], "with all experts in place"
    worker.member.load(first)
    assert worker.read == held(first, 1), "nothing twice"
    assert len(worker.warm_ups) == 1
    worker.member.load(second)
    assert set(worker.read) == {*held(first, 1), *held(second, 1)}
    assert worker.bank.resident() == tuple(held(second, 1))
    for layer, expert in held(second, 1):
        assert (worker.bank.blob(layer, expert) == 10 * layer + expert).all()


def test_an_expert_that_nobody_has_is_an_error():
    worker = Worker(0)
    worker.on_disk = False
    with pytest.raises(ExpertsUnavailable):
        worker.member.load(view(1, [0, 1]))
    assert worker.warm_ups == []
    assert worker.bank.resident() == ()


def test_windows_are_prepared_for_the_views_members():
    worker, seen = Worker(2), view(5, [0, 2, 3])
    assert worker.member.prepare(seen) == {0: b"window", 3: b"window"}
    (asked,) = worker.dispatcher.prepared
    assert asked["epoch"] == 5
    assert asked["rank"] == 2
    assert asked["members"] == {rank: member(rank).incarnation for rank in (0, 2, 3)}
    assert asked["expert_map"] == seen.expert_map
    assert asked["missing_experts"] is MissingExperts.DEGRADE
    worker.member.install(seen, {0: b"a", 3: b"b"})
    assert worker.dispatcher.installed == [{0: b"a", 3: b"b"}]


def test_the_front_hears_of_a_committed_view():
    worker, seen = Worker(0), view(9, [0, 4])
    worker.member.committed(seen)
    (message,) = worker.sent
    assert isinstance(message, ViewCommitted)
    assert (message.incarnation, message.epoch) == (member(0).incarnation, 9)
    assert message.members == [member(0).incarnation, member(4).incarnation]
    assert View.decode(message.view) == seen
