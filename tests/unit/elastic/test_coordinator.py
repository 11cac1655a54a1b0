"""Coordinators in threads over a loopback engine: agreement, interrupts, joins, departures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from elastic.errors import Evicted, RecordInvalid
from elastic.view import View
from tests.support.coordinators import CONFIG, Cluster, Died, Worker, running


@pytest.fixture
def four() -> Iterator[Cluster]:
    cluster = running(4)
    yield cluster
    cluster.close()


def test_first_view_is_even(four: Cluster) -> None:
    view = four.store.read()
    assert view is not None
    assert view.epoch == 1
    assert len(four.store.history) == 1
    assert all(len(view.expert_map.experts_of(rank, 0)) == 2 for rank in range(4))


def test_one_dies(four: Cluster) -> None:
    four.workers[2].die()
    rest = [w for w in four.workers if w.rank != 2]
    view = four.settle(rest, (0, 1, 3))
    assert view.epoch == 2
    assert not view.expert_map.missing()


def test_two_die_at_once(four: Cluster) -> None:
    four.workers[1].die()
    four.workers[2].die()
    view = four.settle([four.workers[0], four.workers[3]], (0, 3))
    assert view.epoch <= 3


def test_all_but_one_die(four: Cluster) -> None:
    for worker in four.workers[:3]:
        worker.die()
    four.settle([four.workers[3]], (3,))


def test_one_dies_while_another_loads(four: Cluster) -> None:
    loading = threading.Event()

    def slow(view: View) -> None:
        loading.set()
        time.sleep(0.3)

    four.workers[0].load_hook = slow
    four.workers[3].die()
    assert loading.wait(60)
    four.workers[2].die()
    four.settle(four.workers[:2], (0, 1))


def test_silent_member_is_probed_then_removed(four: Cluster) -> None:
    sleeper = four.workers[3]
    sleeper.engine.deaf.set()
    sleeper.stop.set()
    four.workers[0].accuse = (2, 3)  # rank 2 is well: it only waits for rank 3, too
    four.settle(four.workers[:3], (0, 1, 2))


def test_an_end_reported_by_the_agent_is_enough(four: Cluster) -> None:
    gone = four.workers[1]
    gone.engine.deaf.set()
    gone.stop.set()
    four.store.report_exit(gone.name, "signal 9")
    four.settle([w for w in four.workers if w is not gone], (0, 2, 3))


def test_a_record_that_is_no_record_does_not_end_the_watch(
    four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def read() -> View | None:
        looks.append(threading.current_thread().name)
        raise RecordInvalid(what="view", problem="of another version")

    with monkeypatch.context() as patched:
        patched.setattr(four.store, "read", read)
        deadline = time.monotonic() + 60
        while looks.count("elastic-watch") < 8:  # of four watches: some looked twice
            assert time.monotonic() < deadline
            time.sleep(0.01)
    four.store.report_exit(four.workers[3].name, "killed")  # only the watches can see it
    four.settle(four.workers[:3], (0, 1, 2))


def test_report_without_reason_makes_a_new_epoch_of_the_same_members(four: Cluster) -> None:
    four.workers[1].accuse = (2,)
    deadline = time.monotonic() + 60
    while any(w.epoch < 2 for w in four.workers) and time.monotonic() < deadline:
        time.sleep(0.005)
    view = four.settle(four.workers, (0, 1, 2, 3))
    assert view.epoch == 2


def test_a_pass_dropped_because_the_others_went_on_costs_no_view_of_its_own(four: Cluster) -> None:
    late = four.workers[2]
    late.busy.set()
    joiner = four.start(4)
    others = [worker for worker in four.workers if worker is not late]
    inbox = late.coordinator._inbox
    deadline = time.monotonic() + 60
    # One announcement and four offers: all that it takes to install the view at once.
    while (
        any(worker.coordinator._machine.waiting_for != (2,) for worker in others)
        or inbox._events.qsize() < 5
        or inbox.interrupted_at is None
    ):
        assert time.monotonic() < deadline, [w.coordinator._machine.waiting_for for w in others]
        time.sleep(0.002)
    late.accuse = ()  # "a write of mine was refused": the windows of the old view are gone
    late.busy.clear()
    assert four.settle(four.workers, (0, 1, 2, 3, 4)).epoch == 2
    assert [view.epoch for view in late.views] == [1, 2]
    assert [view.epoch for view in joiner.views] == [2]
    change = late.coordinator.last_change
    assert change is not None
    assert change.epoch == 2
    late.accuse = ()  # nor is the next one mistaken for it
    deadline = time.monotonic() + 60
    while (view := four.store.read()) is None or view.epoch != 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert four.settle(four.workers, (0, 1, 2, 3, 4)).epoch == 3


def test_removed_member_learns_it(four: Cluster) -> None:
    current = four.store.read()
    assert current is not None
    from elastic.plan import view_without

    four.store.compare_and_set(1, view_without(current, {four.workers[2].name}))
    four.settle([w for w in four.workers if w.rank != 2], (0, 1, 3))
    four.workers[2].thread.join(timeout=60)
    assert isinstance(four.workers[2].error, Evicted)
    assert four.workers[2].error.epoch == 2


def test_dead_slot_comes_back_with_its_experts(four: Cluster) -> None:
    before = four.store.read()
    assert before is not None
    four.workers[1].die()
    rest = [w for w in four.workers if w.rank != 1]
    four.settle(rest, (0, 2, 3))
    back = four.start(1, life=1)
    view = four.settle([*rest, back], (0, 1, 2, 3))
    assert back.loads[0] == view.epoch  # loaded for the view that it then proposed
    counts = [len(view.expert_map.experts_of(rank, 0)) for rank in range(4)]
    assert max(counts) - min(counts) <= 1


def test_two_join_at_once(four: Cluster) -> None:
    old = list(four.workers)
    new = [four.start(4), four.start(5)]
    view = four.settle([*old, *new], (0, 1, 2, 3, 4, 5))
    assert view.epoch == 3


def test_leaving_hands_over(four: Cluster) -> None:
    four.workers[0].leave.set()
    rest = four.workers[1:]
    view = four.settle(rest, (1, 2, 3))
    assert not view.expert_map.missing()
    four.workers[0].thread.join(timeout=60)
    assert not four.workers[0].thread.is_alive()
    assert four.workers[0].error is None


def test_all_may_leave_at_once(four: Cluster) -> None:
    for worker in four.workers:
        worker.leave.set()
    start = time.monotonic()
    for worker in four.workers:
        worker.thread.join(timeout=60)
        assert not worker.thread.is_alive()
        assert worker.error is None
    assert time.monotonic() - start < CONFIG.install_timeout_s, "they waited for each other"


def test_a_restarted_group_takes_over_the_record(four: Cluster) -> None:
    for worker in four.workers:
        worker.die()
    for worker in four.workers:
        worker.thread.join(timeout=60)
    old_epoch = (four.store.read() or pytest.fail("no record")).epoch
    again = [four.start(rank, life=1) for rank in range(4)]
    view = four.settle(again, (0, 1, 2, 3))
    assert view.epoch == old_epoch + 1
    assert view.incarnations == {w.name for w in again}


def test_joiner_that_dies_while_loading_is_never_a_member(four: Cluster) -> None:
    old = list(four.workers)

    def die(worker: Worker, view: View) -> None:
        del view
        worker.die()
        raise Died

    # The hook is there before the thread starts: it may load at once.
    joiner = four.start(4, load_hook=die)
    joiner.thread.join(timeout=60)
    assert isinstance(joiner.error, Died), "the fault did not fire"
    four.settle(old, (0, 1, 2, 3))
    assert all(4 not in view.ranks for view in four.store.history)


def test_a_quiet_poll_is_cheap(four: Cluster) -> None:
    coordinator = four.workers[0].coordinator
    start = time.perf_counter()
    for _ in range(1000):
        assert coordinator.poll() is None
    assert time.perf_counter() - start < 30.0  # a poll that did I/O would take longer
