"""A membership store that is away for a while costs time, one that stays away a typed error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from configs.schema import ElasticConfig
from elastic.errors import StoreUnavailable
from elastic.view import Member
from tests.support.coordinators import Cluster, running

SHORT = ElasticConfig(
    bootstrap_timeout_s=1.0, install_timeout_s=0.2, watch_interval_s=0.2, stall_threshold_s=30.0
)


class Silence:
    """Between entering and leaving it, nothing that a store is asked is answered."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = threading.Event()
        self.refused: list[str] = []
        for name in ("read", "compare_and_set", "register", "registrations", "exits"):
            answer = getattr(cluster.store, name)

            def ask(*args: object, name: str = name, answer: object = answer) -> object:
                if self.on.is_set():
                    if threading.current_thread().name != "elastic-watch":
                        self.refused.append(name)
                    raise StoreUnavailable(operation=name, problem="no answer")
                return answer(*args)  # type: ignore[operator]

            monkeypatch.setattr(cluster.store, name, ask)

    def wait_for(self, *names: str) -> None:
        """Until each of these was asked, in vain, at least twice."""
        deadline = time.monotonic() + 60
        while any(self.refused.count(name) < 2 for name in names):
            assert time.monotonic() < deadline, self.refused
            time.sleep(0.005)


@pytest.fixture
def four() -> Iterator[Cluster]:
    cluster = running(4)
    yield cluster
    cluster.close()


def test_a_death_while_the_store_is_away_is_agreed_on_when_it_is_back(four, monkeypatch):
    silence = Silence(four, monkeypatch)
    silence.on.set()
    four.workers[2].die()
    silence.wait_for("compare_and_set")
    rest = [w for w in four.workers if w.rank != 2]
    assert all(w.error is None for w in rest)
    silence.on.clear()
    assert four.settle(rest, (0, 1, 3)).epoch == 2


def test_who_was_stalled_reads_the_record_as_soon_as_it_can(four, monkeypatch):
    silence = Silence(four, monkeypatch)
    silence.on.set()
    late = four.workers[1]
    monkeypatch.setattr(late.coordinator._watch, "stalled", lambda: True)
    monkeypatch.setattr(late.coordinator, "_stall_told_at", float("-inf"))
    silence.wait_for("read")
    assert late.error is None
    silence.on.clear()
    four.workers[3].die()
    four.settle(four.workers[:3], (0, 1, 2))
    assert late.coordinator._machine.wake_at is None, "nothing is left to be read"


def test_a_joiner_waits_for_the_store(four, monkeypatch):
    silence = Silence(four, monkeypatch)
    silence.on.set()
    four.start(4)
    silence.wait_for("register")
    silence.on.clear()
    assert four.settle(four.workers, (0, 1, 2, 3, 4)).epoch == 2


def test_a_store_that_stays_away_is_a_typed_error_in_time(four, monkeypatch):
    four.config = SHORT
    for worker in four.workers:
        monkeypatch.setattr(worker.coordinator, "_config", SHORT)
    silence = Silence(four, monkeypatch)
    silence.on.set()
    joiner = four.start(4)
    four.workers[2].die()
    rest = [w for w in four.workers if w.rank != 2]
    for worker in rest:
        worker.thread.join(timeout=60)
        assert isinstance(worker.error, StoreUnavailable), worker.error
        assert worker.error.retryable
    assert joiner in rest
    assert {"compare_and_set", "register"} <= set(silence.refused)
    silence.on.clear()
    view = four.store.read()
    assert view is not None
    assert view.epoch == 1, "nothing was agreed on"
    assert all(isinstance(member, Member) for member in view.members)
