"""Tenants of the master: who may act for them, what they see, and how much they may use."""

from __future__ import annotations

import pytest

from configs.kvstore import KVStoreConfig
from kvstore.master.books.tenants import ENTERED_MAX, TenantRule
from kvstore.master.master_server import MasterServer
from kvstore.wire import messages as m
from tests.support.master_scene import BLOCK, Scene, key

RULES = (
    TenantRule(name="small", token="s3cret", quota_bytes=3 * BLOCK),
    TenantRule(name="free", token="other"),
)


def scene_of(*nodes, blocks=8):
    scene = Scene(*nodes, blocks=blocks, tenants=RULES)
    scene.step(m.Enter("s", "small", "s3cret"))
    scene.step(m.Enter("f", "free", "other"))
    return scene


def used(scene, name):
    return {t.tenant: t.used_bytes for t in scene.step(m.ListTenants()).tenants}[name]


def test_who_may_enter():
    scene = Scene("n", tenants=RULES)
    wrong, unknown = m.RefusalReason.WRONG_TOKEN, m.RefusalReason.UNKNOWN_TENANT
    assert scene.refused(m.Enter("c", "small", "guess")) is wrong
    assert scene.refused(m.Enter("c", "small", "gu€ss")) is wrong
    assert scene.refused(m.Enter("c", "nobody", "")) is unknown
    assert scene.refused(m.Enter("c", "", "")) is unknown
    one = [key(1)]
    for request in (
        m.Allocate("c", 1, one, [64], [0]),
        m.Lookup("c", one),
        m.Exists(one),
        m.Exists(one, "c"),
        m.Remove(one, "c"),
        m.SetPin("c", one, m.Pin.HARD),
    ):
        assert scene.refused(request) is m.RefusalReason.NOT_ENTERED, request
    entered = scene.step(m.Enter("c", "small", "s3cret"))
    assert entered == m.Entered("small", 3 * BLOCK, 0)
    assert scene.put("c", 1) == ["granted"]
    scene.step(m.Fence(["c"], dead=True))
    assert scene.refused(m.Enter("c", "small", "s3cret")) is m.RefusalReason.FENCED
    assert repr(RULES[0]).find("s3cret") == -1


def test_without_tenants_everybody_is_nobody_in_particular():
    scene = Scene("n")
    assert scene.step(m.Enter("c", "")) == m.Entered("", None, 0)
    assert scene.refused(m.Enter("c", "t")) is m.RefusalReason.UNKNOWN_TENANT
    scene.put("c", 1)
    assert scene.step(m.ListTenants()).tenants == [m.TenantFigures("", None, BLOCK, 1)]
    assert scene.refused(m.SetQuota("", 5)) is m.RefusalReason.UNKNOWN_TENANT


def test_a_tenant_over_its_quota_evicts_its_own_oldest_blocks():
    scene = scene_of("n")
    scene.put("f", 11, 12)
    assert scene.put("s", 1, 2, 3) == ["granted"] * 3
    scene.step(m.Release("s", [scene.lookup("s", 3).lease_id]))
    assert scene.put("s", 4) == ["granted"]
    assert scene.there(1, 2, 3, 4, client="s") == [1, 3, 4]
    assert scene.there(11, 12, client="f") == [11, 12]
    assert used(scene, "small") == 3 * BLOCK
    assert scene.put("s", 5, length=4 * BLOCK) == ["over_quota"], "more than it may have at all"
    there = scene.there(1, 2, 3, 4, client="s")
    assert len(there) == 3, "and nothing was evicted for it"


def test_what_a_tenant_may_not_evict_of_its_own():
    scene = scene_of("n")
    scene.put("s", 1, pin=m.Pin.HARD)
    scene.put("s", 2, pin=m.Pin.SOFT)
    scene.put("s", 3)
    lease = scene.lookup("s", 3).lease_id
    assert scene.put("s", 4) == ["granted"], "a soft pin, if nothing else can go"
    assert scene.there(1, 2, 3, 4, client="s") == [1, 3, 4]
    scene.lookup("s", 4)
    assert scene.put("s", 5) == ["over_quota"]
    scene.step(m.Remove([key(3)], "s"))
    assert used(scene, "small") == 3 * BLOCK, "retired bytes are charged until they are free"
    assert scene.put("s", 5) == ["over_quota"]
    scene.step(m.Release("s", [lease]))
    assert scene.put("s", 5) == ["granted"]


