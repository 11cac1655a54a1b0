"""Short puts of tenants: their own names and bytes, and the long way for those who are counted."""

from __future__ import annotations

import secrets

import pytest

from kvstore import MasterServer, PutOutcome, Tenant
from kvstore.client import reserved_places
from kvstore.master.books.tenants import TenantRule
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.values import quick_writes
from kvstore.wire import messages as m
from tests.support import store_pool
from tests.support.store_pool import Pool
from tests.support.waits import eventually

BLOCK = 4096
QUOTA_BLOCKS = 8
STORED = PutOutcome.STORED
RULES = (
    TenantRule(name="ann", token="ann's"),
    TenantRule(name="bob", token="bob's", quota_bytes=QUOTA_BLOCKS * BLOCK),
)
ANN, BOB = Tenant("ann", "ann's"), Tenant("bob", "bob's")


class TenantsMaster(MasterServer):
    """Knows two tenants, one of them with a quota."""

    def _new_master(self) -> StoreMaster:
        timing = MasterTiming(lease_s=self._config.lease_s, silence_s=60.0, put_s=60.0)
        return StoreMaster(timing, tenants=RULES)


@pytest.fixture
def pool(stack, monkeypatch):
    monkeypatch.setattr(store_pool, "MasterServer", TenantsMaster)
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)
    return Pool(stack, heartbeat_s=0.2)


def requests_of(store, monkeypatch):
    """The types of a store's requests from now on."""
    names, ask = [], store.client._link.ask

    def listen(request, expected, **options):
        names.append(type(request))
        return ask(request, expected, **options)

    monkeypatch.setattr(store.client._link, "ask", listen)
    return names


def used_bytes(pool, store, tenant):
    reply = store.client._link.ask(m.ListTenants(), m.TenantList)
    return next(t.used_bytes for t in reply.tenants if t.tenant == tenant.name)


def fill(store, number):
    values = {secrets.token_bytes(16): secrets.token_bytes(BLOCK) for _ in range(number)}
    assert {store.put(key, data) for key, data in values.items()} == {STORED}
    return values


def test_one_with_a_quota_goes_the_long_way_and_stays_within_it(pool, monkeypatch):
    monkeypatch.setattr(quick_writes, "PAUSE_S", 60.0)
    bob = pool.connect(tenant=BOB)
    requests = requests_of(bob, monkeypatch)
    values = fill(bob, 3 * QUOTA_BLOCKS)
    assert m.Store not in requests, "no place is held ahead by who is counted"
    assert requests.count(m.Reserve) == 1, "it is asked for once, and not again for a while"
    assert requests.count(m.Allocate) == len(values) + 1, "the first had to enter first"
    figures = pool.master.statistics()
    assert (figures.blocks, figures.open_bytes) == (QUOTA_BLOCKS, 0)
    assert used_bytes(pool, bob, BOB) == QUOTA_BLOCKS * BLOCK
    found = {key: bob.get(key) for key in values}
    left = {key: data for key, data in found.items() if data is not None}
    assert left == dict(list(values.items())[-QUOTA_BLOCKS:]), "its own oldest went"
    bob.remove_batch(list(left))
    eventually(lambda: used_bytes(pool, bob, BOB) == 0)  # when the leases of the gets are over
    pool.master.check_invariants()


def test_one_without_holds_places_that_are_its_own_until_it_leaves(pool, monkeypatch):
    with pool.connect(tenant=ANN) as ann:
        requests = requests_of(ann, monkeypatch)
        values = fill(ann, 12)
        assert m.Store in requests
        held = pool.master.statistics().open_bytes
        assert held > 0
        assert used_bytes(pool, ann, ANN) == 12 * BLOCK + held
        # The node knows them as hers, whoever is told next.
        blocks = pool.nodes[0].segments[0].index.blocks()
        assert {block.tenant for block in blocks} == {"ann"}
        assert {ann.get(key) for key in values} == set(values.values())
        assert pool.connect(tenant=BOB).get(next(iter(values))) is None, "nobody else's name"
    eventually(lambda: pool.master.statistics().open_bytes == 0)
    figures = pool.master.statistics()
    assert figures.free_bytes == figures.capacity_bytes - 12 * BLOCK
    pool.master.check_invariants()
