"""What `stored` promises of posted puts, wherever signals find clients, masters and nodes."""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import chain

import pytest

from configs.kvstore_masters import EtcdConfig, KVMastersConfig
from kvstore import Store
from kvstore.client import reserved_places
from kvstore.master.books.catalog import Catalog
from kvstore.values.names import key_of
from kvstore.values.store import VALUES
from tests.support.departures import Departure, read_departures
from tests.support.etcd_server import running_etcd
from tests.support.master_process import MasterCluster
from tests.support.put_journal import Journals, contradictions, is_version
from tests.support.short_puts import warm
from tests.support.store_pool import Pool
from tests.support.storming_process import LOOKS, PostingProcess, read_on, write_on
from tests.support.waits import WAIT_S, eventually

WRITERS = 4
LEASE_S = 4
POSTED = 40  # puts; so many are waited for


class Storm:
    """Writers and a reader on a cluster, and whoever disturbs them."""

    def __init__(
        self,
        stack: ExitStack,
        folder,
        seed: int,
        *,
        is_strict: bool = True,
        churns: bool = True,
        **knobs,
    ) -> None:
        self.rng, self.churns = random.Random(seed), churns
        defaults = {
            "workers": 2,
            "segment_bytes": 1 << 30,
            "heartbeat_s": 0.1,
            "open_put_s": 6.0,
            "lease_s": 2.0,
            "masters": {"rebuild_s": 3.0},
        }
        self.departures = folder / "departures"
        self.cluster = MasterCluster(stack, departures=self.departures, **{**defaults, **knobs})
        self.folder = folder / "calls"
        self.folder.mkdir()
        self.journals = Journals(self.folder)
        self.writers = [self._writer() for _ in range(WRITERS)]
        self.reader = PostingProcess(self.cluster, read_on, self.folder, is_strict)
        for process in (*self.writers, self.reader):
            assert process.recv() == "ready"
        self.killed = 0
        self.deaths: list[tuple[float, float]] = []  # of masters: the time around each

    @property
    def master(self):
        return self.cluster.masters[0]

    def _writer(self) -> PostingProcess:
        seed = self.rng.randrange(1 << 30)
        return PostingProcess(self.cluster, write_on, self.folder, seed, self.churns)

    def stop_writers(self, seconds: float) -> None:
        """Stop a writer, wherever that finds it, again and again."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            writer = self.rng.choice(self.writers)
            writer.signal(signal.SIGSTOP)
            time.sleep(self.rng.choice((0.0, 0.001, 0.03, 0.1)))
            writer.signal(signal.SIGCONT)
            time.sleep(self.rng.random() * 0.01)

    def kill_writer(self) -> None:
        at = self.rng.randrange(WRITERS)
        self.writers[at].kill()
        self.writers[at] = self._writer()
        assert self.writers[at].recv() == "ready"
        self.killed += 1

    def stop_master(self, seconds: float) -> None:
        self.master.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.master.signal(signal.SIGCONT)

    @contextmanager
    def dying(self):
        """What a master's death may concern is from a moment before to a moment after."""
        since_s = time.monotonic() - 1.0
        yield
        self.deaths.append((since_s, time.monotonic() + 2.0))

    def posted_since(self, moment_s: float) -> int:
        self.journals.read()
        return sum(c.way == "posted" and c.began_s > moment_s for c in self.journals.ended)

    def wait_posted(self, number: int = POSTED) -> None:
        """Return once puts are being posted, as of now."""
        since_s = time.monotonic()
        eventually(lambda: self.posted_since(since_s) >= number, "puts are posted")

    def end(self) -> None:
        """Let all end, and check what they wrote down against each other and against the pool."""
        for writer in self.writers:
            assert writer.enough() == [], "bytes that nobody has put"
        looked, missed, wrong = self.reader.enough()
        assert looked > LOOKS
        self.journals.read()
        names, gone = self.journals.of_names(), Gone(self.departures)
        missed = [name for name, _ in missed if not gone.explains(name, names[name])]
        assert (missed, wrong) == ([], [])
        ways = self.journals.ways()
        assert ways["posted"] >= 2 * POSTED, ways  # each storm waits for so many twice
        assert ways["asked"], ways
        assert ways["batch"], ways
        by_name = {n: c for n, c in names.items() if not overlap(c, self.deaths)}
        assert len(by_name) > 100
        found = [contradictions(c, evicts=gone.went(n)) for n, c in by_name.items()]
        assert list(chain.from_iterable(found)) == []

    def check_pool(self) -> None:
        """What was stored is there; nothing of those who are gone is left."""
        args = (self.folder, self.deaths, self.departures)
        checker = PostingProcess(self.cluster, check_all, *args)
        missing, wrong = checker.end()
        assert (missing, wrong) == ([], [])
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        eventually(lambda: self.cluster.figures().open_bytes == 0, "no place is held")
        eventually(lambda: self.cluster.figures().quarantined_bytes == 0, "none is closed")
        for master in self.cluster.masters:
            words = master.ask("words")
            if words is not None:
                assert words.clients == 0, words
                assert words.claims == 0, words
                assert words.own == words.keys == words.used, words
            lent = [f for f in _descriptors(master) if "moe-runtime-posts" in f]
            assert lent == []


