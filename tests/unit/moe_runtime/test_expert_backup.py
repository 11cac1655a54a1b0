"""Experts in a real pool: another rank reads back what the first one held, and nothing else."""

from __future__ import annotations

import secrets
import time
from types import SimpleNamespace

import torch

from elastic.expert_server import Slabs
from moe_runtime.expert_backup import ExpertBackup
from moe_runtime.models.experts import ExpertBank
from tests.support.pool_member import WAIT_S, start_pool
from transfer import allocate

EXPERTS = [(layer, expert) for layer in range(2) for expert in range(7)]


class Holder:
    """A pool member with a bank of several slabs, and the backup of it."""

    def __init__(self, stack, member, namespace):
        spec = SimpleNamespace(
            expert_bytes=lambda dtype: 3 * 10 * 4 * dtype.itemsize,
            moe_intermediate_size=10,
            hidden_size=4,
        )
        self.pool = member
        self.bank = ExpertBank(spec, torch.float32, allocate, slab_bytes=7 * 512)  # full with seven
        stack.callback(self.bank.close)
        slabs = Slabs(member.engine, self.bank)
        stack.callback(slabs.close)
        self.backup = ExpertBackup(
            member.engine, member.client, self.bank, slabs, namespace=namespace
        )
        stack.callback(self.backup.close)

    def fill(self, experts):
        for expert in experts:
            self.bank.reserve(*expert).random_(
                generator=torch.Generator().manual_seed(secrets.randbits(60))
            )
            self.bank.ready(*expert)

    def fetch(self, experts):
        for expert in experts:
            self.bank.reserve(*expert)
        found = self.backup.fetch(experts)
        for expert in found:
            self.bank.ready(*expert)
        return found


def until_stored(client, count):
    deadline = time.monotonic() + WAIT_S
    while client.master_statistics().blocks < count:
        assert time.monotonic() < deadline, client.master_statistics()
        time.sleep(0.01)


def holders(stack, count=2):
    _, members = start_pool(stack, members=count)
    namespace = secrets.token_bytes(16)
    return [Holder(stack, member, namespace) for member in members]


def test_another_rank_reads_back_the_same_bytes(stack):
    first, second = holders(stack)
    held = [expert for expert in EXPERTS if expert not in ((0, 2), (1, 0))]
    first.fill(held)
    first.backup.open()
    until_stored(second.pool.client, len(held))
    assert sorted(second.fetch(EXPERTS)) == held, "around the gaps"
    for expert in held:
        assert torch.equal(first.bank.blob(*expert), second.bank.blob(*expert)), expert
    assert not second.bank.has(0, 2)


def test_the_copy_is_not_on_the_rank_that_holds_the_expert(stack):
    first, second, third = holders(stack, 3)
    first.fill(EXPERTS)
    first.backup.open()
    until_stored(third.pool.client, len(EXPERTS))
    first.backup.close()
    expected = {expert: first.bank.blob(*expert).clone() for expert in EXPERTS}
    first.pool.engine.close()
    assert sorted(third.fetch(EXPERTS)) == EXPERTS
    assert all(torch.equal(third.bank.blob(*e), expected[e]) for e in EXPERTS)
    del second


def test_other_weights_have_other_keys(stack):
    first, second = holders(stack)
    first.fill(EXPERTS[:3])
    first.backup.open()
    until_stored(second.pool.client, 3)
    stranger = Holder(stack, second.pool, secrets.token_bytes(16))
    assert stranger.fetch(EXPERTS[:3]) == []


def test_an_expert_whose_place_was_taken_is_not_stored(stack, monkeypatch):
    """The rank loop gives places away while the thread copies."""
    first, second = holders(stack)
    first.fill(EXPERTS)
    read, taken = first.bank.blob, []

    def blob(*expert):
        found = read(*expert)
        if expert in ((0, 3), (1, 1)) and expert not in taken:
            taken.append(expert)
            newcomers = [(9, number) for number in range(len(taken))]
            first.bank.retain([e for e in EXPERTS if e not in taken] + newcomers)
            place = first.bank.location(*expert)
            first.bank.reserve(*newcomers[-1]).fill_(0)
            assert first.bank.location(*newcomers[-1]) == place
        return found

    monkeypatch.setattr(first.bank, "blob", blob)
    kept = [expert for expert in EXPERTS if expert not in ((0, 3), (1, 1))]
    first.backup.open()
    until_stored(second.pool.client, len(kept))
    first.backup.close()
    assert taken == [(0, 3), (1, 1)]
    assert sorted(second.fetch(EXPERTS)) == kept
    assert all(torch.equal(first.bank.blob(*e), second.bank.blob(*e)) for e in kept)


def test_a_pool_that_is_gone_ends_the_thread_quietly(stack):
    first, _ = holders(stack)
    first.fill(EXPERTS)
    first.pool.client.close()
    first.backup.open()
    first.backup.close()
