"""Masters elected in a real etcd: who leads, who takes over, and what is known without etcd."""

import secrets
import socket
import threading
import time

import pytest

from configs.kvstore_masters import EtcdConfig, KVMastersConfig
from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, MasterUnavailable, Store, StoreNode
from kvstore.client.master_map import MasterMap
from kvstore.discovery.candidacy import Candidacy
from kvstore.discovery.etcd import EtcdGateway
from kvstore.discovery.etcd_records import EtcdMasters
from kvstore.errors import EtcdUnavailable
from kvstore.wire import messages as m
from kvstore.wire.master_link import MasterLink
from tests.support.etcd_server import running_etcd
from transfer import TransferEngine

SECRET = secrets.token_bytes(16)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def config(etcd):
    return EtcdConfig(
        endpoints=(etcd.endpoint,), prefix=f"/{secrets.token_hex(8)}", lease_s=30, timeout_s=10.0
    )


@pytest.fixture
def gateway(config):
    made = EtcdGateway(config)
    yield made
    made.close()


class Master:
    """A master that stands for election, for one of one shards unless said otherwise."""

    def __init__(self, config, *, shard=0, num_shards=1, **knobs) -> None:
        self.store = KVStoreConfig(request_timeout_s=WAIT_S, **knobs)
        self.server = MasterServer(self.store, secret=SECRET, standby=True)
        self.server.open()
        self.candidacy = Candidacy(config, shard, num_shards, self.server)
        self.candidacy.open()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.candidacy.close()
        self.server.close()


def until(true, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_key_is_created_once_and_ends_with_its_lease(gateway, config):
    lease = gateway.grant(60)
    key = f"{config.prefix}/x"
    term = gateway.create(key, b"1", lease=lease)
    assert term is not None
    assert gateway.create(key, b"2") is None
    assert gateway.keep_alive(lease)
    revision, entries = gateway.range(f"{config.prefix}/")
    assert [(e.key, e.value, e.revision) for e in entries] == [(key, b"1", term)]
    gateway.revoke(lease)
    assert not gateway.keep_alive(lease)
    gone, again = [], gateway.create(key, b"3")
    for change in gateway.watch(f"{config.prefix}/", after=revision):
        gone.append(change)
        if len(gone) == 2:
            break
    assert [(change.key, change.value) for change in gone] == [(key, None), (key, b"3")]
    assert again is not None
    assert again > term


def test_one_leads_and_the_other_takes_over(config):
    with EtcdMasters(config, 1) as directory, Master(config) as first:
        assert first.candidacy.wait(WAIT_S)
        with Master(config) as second:
            until(lambda: directory.masters()[0].address == first.server.address, "first")
            masters = MasterMap(directory, first.store, secret=SECRET, identity="me")
            assert masters.ask(m.Exists([b"k" * 16]), m.Present).flags == [False]
            link = MasterLink(second.server.address, secret=SECRET, identity="x", timeout_s=WAIT_S)
            with pytest.raises(MasterUnavailable, match="stands by"):
                link.ask(m.Observe(), m.MasterStatistics)
            link.close()
            first.candidacy.close()
            assert second.candidacy.wait(WAIT_S)
            assert second.candidacy.term > first.candidacy.term
            until(lambda: directory.masters()[0].address == second.server.address, "second")
            assert masters.ask(m.Exists([b"k" * 16]), m.Present).flags == [False]
            masters.close()


def test_a_store_is_connected_by_its_configuration_alone(config, rng):
    knobs = KVStoreConfig(
        segment_bytes=4 << 20, request_timeout_s=WAIT_S, masters=KVMastersConfig(etcd=config)
    )
    name, value = secrets.token_hex(8), rng.randbytes(rng.randrange(1, 100_000))
    engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=SECRET)
    with EtcdMasters(config, 1) as directory, Master(config) as first:
        assert first.candidacy.wait(WAIT_S)
        node = StoreNode(engine, directory, knobs, secret=SECRET)
        engine.on_notify(node.on_notify)
        with engine, node, Store.connect(secret=SECRET, config=knobs) as store:
            assert node.wait_registered(timeout_s=WAIT_S)
            assert store.put(name, value) == "stored"
            for _ in range(3):
                with Store.connect(secret=SECRET, config=knobs) as reader:
                    assert reader.get(name) == value, "who reads at once knows who leads"
            with Master(config) as second:
                first.candidacy.close()
                assert second.candidacy.wait(WAIT_S)
                first.server.close()
                assert store.get(name) == value, "asked of the second"
    watching = [thread for thread in threading.enumerate() if thread.name == "etcd-watch"]
    assert not watching, "the store follows etcd on after its end"


def test_shards_have_masters_of_their_own(config):
    with (
        EtcdMasters(config, 2) as directory,
        Master(config, shard=0, num_shards=2) as zero,
        Master(config, shard=1, num_shards=2) as one,
    ):
        assert zero.candidacy.wait(WAIT_S)
        assert one.candidacy.wait(WAIT_S)
        expected = [zero.server.address, one.server.address]
        until(lambda: [r.address for r in directory.masters()] == expected, "both")


def test_who_cannot_lead_leaves_it_to_others_and_stands_again(config, caplog):
    """The port of its events is taken, by a stopped predecessor on the same host, say."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        events = {"enabled": True, "endpoint": endpoint, "replay_endpoint": "tcp://127.0.0.1:*"}
        with Master(config, events=events) as unable:
            until(lambda: "cannot lead" in caplog.text, "it cannot lead, and says so")
            with Master(config) as able:
                assert able.candidacy.wait(WAIT_S)
                assert not unable.candidacy.wait(0.0)
                term = able.candidacy.term
                taken.close()
            assert unable.candidacy.wait(WAIT_S)
            assert unable.candidacy.term > term
    assert caplog.text.count("cannot lead") == 1


def test_masters_that_count_shards_differently_do_not_lead(config):
    with Master(config, num_shards=2) as right:
        # Whoever comes first writes the number of shards.
        assert right.candidacy.wait(WAIT_S)
        with Master(config, shard=1, num_shards=3) as wrong:
            assert not wrong.candidacy.wait(1.0)
            assert right.candidacy.wait(0.0)


def test_everybody_goes_on_while_etcd_is_away(tmp_path):
    with running_etcd(tmp_path) as etcd:
        config = EtcdConfig(
            endpoints=("http://127.0.0.1:9", etcd.endpoint), lease_s=4, timeout_s=1.0
        )
        with EtcdMasters(config, 1) as directory, Master(config) as leader:
            assert leader.candidacy.wait(WAIT_S)
            masters = MasterMap(directory, leader.store, secret=SECRET, identity="me")
            until(lambda: directory.masters()[0].address, "known")
            etcd.stop()
            assert not etcd.healthy()
            ends_s = time.monotonic() + 3 * config.lease_s
            while time.monotonic() < ends_s:
                assert masters.ask(m.Exists([b"k" * 16]), m.Present).flags == [False]
                time.sleep(0.1)
            with pytest.raises(EtcdUnavailable):
                EtcdGateway(config).range("/")
            assert etcd.start()
            term = leader.candidacy.term
            time.sleep(config.lease_s)
            assert masters.ask(m.Exists([b"k" * 16]), m.Present).flags == [False]
            assert leader.candidacy.wait(WAIT_S)
            until(lambda: directory.masters()[0].term == leader.candidacy.term, "led again")
            assert leader.candidacy.term >= term
            masters.close()
