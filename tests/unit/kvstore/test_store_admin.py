"""The administrator's calls: many masters look like one pool."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import pytest

from kvstore import MasterRefused, MasterUnavailable
from kvstore.admin.store_admin import StoreAdmin, parse_key
from kvstore.wire import messages as m
from tests.support.scripted_master import SECRET, ScriptedMaster, figures, segment


@pytest.fixture
def serve():
    with ExitStack() as stack:

        def start(*masters: ScriptedMaster) -> StoreAdmin:
            addresses = [stack.enter_context(master).address for master in masters]
            return stack.enter_context(StoreAdmin(addresses, secret=SECRET, timeout_s=20.0))

        yield start


@pytest.mark.parametrize("num_masters", [1, 2, 5])
@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
def test_pages_of_all_masters_are_one_sorted_list(serve, num_masters, limit):
    keys = [secrets.token_bytes(16) for _ in range(200)]
    shards = [[] for _ in range(num_masters)]
    for key in keys:
        shards[int.from_bytes(key[:8], "big") % num_masters].append(key)
    admin = serve(*map(ScriptedMaster, shards))
    listed, after = [], ""
    while after is not None:
        page = admin.blocks(after=after, limit=limit)
        assert len(page.blocks) <= limit
        listed += [block.key for block in page.blocks]
        after = page.next_after
    assert listed == sorted(key.hex() for key in keys)


def test_an_empty_pool_has_one_empty_page(serve):
    page = serve(ScriptedMaster(), ScriptedMaster()).blocks()
    assert (page.blocks, page.next_after) == ([], None)


def test_shares_of_a_segment_are_added_up(serve):
    admin = serve(
        ScriptedMaster(segments=[segment("a", free_bytes=100), segment("a", 1)]),
        ScriptedMaster(segments=[segment("a", free_bytes=11, draining=True, silent_s=3.0)]),
    )
    report = admin.status()
    first, second = report.segments
    assert (first.free_bytes, first.capacity_bytes, first.blocks) == (111, 2 << 20, 6)
    assert (first.draining, first.silent_s) == (True, 3.0)
    assert second.segment == 1
    assert report.totals["nodes"] == 1
    assert report.ready


def test_a_master_that_is_away_is_a_row_that_says_so(serve):
    away = ScriptedMaster()
    admin = serve(ScriptedMaster(segments=[segment("a")], statistics=figures(blocks=7)), away)
    admin._links[1]._timeout_s = 0.3
    away.__exit__()
    report = admin.status()
    assert [master.problem is None for master in report.masters] == [True, False]
    assert report.totals["blocks"] == 7
    assert not report.ready
    with pytest.raises(MasterUnavailable):
        admin.blocks()


def test_tenants_of_all_masters_are_added_up(serve):
    admin = serve(
        ScriptedMaster(tenants=[m.TenantFigures("x", 10, 5, 1), m.TenantFigures("y", 4, 1, 1)]),
        ScriptedMaster(tenants=[m.TenantFigures("x", 10, 6, 2), m.TenantFigures("y", None, 1, 1)]),
    )
    assert admin.tenants().tenants == [
        m.TenantFigures("x", 20, 11, 3),
        m.TenantFigures("y", None, 2, 2),
    ]


def test_orders_go_to_every_master_in_even_parts(serve):
    masters = [ScriptedMaster(), ScriptedMaster(), ScriptedMaster()]
    admin = serve(*masters)
    assert admin.rebalance(10).planned == 6
    admin.set_quota("x", 3001)
    admin.set_quota("x", None)
    for master in masters:
        assert master.asked == [m.Rebalance(4), m.SetQuota("x", 1001), m.SetQuota("x", None)]


def test_a_drain_is_the_sum_and_needs_one_master_that_knows_the_node(serve):
    knows, does_not = ScriptedMaster(), ScriptedMaster()
    knows.drains["n"] = [m.Draining(4, 400, 1, 2)]
    admin = serve(knows, does_not)
    report = admin.drain("n", fewer_copies=True)
    assert (report.left_blocks, report.left_bytes, report.moved_blocks) == (4, 400, 1)
    assert (report.state, report.stuck_blocks, report.no_space_blocks) == ("moving", 2, 2)
    assert knows.asked[-1] == does_not.asked[-1] == m.Drain("n", fewer_copies=True)
    with pytest.raises(MasterRefused) as caught:
        admin.drain("other")
    assert caught.value.reason == m.RefusalReason.UNKNOWN_NODE


def test_nonsense_is_refused_before_anything_is_asked(serve):
    master = ScriptedMaster()
    admin = serve(master)
    for call in (
        lambda: admin.blocks(after="xyz"),
        lambda: admin.blocks(after="00"),
        lambda: admin.blocks(limit=0),
        lambda: admin.blocks(limit=1 << 20),
        lambda: admin.rebalance(-1),
        lambda: admin.set_quota("x", -1),
        lambda: StoreAdmin([], secret=SECRET),
    ):
        with pytest.raises(ValueError):
            call()
    assert master.asked == []


def test_keys_are_hexadecimal():
    key = secrets.token_bytes(16)
    assert parse_key(key.hex()) == key
    assert parse_key("") == b""
