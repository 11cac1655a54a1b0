"""Copies by order: bounds, urgency, retries, deadlines, and what a report may do."""

from __future__ import annotations

import secrets

import pytest

from configs.kvstore_policies import CopyBounds
from kvstore.master.copies.copy_order import CopyOrder, Outcome, Purpose
from kvstore.master.copies.copying import Copying


class FakePool:
    """Rows are (key, segment); segments 0, 1, 2 on nodes a, b, c; sizes are `nbytes`."""

    def __init__(self, nbytes: int = 100) -> None:
        self.rows: dict[int, tuple[bytes, int]] = {}
        self.nodes = {0: "a", 1: "b", 2: "c"}
        self.nbytes = nbytes
        self.room = {0: 100, 1: 100, 2: 100}
        self.open: dict[int, tuple[bytes, int]] = {}
        self.quarantined: list[int] = []
        self._ids = 0

    def put(self, segment: int) -> bytes:
        key = secrets.token_bytes(16)
        self._ids += 1
        self.rows[self._ids] = (key, segment)
        return key

    def where(self, key: bytes) -> list[int]:
        return sorted(segment for name, segment in self.rows.values() if name == key)

    def row_in(self, key, segment):
        return next((row for row, at in self.rows.items() if at == (key, segment)), None)

    def stored_bytes(self, row):
        return self.nbytes

    def node_of(self, segment):
        return self.nodes.get(segment)

    def open_copy(self, row, target, now, purpose):
        if not self.room[target]:
            return None
        self.room[target] -= 1
        self._ids += 1
        self.open[self._ids] = (self.rows[row][0], target)
        return self._ids

    def commit_copy(self, copy_id, now):
        key, target = self.open.pop(copy_id)
        if target not in self.nodes:
            return False
        self.rows[copy_id] = (key, target)
        return True

    def abort_copy(self, copy_id, *, at_rest):
        _, target = self.open.pop(copy_id)
        if at_rest:
            self.room[target] += 1
        else:
            self.quarantined.append(copy_id)

    def settle_late(self, node, copy_id):
        if copy_id in self.quarantined:
            self.quarantined.remove(copy_id)

    def drop(self, row):
        del self.rows[row]


class Bench:
    def __init__(self, nbytes: int = 100, **bounds: object) -> None:
        self.pool = FakePool(nbytes)
        self.ended: list[tuple[Purpose, Outcome]] = []
        self.with_work: set[str] = set()
        self.copying = Copying(
            CopyBounds(**bounds),
            self.pool,
            targets=lambda order, row: (1, 2),
            ended=lambda order, outcome: self.ended.append((order.purpose, outcome)),
            nodes_with_work=self.with_work,
        )

    def want(self, purpose=Purpose.REBALANCE, source=0, target=None) -> bytes:
        key = self.pool.put(source)
        order = CopyOrder(key=key, source=source, purpose=purpose, target=target)
        assert self.copying.order(order)
        assert not self.copying.order(order), "one copy per block at a time"
        return key

    def start(self, node="a", limit=100, now=0.0):
        started = self.copying.start(node, limit=limit, now=now)
        self.copying.check_invariants()
        return started

    def finish(self, node="a", done=(), failed=(), corrupt=()):
        self.copying.finish(node, done=done, failed=failed, corrupt=corrupt, now=0.0)
        self.copying.check_invariants()


@pytest.mark.parametrize("purpose", list(Purpose))
def test_a_move_takes_the_source_away_and_a_copy_does_not(purpose):
    bench = Bench()
    key = bench.want(purpose)
    (copy,) = bench.start()
    assert bench.pool.where(key) == [0], "the source stays until the copy is there"
    bench.finish(done=[copy.copy_id])
    assert bench.pool.where(key) == ([1] if purpose.moves else [0, 1])
    assert bench.ended == [(purpose, Outcome.DONE)]
    assert len(bench.copying) == 0


