"""A leading master killed or stopped, with a standby in etcd: who speaks for the shard, who not."""

from __future__ import annotations

import secrets
import signal
import time
from contextlib import ExitStack

import pytest

from configs.kvstore_masters import EtcdConfig, KVMastersConfig
from kvstore import MasterUnavailable
from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer, seal
from kvstore.wire.master_link import MasterLink
from kvstore.wire.standing import MasterRecord, MasterStanding
from tests.support.etcd_server import running_etcd
from tests.support.master_process import WAIT_S, MasterCluster, find, read_held
from tests.support.waits import eventually

LEASE_S = 8  # a machine that stands still for some seconds deposes nobody


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def cluster(etcd):
    masters = KVMastersConfig(
        etcd=EtcdConfig(
            endpoints=(etcd.endpoint,), prefix=f"/{secrets.token_hex(8)}", lease_s=LEASE_S
        ),
        rebuild_s=10.0,
    )
    with ExitStack() as stack:
        made = MasterCluster(stack, masters=masters, heartbeat_s=0.2)
        made.standby = made.start_master(0)
        yield made


def link_to(cluster, master) -> MasterLink:
    return MasterLink(
        master.address, secret=cluster.secret, identity=secrets.token_hex(4), timeout_s=WAIT_S
    )


def wait_leads(master) -> int:
    deadline = time.monotonic() + WAIT_S
    while not (term := master.ask("term")):
        assert time.monotonic() < deadline, "it does not lead"
        time.sleep(0.02)
    return term


def wait_known(cluster, master, number: int) -> None:
    link, deadline = link_to(cluster, master), time.monotonic() + WAIT_S
    while link.ask(m.Observe(), m.MasterStatistics, patient=True).blocks < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    link.close()


def fresh_keys(number: int) -> list[bytes]:
    return [secrets.token_bytes(16) for _ in range(number)]


def test_a_standby_takes_over_from_a_killed_leader(cluster):
    (leader,), standby = cluster.masters, cluster.standby
    term = wait_leads(leader)
    writer, reader, other = cluster.workers
    keys = fresh_keys(8)
    assert writer.ask("put", keys) == ["stored"] * 8
    reader.begin("run", read_held, keys)
    eventually(lambda: cluster.figures().leases, "it has its lease")
    leader.kill()
    dead_s = time.monotonic()
    assert wait_leads(standby) > term
    leads_s = time.monotonic()
    wait_known(cluster, standby, 8)
    assert other.ask("run", find, keys) == 8
    more = fresh_keys(4)
    assert set(writer.ask("put", more)) <= {"stored", "exists"}
    assert other.ask("run", find, more) == 4
    reads, equal = reader.enough()
    assert equal
    assert sum(dead_s < ended_s < leads_s for ended_s in reads) > 10, "they went on without"


def test_a_stopped_leader_that_wakes_is_heard_by_nobody(cluster):
    (leader,), standby = cluster.masters, cluster.standby
    wait_leads(leader)
    writer, _, other = cluster.workers
    keys = fresh_keys(6)
    assert writer.ask("put", keys) == ["stored"] * 6
    leader.signal(signal.SIGSTOP)
    wait_leads(standby)
    assert leader.stopped()
    wait_known(cluster, standby, 6)
    leader.signal(signal.SIGCONT)
    # Its lease was over before it woke, so it grants nothing, not even to who asks it only.
    link = link_to(cluster, leader)
    request = m.Allocate("zombie's client", 1, fresh_keys(1), [64], [0])
    with pytest.raises(MasterUnavailable, match="stands by"):
        link.ask(request, m.Allocated)
    link.close()
    assert set(writer.ask("put", fresh_keys(4))) <= {"stored", "exists"}
    assert other.ask("run", find, keys) == 6
    cluster.masters, cluster.standby = [standby], leader
    for worker in cluster.workers:
        assert worker.process.is_alive()


def test_who_knows_a_term_takes_no_word_of_an_older_one():
    standing = MasterStanding(MasterRecord(address="old:1", term=7), identity="me")
    old = standing.record
    granted = Answer(reply=m.Done(1), term=7)
    assert standing.read("Remove", old, seal(granted)) == granted
    assert standing.meet(MasterRecord(address="new:1", term=9))
    assert not standing.meet(old)
    with pytest.raises(MasterUnavailable, match="term 9 is known"):
        standing.read("Remove", old, seal(granted))
    assert standing.stale_replies == 1
    assert standing.record.address == "new:1"
