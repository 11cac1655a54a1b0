"""Puts that come faster than DRAM is emptied go to disks that have room, and nothing is lost."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest

from configs.kvstore_policies import Admission, CopyBounds, FillingPolicy, PolicyConfig, TierPolicy
from kvstore import PutOutcome
from kvstore.wire import messages as m
from tests.support.planned_pool import LENGTH, PlannedPool
from tests.support.pool_member import start_pool

DRAM, SSD = m.Medium.DRAM, m.Medium.SSD
ROOM = 40  # blocks of DRAM


def pool_of(ssd: int, *, nodes: str = "a", **tiers) -> PlannedPool:
    """Nodes with little DRAM and this much disk each; nothing is demoted unless `tiers` say so."""
    chosen = TierPolicy(**{"demotion_low": 0.0, **tiers})
    policies = PolicyConfig(filling=FillingPolicy(bytes_per_s=0), tiers=chosen)
    pool = PlannedPool(policies, check_every=10)
    for node in nodes:
        pool.join(node, ROOM)
        if ssd:
            pool.join(node, ssd, medium=SSD, segment=1)
    return pool


def put(pool: PlannedPool, count: int, batches: range, **how) -> list[bytes]:
    """Put so many blocks in batches of random sizes; return their keys."""
    keys = [secrets.token_bytes(16) for _ in range(count)]
    left = list(keys)
    while left:
        batch, left = left[: (size := random.choice(batches))], left[size:]
        assert set(pool.put(batch, **how)) == {m.PutOutcome.GRANTED}
    return keys


def media_of(pool: PlannedPool, keys: list[bytes]) -> list[str]:
    return [medium for key in keys for _, medium in pool.places(key)]


@pytest.mark.parametrize("nodes", ["a", "abc"])
@pytest.mark.parametrize("batches", [range(1, 2), range(1, 90)])
def test_what_dram_cannot_take_goes_to_disks_with_room(nodes, batches):
    pool = pool_of(400, nodes=nodes)
    keys = put(pool, 350 * len(nodes), batches)
    assert pool.there(keys) == len(keys)
    assert media_of(pool, keys).count("ssd") == len(keys) - ROOM * len(nodes)
    assert pool.master.statistics().evicted_blocks == 0


def test_dram_is_emptied_meanwhile():
    pool = pool_of(400, demotion_low=0.3, demotion_high=0.5)
    keys = put(pool, 350, range(1, 20))
    assert pool.there(keys) == len(keys)
    assert pool.settle() > 0
    assert pool.there(keys) == len(keys)
    assert media_of(pool, keys).count("dram") <= 0.7 * ROOM


def test_replicas_go_there_too_each_to_a_node_of_its_own():
    pool = pool_of(400, nodes="abc")
    keys = put(pool, 300, range(1, 20), replicas=2)
    assert pool.there(keys) == len(keys), "one copy of two may go, the last may not"
    places = [{node for node, _ in pool.places(key)} for key in keys]
    assert all(len(nodes) == len(pool.places(key)) for nodes, key in zip(places, keys, strict=True))


@pytest.mark.parametrize(
    ("ssd", "tiers"),
    [
        (0, {}),
        (400, {"admission": Admission.NEVER}),
        (400, {"overflow_free": 1.0}),
        (400, {"admission": Admission.SECOND_HIT}),
    ],
)
def test_dram_evicts_as_ever_where_no_disk_should_have_it(ssd, tiers):
    pool = pool_of(ssd, **tiers)
    keys = put(pool, 200, range(1, 20))
    assert (pool.there(keys), pool.there(keys[-ROOM // 2 :])) == (ROOM, ROOM // 2)
    assert set(media_of(pool, keys)) == {"dram"}


def test_disks_keep_a_share_free_for_what_is_demoted():
    pool = pool_of(100, overflow_free=0.25)
    keys = put(pool, 400, range(1, 10))
    on_disk = media_of(pool, keys).count("ssd")
    assert 75 <= on_disk <= 75 + 10
    assert media_of(pool, keys).count("dram") == ROOM, "full again, and in use"
    assert pool.there(keys[-ROOM // 2 :]) == ROOM // 2


def test_blocks_that_were_used_are_kept_others_make_room():
    pool = pool_of(400, admission=Admission.SECOND_HIT)
    used = put(pool, ROOM // 2, range(1, 2))
    unused = put(pool, ROOM // 2, range(1, 2))
    pool.read(used)
    fresh = put(pool, ROOM, range(1, 30))
    assert pool.there(used) == len(used)
    assert pool.there(unused) == 0
    assert pool.there(fresh[-ROOM // 2 :]) == ROOM // 2


def test_a_medium_that_is_asked_for_is_what_a_put_gets():
    pool = pool_of(400)
    keys = put(pool, 200, range(1, 20), media=(DRAM,))
    assert set(media_of(pool, keys)) == {"dram"}


def test_what_is_leased_makes_no_room_but_a_disk_does():
    pool = pool_of(400)
    keys = put(pool, ROOM, range(1, 9))
    pool.read(keys, release=False)
    more = put(pool, 100, range(1, 30))
    assert pool.there([*keys, *more]) == ROOM + 100


def test_places_held_ahead_are_of_dram_and_evict_nothing_that_a_disk_should_have():
    pool = pool_of(400)
    first = put(pool, ROOM - 1, range(1, 9))
    numbers = iter(range(1_000_000, 2_000_000))
    for expected in (True, False):
        reserve = m.Reserve("writer", secrets.token_bytes(16), next(numbers), LENGTH)
        reply = pool.step(reserve)
        assert (reply.place is not None) == expected
    assert pool.there(first) == ROOM - 1


def test_a_node_goes_on_emptying_dram_while_it_reports():
    tiers = TierPolicy(demotion_low=0.5, demotion_high=0.9)
    pool = PlannedPool(PolicyConfig(tiers=tiers, copies=CopyBounds(per_node=4)))
    pool.join("a", ROOM)
    pool.join("a", 4 * ROOM, medium=SSD, segment=1)
    put(pool, ROOM, range(1, 9))
    done: list[int] = []
    moved = 0
    while copies := pool.step(m.NextCopies("a", done=done, limit=8), later=0.0).copies:
        for copy in copies:
            pool.make("a", copy)
        done = [copy.copy_id for copy in copies]
        moved += len(done)
    assert moved >= 0.5 * ROOM, "without any time having passed"
    again_s = pool.step(m.NextCopies("a", limit=8)).again_s
    assert again_s > 0, "a node that had work looks for more by itself"
    assert pool.step(m.NextCopies("a", limit=8), later=60.0).again_s == 0


def test_a_real_node_keeps_all_that_is_put_at_full_speed(tmp_path, stack):
    count, nbytes, batch = 300, 10_000, 20
    master, (member,) = start_pool(
        stack,
        members=1,
        nbytes=2 * count * nbytes,
        segments=[{"bytes": 1 << 20}, {"medium": "ssd", "bytes": 8 << 20, "path": tmp_path / "s"}],
    )
    keys = [secrets.token_bytes(16) for _ in range(count)]
    content = member.bytes[: count * nbytes].numpy().tobytes()
    for first in range(0, count, batch):
        offsets = np.arange(first, first + batch) * nbytes
        outcomes = member.client.put(keys[first : first + batch], member.region, offsets, nbytes)
        assert set(outcomes) == {PutOutcome.STORED}
    assert (master.statistics().blocks, master.statistics().evicted_blocks) == (count, 0)
    for first in range(0, count, batch):
        hit = member.client.lookup_prefix(keys[first : first + batch])
        targets = (count + np.arange(first, first + batch)) * nbytes
        assert member.client.get_into(hit, member.region, targets) == batch
        member.client.release(hit)
    assert member.bytes[count * nbytes :].numpy().tobytes() == content