def test_the_urgent_go_first():
    bench = Bench()
    for purpose in (Purpose.REBALANCE, Purpose.PROMOTE, Purpose.DRAIN, Purpose.DEMOTE):
        bench.want(purpose)
    started = bench.start(limit=3)
    assert [copy.order.purpose for copy in started] == [
        Purpose.DRAIN,
        Purpose.DEMOTE,
        Purpose.PROMOTE,
    ]


def test_bounds_of_number_and_bytes_hold_per_node():
    bench = Bench(per_node=3, bytes_per_node=1 << 16)
    for _ in range(5):
        bench.want()
        bench.want(source=1)
    first = bench.start()
    assert len(first) == 3
    assert bench.start() == []
    assert "a" in bench.with_work
    assert len(bench.start("b")) == 3
    bench.finish(done=[first[0].copy_id])
    assert len(bench.start()) == 1
    large = Bench(nbytes=40_000, per_node=10, bytes_per_node=1 << 16)
    for _ in range(3):
        large.want()
    assert len(large.start()) == 1
    huge = Bench(nbytes=1 << 20, per_node=10, bytes_per_node=1 << 16)
    huge.want()
    assert len(huge.start()) == 1, "a copy larger than the bound goes alone"


def test_the_queue_is_bounded():
    bench = Bench(queued_max=2)
    bench.want()
    bench.want()
    key = bench.pool.put(0)
    assert not bench.copying.order(CopyOrder(key=key, source=0, purpose=Purpose.DRAIN))


def test_a_failed_copy_is_tried_again_and_at_last_given_up():
    bench = Bench(attempts=3)
    key = bench.want()
    for left in (2, 1, 0):
        (copy,) = bench.start()
        bench.finish(failed=[copy.copy_id])
        assert bench.pool.room[1] == 100
        assert len(bench.copying) == (1 if left else 0)
    assert bench.ended == [(Purpose.REBALANCE, Outcome.FAILED)]
    assert bench.pool.where(key) == [0]


def test_a_copy_that_nobody_reports_is_quarantined():
    bench = Bench(attempts=2, deadline_s=10.0)
    bench.want()
    (copy,) = bench.start(now=5.0)
    bench.copying.expire(14.9)
    assert bench.pool.quarantined == []
    bench.copying.expire(15.0)
    assert bench.pool.quarantined == [copy.copy_id]
    bench.finish(done=[copy.copy_id])  # too late, but its bytes are at rest now
    assert bench.pool.quarantined == []
    (again,) = bench.start(now=16.0)
    assert again.copy_id != copy.copy_id
    bench.finish(done=[again.copy_id])
    assert bench.ended == [(Purpose.REBALANCE, Outcome.DONE)]


def test_a_corrupt_source_is_dropped_and_its_copy_given_up():
    bench = Bench()
    key = bench.want()
    (copy,) = bench.start()
    bench.finish(corrupt=[copy.copy_id])
    assert bench.pool.where(key) == []
    assert bench.ended == [(Purpose.REBALANCE, Outcome.CORRUPT)]
    assert bench.pool.room[1] == 100


def test_where_there_is_no_room_the_next_target_is_tried():
    bench = Bench()
    bench.pool.room[1] = 0
    key = bench.want()
    (copy,) = bench.start()
    assert copy.target == 2
    bench.finish(done=[copy.copy_id])
    assert bench.pool.where(key) == [2]
    bench.pool.room[2] = 0
    bench.want()
    assert bench.start() == []
    assert bench.ended[-1] == (Purpose.REBALANCE, Outcome.NO_SPACE)


def test_a_fixed_target_is_the_only_one():
    bench = Bench()
    bench.pool.room[2] = 0
    bench.want(target=2)
    assert bench.start() == []
    assert bench.ended == [(Purpose.REBALANCE, Outcome.NO_SPACE)]


def test_what_is_gone_when_its_turn_comes_is_skipped():
    bench = Bench()
    bench.want()
    second = bench.want()
    bench.pool.rows.pop(1)
    (copy,) = bench.start()
    assert copy.order.key == second
    assert bench.ended == [(Purpose.REBALANCE, Outcome.GONE)]