def test_open_and_quarantined_bytes_are_charged():
    scene = scene_of("n")
    scene.allocate("s", 1, 2)
    assert used(scene, "small") == 2 * BLOCK
    scene.finish("s", unsettled=[0], aborted=[1])
    assert used(scene, "small") == BLOCK
    refused = scene.figures.over_quota_blocks
    assert scene.put("s", 3, 4, 5) == ["granted", "granted", "over_quota"]
    assert scene.figures.over_quota_blocks == refused + 1
    assert scene.put("s", 5) == ["granted"]
    assert scene.figures.evicted_blocks == 1
    scene.step(m.Leave("n"))
    assert used(scene, "small") == 0


def test_quotas_can_be_changed():
    scene = scene_of("n")
    scene.put("s", 1, 2, 3)
    assert scene.step(m.SetQuota("small", BLOCK)).count == 1
    assert scene.put("s", 4) == ["granted"]
    assert scene.there(1, 2, 3, 4, client="s") == [4]
    scene.step(m.SetQuota("small", None))
    assert scene.put("s", 1, 2, 3) == ["granted"] * 3
    figures = {t.tenant: t for t in scene.step(m.ListTenants()).tenants}
    assert figures["small"] == m.TenantFigures("small", None, 4 * BLOCK, 4)
    assert figures["free"].used_bytes == 0


def test_tenants_do_not_see_or_touch_each_others_blocks():
    scene = scene_of("n")
    scene.put("s", 1, group="g")
    assert scene.there(1, client="f") == []
    assert scene.lookup("f", 1).lease_id == 0
    assert scene.lookup("f", 1, every=True).node_idx == [-1]
    assert scene.put("f", 1) == ["conflict"]
    assert scene.step(m.Remove([key(1)], "f", "g")).count == 0
    assert scene.step(m.SetPin("f", [key(1)], m.Pin.HARD, 0.0, "g")).count == 0
    scene.put("f", 2, group="g")
    assert scene.step(m.Remove([], "f", "g")).count == 1
    assert scene.there(1, client="s") == [1]


def test_replicas_are_charged_each_and_those_over_the_quota_are_not_granted():
    scene = Scene("a", "b", "c", tenants=RULES)
    scene.step(m.Enter("s", "small", "s3cret"))
    scene.put("s", 1, replicas=2)
    assert used(scene, "small") == 2 * BLOCK
    scene.step(m.SetPin("s", [key(1)], m.Pin.HARD))
    assert scene.put("s", 2, replicas=2) == ["granted"]
    assert [len(where) for where in scene.places(1, 2)] == [2, 1]


def test_only_so_many_clients_are_kept_in_mind():
    scene = scene_of("n")
    tenants = scene.catalog.tenants
    for i in range(ENTERED_MAX):
        tenants.enter(f"c{i}", tenants.find("free"), "other")
    assert scene.refused(m.Lookup("s", [key(1)])) is m.RefusalReason.NOT_ENTERED


def test_tenants_are_configured_with_their_tokens_in_files(tmp_path):
    (tmp_path / "token").write_text("s3cret\n", encoding="utf-8")
    tenant = {"name": "t", "token_file": tmp_path / "token", "quota_bytes": 100}
    config = KVStoreConfig.model_validate({"tenants": [tenant]})
    master = MasterServer(config, secret=b"only the members of this cluster know it")._master
    assert master.step(m.Enter("c", "t", "s3cret"), 0.0) == m.Entered("t", 100, 0)
    with pytest.raises(ValueError, match="which of"):
        config.tenant_of_workers()
    chosen = KVStoreConfig.model_validate({"tenants": [tenant], "tenant": "t"})
    assert chosen.tenant_of_workers().token() == "s3cret"
    assert KVStoreConfig().tenant_of_workers() is None
    with pytest.raises(ValueError, match="none of the tenants"):
        KVStoreConfig.model_validate({"tenants": [tenant], "tenant": "u"})
    with pytest.raises(ValueError, match="one name"):
        KVStoreConfig.model_validate({"tenants": [tenant, tenant]})


def test_each_of_several_masters_has_its_share_of_a_configured_quota(tmp_path):
    (tmp_path / "token").write_text("s3cret", encoding="utf-8")
    tenant = {"name": "t", "token_file": tmp_path / "token", "quota_bytes": 100}
    masters = {"addresses": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]}
    config = KVStoreConfig.model_validate({"tenants": [tenant], "masters": masters})
    master = MasterServer(config, secret=b"only the members of this cluster know it")._master
    assert master.step(m.Enter("c", "t", "s3cret"), 0.0) == m.Entered("t", 34, 0)