def _descriptors(master) -> list[str]:
    found = []
    folder = f"/proc/{master.process.pid}/fd"
    import os

    for name in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{name}"))
        except FileNotFoundError:
            continue
    return found


def overlap(calls, deaths) -> bool:
    """Tell whether several clients put a name while a master ended.

    What was asked of it and not answered is known to its node already: of two such puts of one
    name the next master takes either.
    """
    return len(calls) > 1 and any(
        call.began_s < until_s and call.ended_s > since_s
        for call in calls
        for since_s, until_s in deaths
    )


class Gone:
    """What the masters have let go of by themselves, whether they live or not."""

    def __init__(self, departures) -> None:
        self._departures = read_departures(departures)

    def of(self, name: str) -> list[Departure]:
        """Leave out what a client has removed."""
        return [d for d in self._departures.get(key_of(name, VALUES), []) if d.by != "_remove"]

    def went(self, name: str) -> bool:
        return bool(self.of(name))

    def explains(self, name: str, calls) -> bool:
        """Tell whether a stored name may be missed: it was there, and went."""
        since_s = max((c.began_s for c in calls if c.is_stored), default=float("inf"))
        return any(departure.at_s > since_s for departure in self.of(name))


def any_of(calls, outcomes) -> bool:
    return any(call.what == "remove" or call.outcome in outcomes for call in calls)


def check_all(pipe, store, folder, deaths, departures):
    """Return the names that must be there and are not, and those whose bytes are no version."""
    journals, missing, wrong = Journals(folder), [], []
    journals.read()
    for name, calls in journals.of_names().items():
        value = store.get(name)
        versions = {c.version for c in calls if c.is_stored}
        if value is None:
            if versions and not any(c.what == "remove" for c in calls):
                missing.append(name)
        elif not is_version(name, value):
            wrong.append(name)
        elif overlap(calls, deaths):
            continue
        elif len(versions) == 1 and int.from_bytes(value[:8], "little") not in versions:
            unclear = ("", "raised", "failed")
            wrong += [c for c in calls if c.is_stored and not any_of(calls, unclear)]
    gone, names = Gone(departures), journals.of_names()
    return [name for name in missing if not gone.explains(name, names[name])], wrong


def test_writers_stopped_and_killed_in_mid_put(stack, tmp_path, seed):
    storm = Storm(stack, tmp_path, seed)
    storm.wait_posted()
    for _ in range(3):
        storm.stop_writers(1.0)
        storm.kill_writer()
        storm.stop_master(storm.rng.random() * 0.4)
    storm.wait_posted()
    assert storm.killed == 3
    storm.end()
    storm.check_pool()


def test_masters_killed_and_started_again_at_their_address(stack, tmp_path, seed):
    # What was removed comes back with a new master: nothing is removed here.
    storm = Storm(stack, tmp_path, seed, churns=False)
    for _ in range(2):
        storm.wait_posted()
        storm.stop_writers(storm.rng.random() * 0.3)
        with storm.dying():
            storm.master.kill()
            time.sleep(storm.rng.random() * 0.5)
            storm.cluster.restart_master(0)
    storm.wait_posted()
    storm.end()
    storm.check_pool()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def test_a_standby_takes_over_from_a_leader_that_is_stopped_or_killed(stack, etcd, tmp_path, seed):
    prefix = f"/{secrets.token_hex(8)}"
    found = EtcdConfig(endpoints=(etcd.endpoint,), prefix=prefix, lease_s=LEASE_S)
    masters = KVMastersConfig(etcd=found, rebuild_s=6.0)  # nodes may be late on a busy machine
    storm = Storm(stack, tmp_path, seed, churns=False, masters=masters)
    standby, leader = storm.cluster.start_master(0), storm.master
    end = storm.rng.choice((signal.SIGSTOP, signal.SIGKILL))  # either takes half a minute
    storm.wait_posted()
    with storm.dying():
        leader.signal(end)
        eventually(lambda: standby.ask("term"), "it leads")
    storm.cluster.masters[0] = standby
    storm.wait_posted()
    if end is signal.SIGSTOP:
        leader.signal(signal.SIGCONT)
    storm.end()
    storm.check_pool()