def test_foreign_and_repeated_reports_are_ignored():
    bench = Bench()
    key = bench.want()
    (copy,) = bench.start()
    bench.finish("b", done=[copy.copy_id], failed=[copy.copy_id])
    assert bench.pool.where(key) == [0]
    bench.finish(done=[copy.copy_id, copy.copy_id, 12345], failed=[copy.copy_id])
    assert bench.pool.where(key) == [1]
    assert bench.ended == [(Purpose.REBALANCE, Outcome.DONE)]


def test_a_lost_node_takes_its_orders_along():
    bench = Bench()
    bench.want()
    bench.want()
    (copy,) = bench.start(limit=1)
    bench.want(source=1)
    bench.pool.open.pop(copy.copy_id)  # the pool forgets them with the node
    bench.copying.lose_node("a")
    bench.copying.check_invariants()
    assert bench.ended == [(Purpose.REBALANCE, Outcome.GONE)] * 2
    assert len(bench.copying) == 1


def test_cancelled_orders_end_and_those_under_way_go_on():
    bench = Bench()
    first = bench.want(Purpose.DRAIN)
    bench.want(Purpose.DRAIN)
    other = bench.want(Purpose.FILL)
    (copy,) = bench.start(limit=1)
    bench.copying.cancel(Purpose.DRAIN, 0)
    bench.copying.check_invariants()
    assert bench.ended == [(Purpose.DRAIN, Outcome.CANCELLED)]
    assert bench.copying.purpose_of(other) is Purpose.FILL
    bench.finish(done=[copy.copy_id])
    assert bench.pool.where(first) == [1]


def test_what_is_opened_at_once_waits_for_its_node_and_goes_first():
    bench = Bench(per_node=2, deadline_s=10.0)
    bench.want(Purpose.DRAIN)
    keys = [bench.pool.put(0) for _ in range(3)]
    orders = [CopyOrder(key=key, source=0, purpose=Purpose.DEMOTE) for key in keys]
    rows = [bench.pool.row_in(key, 0) for key in keys]
    opened = [
        bench.copying.order_at_once(order, row, 0.0)
        for order, row in zip(orders, rows, strict=True)
    ]
    assert opened == [True, True, False], "within the node's bounds"
    assert bench.with_work == {"a"}
    started = bench.start(now=1.0)
    assert [copy.order for copy in started] == orders[:2]
    bench.finish(done=[copy.copy_id for copy in started])
    assert bench.start()[0].order.purpose is Purpose.DRAIN
    assert bench.with_work == set()


def test_what_was_never_handed_out_is_not_quarantined():
    bench = Bench(attempts=1, deadline_s=10.0)
    key = bench.pool.put(0)
    order = CopyOrder(key=key, source=0, purpose=Purpose.DEMOTE)
    assert bench.copying.order_at_once(order, bench.pool.row_in(key, 0), 0.0)
    bench.copying.expire(10.0)
    assert (bench.pool.quarantined, bench.pool.room[1]) == ([], 100)
    assert bench.ended == [(Purpose.DEMOTE, Outcome.FAILED)]


def test_an_urgent_order_takes_the_place_of_one_that_waits():
    bench = Bench()
    key = bench.want(Purpose.FILL)
    other = bench.pool.put(0)
    bench.pool.rows[999] = (key, 1)
    urgent = CopyOrder(key=key, source=1, purpose=Purpose.DRAIN, target=2)
    assert bench.copying.order(urgent)
    bench.copying.check_invariants()
    assert bench.ended == [(Purpose.FILL, Outcome.CANCELLED)]
    assert bench.start("a") == []
    (copy,) = bench.start("b")
    assert copy.order is urgent
    assert not bench.copying.order(CopyOrder(key=key, source=0, purpose=Purpose.DRAIN))
    assert bench.copying.order(CopyOrder(key=other, source=0, purpose=Purpose.FILL))
    bench.finish("b", done=[copy.copy_id])
    assert bench.pool.where(key) == [0, 2]
