"""Puts that were posted, wherever signals find clients, masters and nodes: what `stored` promises."""

from __future__ import annotations

import random
import signal
import time
from contextlib import ExitStack

import psutil
import pytest

from configs.kvstore_masters import EtcdConfig, KVMastersConfig
from tests.support.etcd_server import running_etcd
from tests.support.master_process import MasterCluster
from tests.support.storming_process import PostingProcess, read_on, write_on
from tests.support.put_journal import Journals, contradictions, is_version
from tests.support.waits import eventually

WRITERS = 4


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
            "segment_bytes": 256 << 20,
            "heartbeat_s": 0.1,
            "open_put_s": 6.0,
            "lease_s": 2.0,
            "masters": {"rebuild_s": 1.0},
        }
        self.cluster = MasterCluster(stack, **{**defaults, **knobs})
        self.folder, self.journals = folder, Journals(folder)
        self.writers = [self._writer() for _ in range(WRITERS)]
        self.reader = PostingProcess(self.cluster, read_on, folder, is_strict)
        for process in (*self.writers, self.reader):
            assert process.recv() == "ready"
        self.killed = 0

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

    def posted_since(self, moment_s: float) -> int:
        self.journals.read()
        return sum(c.way == "posted" and c.began_s > moment_s for c in self.journals.ended)

    def wait_posted(self, number: int = 40) -> None:
        """Return once puts are being posted, as of now."""
        since_s = time.monotonic()
        eventually(lambda: self.posted_since(since_s) >= number, "puts are posted")

    def end(self, *, evicts: bool = False) -> None:
        """Let all end, and check what they wrote down against each other and against the pool."""
        for writer in self.writers:
            assert writer.enough() == [], "bytes that nobody has put"
        looked, missed, wrong = self.reader.enough()
        assert looked > 50
        assert (missed, wrong) == ([], [])
        self.journals.read()
        ways = self.journals.ways()
        assert ways["posted"] > 100, ways
        assert ways["asked"], ways
        assert ways["batch"], ways
        by_name = self.journals.of_names()
        assert [p for calls in by_name.values() for p in contradictions(calls, evicts=evicts)] == []

    def check_pool(self) -> None:
        """What was stored is there; nothing of those who are gone is left."""
        checker = PostingProcess(self.cluster, check_all, self.folder)
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


def check_all(pipe, store, folder):
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
        elif len(versions) == 1 and int.from_bytes(value[:8], "little") not in versions:
            if not any(c.what == "remove" or c.outcome in ("", "raised", "failed") for c in calls):
                wrong.append((name, calls))
    return missing, wrong


def test_writers_stopped_and_killed_in_mid_put(stack, tmp_path, seed):
    storm = Storm(stack, tmp_path, seed)
    storm.wait_posted()
    for _ in range(4):
        storm.stop_writers(1.0)
        storm.kill_writer()
        storm.stop_master(storm.rng.random() * 0.4)
    storm.wait_posted()
    assert storm.killed == 4
    storm.end()
    storm.check_pool()


def test_masters_killed_and_started_again_at_their_address(stack, tmp_path, seed):
    # What was removed comes back with a new master: nothing is removed here.
    storm = Storm(stack, tmp_path, seed, churns=False)
    for _ in range(3):
        storm.wait_posted()
        storm.stop_writers(storm.rng.random() * 0.3)
        storm.master.kill()
        time.sleep(storm.rng.random() * 0.5)
        storm.cluster.restart_master(0)
    storm.wait_posted()
    storm.end()
    storm.check_pool()
