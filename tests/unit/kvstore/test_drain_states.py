"""A drain that cannot end says why, and what would end it; it ends when that comes."""

from __future__ import annotations

import random
import secrets

import pytest

from configs.kvstore_policies import FillingPolicy, PolicyConfig, TierPolicy
from kvstore import PutOptions, PutOutcome
from kvstore.admin.drains import empty_node, report_of, watch_drain
from kvstore.admin.reports import DrainState
from kvstore.admin.store_admin import StoreAdmin
from kvstore.errors import AdminRefused, DrainIncomplete, DrainStuck, MasterRefused
from kvstore.wire import messages as m
from tests.support.planned_pool import LENGTH, PlannedPool
from tests.support.store_pool import Pool
from tests.support.waits import eventually


def fresh(number):
    return [secrets.token_bytes(16) for _ in range(number)]


def quiet_pool(**blocks):
    """A pool of nodes that each take so many blocks, where nothing moves by itself."""
    calm = PolicyConfig(filling=FillingPolicy(bytes_per_s=0), tiers=TierPolicy(promotion_hits=0))
    pool = PlannedPool(calm, lease_s=1e4)
    for node, count in blocks.items():
        pool.join(node, count)
    return pool


def drained(pool, **how):
    """Give the drain time for a few looks at what is left, and return how far it is."""
    pool.step(m.Drain("a", **how))
    for _ in range(3):
        pool.settle()
        pool.step(m.Observe(), later=1.1)
    pool.settle()
    return pool.step(m.Drain("a"))


def test_too_few_failure_domains_are_told_until_one_comes():
    pool = quiet_pool(a=64, b=64)
    two, one = fresh(random.randint(1, 9)), fresh(random.randint(1, 9))
    pool.put(two, replicas=2)
    pool.put(one, client="b")
    report = drained(pool)
    assert report.left_blocks == report.stuck_blocks == report.no_domain_blocks == len(two)
    assert (report.no_node_blocks, report.in_use_blocks) == (0, 0)
    assert report.moved_blocks == len(one)
    pool.join("c", 64)
    report = drained(pool)
    assert (report.left_blocks, report.stuck_blocks, report.no_domain_blocks) == (0, 0, 0)
    assert report.moved_blocks == len(one) + len(two)
    assert all({node for node, _ in pool.places(key)} == {"b", "c"} for key in two)


def test_a_node_of_the_same_domain_is_no_way_out():
    pool = PlannedPool(PolicyConfig(filling=FillingPolicy(bytes_per_s=0)))
    pool.join("a", 64, domain="rack 1")
    pool.join("b", 64, domain="rack 2")
    keys = fresh(5)
    pool.put(keys, replicas=2)
    pool.join("c", 64, domain="rack 2")
    assert drained(pool).no_domain_blocks == 5
    pool.join("d", 64, domain="rack 1")  # where the drained copy was
    assert drained(pool).left_blocks == 0
    assert all({node for node, _ in pool.places(key)} == {"b", "d"} for key in keys)


def test_fewer_copies_end_it_and_lose_nothing():
    pool = quiet_pool(a=64, b=64)
    two = fresh(7)
    pool.put(two, replicas=2)
    assert drained(pool).no_domain_blocks == 7
    alone = fresh(3)
    pool.put(alone)  # lie at b now, and are none of it
    report = drained(pool, fewer_copies=True)
    assert (report.left_blocks, report.stuck_blocks) == (0, 0)
    assert pool.there(two + alone) == 10


def test_the_last_copy_stays_even_if_fewer_will_do():
    pool = quiet_pool(a=64)
    keys = fresh(4)
    pool.put(keys)
    report = drained(pool, fewer_copies=True)
    assert report.left_blocks == report.no_node_blocks == report.stuck_blocks == 4
    assert pool.there(keys) == 4
    pool.join("b", 64)
    assert drained(pool).left_blocks == 0
    assert pool.there(keys) == 4


def test_each_reason_counts_its_own():
    pool = quiet_pool(a=64, b=16)
    keys = fresh(20)
    pool.put(keys, client="b")
    two = fresh(2)
    pool.put(two, replicas=2)
    hit = pool.read(keys[:3], release=False)
    report = drained(pool)
    left_at_b = 16 - len(two)
    assert report.no_domain_blocks == 2
    assert report.stuck_blocks == 2 + 20 - left_at_b
    assert report.in_use_blocks == sum(("b", "dram") in pool.places(key) for key in keys[:3])
    assert report.left_blocks == report.stuck_blocks + report.in_use_blocks
    assert report.left_bytes == report.left_blocks * LENGTH
    pool.step(m.Release("reader", [hit.lease_id]))
    assert drained(pool).in_use_blocks == 0


def test_a_cancelled_drain_forgets_what_was_said():
    pool = quiet_pool(a=64, b=64)
    pool.put(fresh(3), replicas=2)
    pool.step(m.Drain("a"))
    pool.step(m.Drain("a", cancel=True))
    assert drained(pool).no_domain_blocks == 3
    pool.step(m.Drain("a", fewer_copies=True, cancel=True))
    assert drained(pool).no_domain_blocks == 3, "this one did not say that fewer will do"