def test_a_small_pool_whose_nodes_stop_and_die(stack, tmp_path, seed):
    storm = Storm(
        stack, tmp_path, seed, is_strict=False, workers=3, segment_bytes=24 << 20,
        node_silence_s=2.0,
    )  # fmt: skip
    eventually(lambda: storm.cluster.figures().evicted_blocks > 50, "blocks make room")
    nodes = storm.cluster.workers
    for _ in range(2):
        storm.wait_posted()
        os.kill(nodes[1].process.pid, signal.SIGSTOP)
        storm.stop_writers(storm.rng.random() * 0.3)
        os.kill(nodes[1].process.pid, signal.SIGCONT)
    nodes[2].kill()
    eventually(lambda: storm.cluster.figures().nodes == 2, "it is dropped")
    storm.cluster.start_worker()
    storm.wait_posted()
    storm.end()
    storm.check_pool()


def test_a_put_that_is_under_way_as_its_key_becomes_a_block(stack, monkeypatch):
    """Between the end of a long put and its block in the index nobody takes its key for free."""
    pool = Pool(stack)
    long, short = pool.store, pool.connect()
    key = secrets.token_bytes(16)
    values = {store: secrets.token_bytes(4096) for store in (long, short)}
    eventually(lambda: warm(short) and short.client.posts.box is not None)
    attach, outcomes = Catalog.attach_all, []

    def gap(catalog, rows, now):
        if any(catalog.table.keys[row] == key for row in rows):
            thread = threading.Thread(target=lambda: outcomes.append(short.put(key, values[short])))
            thread.start()
            thread.join(1.0)
            asked.append(thread)
        return attach(catalog, rows, now)

    asked: list[threading.Thread] = []
    monkeypatch.setattr(Catalog, "attach_all", gap)
    outcomes_of_batch = long.put_batch([key, secrets.token_bytes(16)], [values[long]] * 2)
    assert list(outcomes_of_batch) == ["stored"] * 2
    eventually(lambda: asked, "its end was posted: its blocks are made")
    asked[0].join(WAIT_S)
    assert outcomes == ["conflict"]
    assert long.get(key) == short.get(key) == values[long]


def test_who_says_that_it_is_at_rest_collects_no_earlier_masters_grant(stack, monkeypatch):
    monkeypatch.setattr(reserved_places, "IDLE_S", 60.0)
    cluster = MasterCluster(stack, workers=1, open_put_s=60.0, masters={"rebuild_s": 1.0})
    addresses = [cluster.masters[0].address]
    connect = {"secret": cluster.secret, "config": cluster.config}
    store, other = (stack.enter_context(Store.connect(addresses, **connect)) for _ in range(2))
    places, posts = store.client.places, store.client.posts

    def is_granted():
        store.put(secrets.token_bytes(16), secrets.token_bytes(4096))
        orders = list(places._ordered.values())
        return orders and posts.box and posts.box.granted(orders[0].numbers[0], 4096) is not None

    eventually(is_granted, "places were ordered, and are granted")
    cluster.masters[0].kill()
    cluster.restart_master(0)
    eventually(lambda: not places._ordered and not any(places._places.values()), "it let go")
    eventually(lambda: cluster.figures().nodes == 1, "the node is there")
    mine = {secrets.token_bytes(16): secrets.token_bytes(4096) for _ in range(400)}
    assert {other.put(key, value) for key, value in mine.items()} == {"stored"}
    for _ in range(60):
        store.put(secrets.token_bytes(16), secrets.token_bytes(4096))
    assert [result.value for result in other.get_batch(list(mine))] == list(mine.values())
    assert cluster.figures().corrupt_blocks == 0
