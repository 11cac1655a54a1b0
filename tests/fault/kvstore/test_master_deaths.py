"""Masters killed, stopped and replaced while clients read and write."""

from __future__ import annotations

import secrets
import signal
import time

import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import Store
from kvstore.wire import messages as m
from tests.support.master_process import (
    WAIT_S,
    MasterCluster,
    find,
    look_up_on,
    read_held,
    write_on,
)
from tests.support.waits import eventually

DOWN_S = 4.0


def fresh_keys(number: int) -> list[bytes]:
    return [secrets.token_bytes(16) for _ in range(number)]


@pytest.mark.parametrize("shards", [1, 2])
def test_killed_and_restarted_while_clients_read_and_write(stack, shards):
    cluster = MasterCluster(stack, shards=shards)
    reader, writer, looker = cluster.workers
    keys = fresh_keys(8)
    assert writer.ask("put", keys) == ["stored"] * 8
    reader.begin("run", read_held, keys)
    eventually(lambda: cluster.figures().leases, "it has its lease")
    writer.begin("run", write_on, 4)
    looker.begin("run", look_up_on, keys)
    time.sleep(1.5)
    dying_s = time.monotonic()
    for master in cluster.masters:
        master.signal(signal.SIGKILL)
    for master in cluster.masters:
        master.kill()
    dead_s = time.monotonic()
    time.sleep(DOWN_S)
    for shard in range(shards):
        starting_s = time.monotonic()
        cluster.restart_master(shard)
    started_s = time.monotonic()
    time.sleep(3.0)
    reads, equal = reader.enough()
    stored, other, longest_s = writer.enough()
    looks, short = looker.enough()
    # Reads of leased blocks never stopped: many ended in the time without a master.
    assert equal
    assert sum(dead_s < ended_s < dead_s + DOWN_S for ended_s in reads) > 10
    # The fault fired: a put waited for the new master.
    assert longest_s > 0.9 * DOWN_S
    # Every put succeeded, within its deadline, and nothing of what was stored is lost.
    assert other == []
    assert longest_s < cluster.config.request_timeout_s
    cluster.wait_blocks(len(stored) + 8)
    assert looker.ask("run", find, stored) == len(stored)
    # No answer of the new masters was a miss while nodes told them what they hold. (While only one
    # of two is there, a lookup rightly finds less: that is a moment before and a moment after.)
    assert looks > 20
    unexpected = [
        (began_s, ended_s)
        for began_s, ended_s in short
        if ended_s < dying_s or (dead_s < began_s and ended_s < starting_s) or began_s > started_s
    ]
    assert unexpected == []
    figures = cluster.figures()
    assert figures.nodes == 3
    assert figures.corrupt_blocks == 0


def test_a_stalled_master_expires_nobody(stack):
    cluster = MasterCluster(stack, node_silence_s=6.0, heartbeat_s=0.2)
    (master,) = cluster.masters
    keys = fresh_keys(6)
    assert cluster.workers[0].ask("put", keys) == ["stored"] * 6
    reader = cluster.workers[1]
    reader.begin("run", read_held, keys)
    eventually(lambda: cluster.figures().leases, "it has its lease")
    master.signal(signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_S
    while not master.stopped():
        assert time.monotonic() < deadline
    stopped_s = time.monotonic()
    time.sleep(1.5 * cluster.config.node_silence_s)
    assert master.stopped()
    woken_s = time.monotonic()
    master.signal(signal.SIGCONT)
    reads, equal = reader.enough()
    assert equal
    assert sum(stopped_s < ended_s < woken_s for ended_s in reads) > 10
    figures = cluster.figures()
    assert (figures.blocks, figures.nodes, figures.lost_blocks) == (6, 3, 0)
    time.sleep(1.5 * cluster.config.node_silence_s)  # and nodes are heard of again by then
    figures = cluster.figures()
    assert (figures.blocks, figures.nodes, figures.lost_blocks) == (6, 3, 0)


def test_a_client_killed_while_it_holds_leases(stack):
    cluster = MasterCluster(stack, workers=3, lease_s=4.0)
    writer, holder, other = cluster.workers
    keys = fresh_keys(6)
    assert writer.ask("put", keys) == ["stored"] * 6
    held_before = cluster.map.ask(m.Observe(), m.MasterStatistics).blocks
    holder.ask("hold", keys[:4])
    time.sleep(2 * cluster.config.lease_s)  # renewed meanwhile
    assert cluster.figures().leases == 1
    holder.kill()
    killed_s = time.monotonic()
    while cluster.figures().leases:  # they end by themselves
        assert time.monotonic() - killed_s < WAIT_S
        time.sleep(0.05)
    assert held_before == 6
    cluster.map.ask(m.Fence([holder.name], dead=True), m.Done)
    survivors = cluster.figures()
    assert survivors.nodes == 2
    there = other.ask("run", find, keys)
    assert there == survivors.blocks


def test_a_node_killed_and_started_anew_offers_no_stale_key(stack):
    cluster = MasterCluster(stack, workers=2)
    writer, node = cluster.workers
    keys = fresh_keys(12)
    assert writer.ask("put", keys) == ["stored"] * 12
    found, _, _, places = writer.ask("get", keys)
    assert found == 12
    assert set(places) == {node.name}, "put on the other node"
    node.kill()
    # The master does not know yet, and names the dead node still. On the same host its memory may
    # outlive it for as long as it is mapped: what comes is right, or does not come.
    assert writer.ask("get", keys)[2]
    again = cluster.start_worker()
    assert again.name != node.name
    cluster.map.ask(m.Fence([node.name], dead=True), m.Done)
    assert cluster.map.ask(m.Exists(keys), m.Present).flags == [False] * 12
    assert writer.ask("put", keys) == ["stored"] * 12
    found, good, equal, places = writer.ask("get", keys)
    assert (found, good, equal) == (12, 12, True)
    assert set(places) == {again.name}
    assert cluster.figures().lost_blocks == 12


@pytest.mark.parametrize("backend", [TransferBackend.AUTO, TransferBackend.TCP])
def test_a_name_that_was_removed_and_put_again_keeps_its_later_bytes(stack, rng, backend):
    """Of what a node holds from before and has not overwritten nothing comes back instead."""
    cluster = MasterCluster(stack, workers=2, masters={"rebuild_s": 2.0})
    store = stack.enter_context(
        Store.connect(
            [cluster.masters[0].address],
            secret=cluster.secret,
            config=cluster.config,
            transfer=TransferConfig(backend=backend),
        )
    )
    names, values, replaced = [secrets.token_hex(8) for _ in range(120)], {}, 0
    for name in names:
        assert store.put(name, secrets.token_bytes(20_000)) == "stored"
    for _ in range(2):
        for name in rng.sample(names, 60):
            assert store.remove(name)
            values[name] = secrets.token_bytes(rng.choice((20_000, 40_000)))
            assert store.put(name, values[name]) == "stored"
            replaced += 1
    cluster.masters[0].kill()
    cluster.restart_master(0)
    eventually(lambda: cluster.figures().nodes == 2, "both have told what they hold")
    assert replaced == 120
    assert {name: store.get(name) for name in values} == values
    assert cluster.figures().corrupt_blocks == 0