def test_who_waits_for_a_drain_does_not_undo_that_another_cancelled_it():
    pool = quiet_pool(a=64, b=64)
    pool.put(fresh(3), replicas=2)
    assert not pool.step(m.Drain("a", again=True)).cancelled, "a new master knows of none: begun"
    pool.step(m.Drain("a", cancel=True))
    for _ in range(2):
        report = pool.step(m.Drain("a", again=True, fewer_copies=True), later=1.1)
        assert (report.cancelled, report.left_blocks) == (True, 3)
    (segment,) = [s for s in pool.step(m.ListSegments()).segments if s.where.node == "a"]
    assert not segment.draining
    assert not pool.step(m.Drain("a")).cancelled, "begun anew"
    assert drained(pool).no_domain_blocks == 3
    pool.step(m.Drain("a", cancel=True))
    pool.step(m.Leave("a"))
    pool.join("a", 64)
    assert not pool.step(m.Drain("a", again=True)).cancelled, "another life of that name"


@pytest.mark.parametrize("seed", [random.randrange(1 << 32) for _ in range(8)])
def test_what_is_left_is_stuck_or_in_use(seed):
    """Whatever pool it is: once nothing moves any more, each block left has its reason."""
    rng = random.Random(seed)
    pool = PlannedPool(PolicyConfig(filling=FillingPolicy(bytes_per_s=0)), check_every=20)
    for node in "abcd"[: rng.randint(1, 4)]:
        pool.join(node, rng.randint(4, 40), domain=rng.choice(["x", "y", ""]))
    keys = fresh(30)
    for key in keys:
        pool.put([key], replicas=rng.randint(1, 3), client=rng.choice("abcd"))
    there = pool.there(keys)
    report = drained(pool, fewer_copies=rng.random() < 0.3)
    assert report.left_blocks == report.stuck_blocks + report.in_use_blocks, report
    assert report.no_node_blocks + report.no_domain_blocks <= report.stuck_blocks
    assert pool.there(keys) == there


# -- as an administrator ----------------------------------------------------------------------


@pytest.mark.parametrize("masters", [1, 2])
def test_waiting_for_a_drain_that_cannot_end_is_an_error_until_a_node_comes(stack, masters):
    pool = Pool(stack, nodes=2, masters=masters, heartbeat_s=0.1)
    admin = stack.enter_context(StoreAdmin(pool.addresses, secret=pool.secret))
    values = {secrets.token_bytes(16): secrets.token_bytes(1000) for _ in range(20)}
    for key, value in values.items():
        assert pool.store.put(key, value, options=PutOptions(replicas=2)) is PutOutcome.STORED
    leaving = pool.nodes[0].name
    with pytest.raises(DrainStuck, match="wait for a node in another failure domain") as caught:
        empty_node(admin, leaving, timeout_s=60)
    assert (caught.value.node, caught.value.left_blocks) == (leaving, len(values))
    assert not caught.value.retryable
    pool.nodes.append(pool._node())
    eventually(lambda: admin.drain(leaving).state is DrainState.EMPTY, "a domain came")
    assert empty_node(admin, leaving, timeout_s=0).left_blocks == 0
    pool.nodes[0].close()
    assert {key: pool.store.get(key) for key in values} == values
    assert pool.master.statistics().lost_blocks == 0


class Scripted:
    """Answers of an administrator, one after the other, and the last again and again."""

    def __init__(self, *parts):
        self.parts = list(parts)

    def drain(self, node, *, cancel=False, fewer_copies=False, again=False):
        part = self.parts.pop(0) if len(self.parts) > 1 else self.parts[0]
        if isinstance(part, Exception):
            raise part
        return report_of(node, [part])


def test_what_is_in_use_is_waited_for_until_the_deadline():
    waiting = m.Draining(2, 20, 5, 0, in_use_blocks=2)
    told = []
    report = watch_drain(
        Scripted(waiting), "n", timeout_s=0.01, progress=lambda *numbers: told.append(numbers)
    )
    assert (report.state, told[-1]) == (DrainState.WAITING, (5, 7))
    with pytest.raises(DrainIncomplete, match="2 blocks are being read") as caught:
        empty_node(Scripted(waiting), "n", timeout_s=0)
    assert caught.value.retryable
    with pytest.raises(DrainIncomplete, match="not at its end after 0 s"):
        empty_node(Scripted(m.Draining(2, 20, 5, 0)), "n", timeout_s=0)
    assert empty_node(Scripted(waiting, m.Draining(0, 0, 7, 0)), "n", timeout_s=60).left_blocks == 0


def test_the_wait_ends_where_another_cancels():
    script = Scripted(m.Draining(2, 20, 5, 0), m.Draining(2, 20, 0, 0, cancelled=True))
    with pytest.raises(DrainIncomplete, match="2 blocks are left on n: it was cancelled"):
        empty_node(script, "n", timeout_s=60)
    empty = m.Draining(0, 0, 0, 0, cancelled=True)
    assert watch_drain(Scripted(empty), "n", timeout_s=60).state is DrainState.CANCELLED


@pytest.mark.parametrize("direct", [True, False])
def test_a_node_that_leaves_meanwhile_is_told_from_one_that_never_was(direct):
    gone = (
        MasterRefused(operation="Drain", problem="no node n", reason="unknown_node")
        if direct
        else AdminRefused(operation="POST /drains/n", status=404, problem="no node n")
    )
    with pytest.raises(DrainIncomplete, match="3 blocks are left on n: the node left the pool"):
        empty_node(Scripted(m.Draining(3, 30, 0, 0), gone), "n", timeout_s=60)
    with pytest.raises(type(gone)):
        empty_node(Scripted(gone), "n", timeout_s=60)
    other = MasterRefused(operation="Drain", problem="?", reason="malformed")
    with pytest.raises(MasterRefused):
        empty_node(Scripted(m.Draining(3, 30, 0, 0), other), "n", timeout_s=60)
