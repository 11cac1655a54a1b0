"""Clients that act for tenants: kept apart, refused, charged, and entered again by themselves."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import pytest

from kvstore import MasterServer, PutOutcome, Tenant, TenantRefused
from kvstore.master.books.tenants import TenantRule
from kvstore.master.store_master import MasterTiming, StoreMaster
from tests.support import store_pool
from tests.support.store_pool import Pool

BLOCK = 4096
RULES = (
    TenantRule(name="ann", token="ann's"),
    TenantRule(name="bob", token="bob's", quota_bytes=8 * BLOCK),
)
ANN, BOB = Tenant("ann", "ann's"), Tenant("bob", "bob's")


class TenantsMaster(MasterServer):
    """Knows two tenants."""

    def _new_master(self) -> StoreMaster:
        config = self._config
        timing = MasterTiming(lease_s=config.lease_s, silence_s=60.0, put_s=60.0)
        return StoreMaster(timing, tenants=RULES)

    def forget_everything(self) -> None:
        with self._lock:
            self._master = self._new_master()


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(store_pool, "MasterServer", TenantsMaster)
    with ExitStack() as stack:
        yield Pool(stack, heartbeat_s=0.2, request_timeout_s=20.0)


def value():
    return secrets.token_bytes(BLOCK)


def test_tenants_neither_read_one_another_nor_clash(pool):
    ann, bob = pool.connect(tenant=ANN), pool.connect(tenant=BOB)
    of_ann, of_bob = value(), value()
    assert ann.put("name", of_ann) is PutOutcome.STORED
    assert bob.get("name") is None
    assert not bob.exists("name")
    assert bob.put("name", of_bob) is PutOutcome.STORED, "no conflict"
    assert (ann.get("name"), bob.get("name")) == (of_ann, of_bob)
    assert bob.remove("name")
    assert ann.get("name") == of_ann
    key = secrets.token_bytes(16)
    assert ann.put(key, of_ann) is PutOutcome.STORED
    assert bob.get(key) is None
    assert ann.client.lookup_prefix([key]).num_blocks == 1
    assert bob.client.lookup_prefix([key]).num_blocks == 0
    assert pool.connect(tenant=ANN).get("name") == of_ann, "another client of the same tenant"


@pytest.mark.parametrize(
    ("tenant", "reason"),
    [
        (Tenant(), "not_entered"),
        (Tenant("ann", "bob's"), "wrong_token"),
        (Tenant("eve", "ann's"), "unknown_tenant"),
    ],
)
def test_who_is_no_tenant_is_refused_everywhere(pool, tenant, reason):
    store = pool.connect(tenant=tenant)
    for call in (
        lambda: store.put("name", b"value"),
        lambda: store.get("name"),
        lambda: store.get_batch(["name"]),
        lambda: store.exists("name"),
        lambda: store.remove("name"),
    ):
        with pytest.raises(TenantRefused) as caught:
            call()
        assert (caught.value.tenant, caught.value.reason) == (tenant.name, reason)
        assert "ann's" not in str(caught.value)
    assert "ann's" not in repr(tenant)
    assert pool.master.statistics().open_puts == 0


def test_a_quota_costs_its_own_tenant_alone(pool):
    ann, bob = pool.connect(tenant=ANN), pool.connect(tenant=BOB)
    assert bob.client.enter().quota_bytes == 8 * BLOCK
    kept = [value() for _ in range(20)]
    assert set(ann.put_batch([f"name {i}" for i in range(20)], kept)) == {PutOutcome.STORED}
    for i in range(20):
        assert bob.put(f"name {i}", value()) is PutOutcome.STORED, "its oldest makes room"
    assert bob.client.enter().used_bytes <= 8 * BLOCK
    assert sum(bob.exists_batch([f"name {i}" for i in range(20)])) == 8
    assert bob.put("large", secrets.token_bytes(9 * BLOCK)) is PutOutcome.OVER_QUOTA
    assert [r.value for r in ann.get_batch([f"name {i}" for i in range(20)])] == kept
    pool.master.check_invariants()


def test_clients_enter_again_when_a_master_knows_nobody(pool):
    ann = pool.connect(tenant=ANN)
    before = value()
    ann.put("before", before)
    pool.master.forget_everything()
    assert ann.exists("anything") is False
    pool.master.forget_everything()
    assert ann.get("anything") is None
    for node in pool.nodes:
        node.use_master(pool.master.address)
        assert node.wait_registered(20.0)
    assert ann.put("after", value()) in (PutOutcome.STORED, PutOutcome.NO_SPACE)
    assert ann.get_batch(["before"])[0].value in (before, None)
