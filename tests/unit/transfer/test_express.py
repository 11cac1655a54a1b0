"""The short way: books are kept only for what meets trouble, and then all of them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from configs.schema import TransferConfig
from transfer.errors import AccessRefused, PeerLost, TransferTimeout
from transfer.handle import Transfer
from transfer.memory.region import Region
from transfer.priority import Priority, shares_of
from transfer.rails.express import Express
from transfer.rails.rail import RailLink, RailName, SliceSink
from transfer.rails.requests import OPERATIONS_MAX, Requests
from transfer.rails.slices import Slice
from transfer.statistics import Tally
from transfer.wire import RequestKind, Status

pytestmark = pytest.mark.unit

TOKEN = bytes(16)
NBYTES = 1 << 20


class AtOnce:
    """An event loop whose calls have been made when `call` returns."""

    is_current = False

    def call(self, function: Callable[[], None]) -> None:
        function()


class FakeLink:
    """Takes what is posted, and ends it as the test says."""

    rail = RailName("tcp", "here", "there")
    orders_immediates = True
    drops_late_writes = True

    def __init__(self) -> None:
        self.messages: list[Express] = []
        self.slices: list[Slice] = []
        self.pushed: list[Express] = []
        self.given_up: list[Slice] = []
        self.beside: list[Slice] = []  # lost with what is given up
        self.takes = True

    def room(self, urgent: bool) -> int:
        return 64

    def post(self, part: Slice) -> None:
        self.slices.append(part)

    def post_express(self, message: Express) -> bool:
        if self.takes:
            self.messages.append(message)
        return self.takes

    def push(self, message: Express) -> None:
        self.pushed.append(message)

    def lead(self, message: Express) -> None:
        """Nobody answers by himself."""

    def progress(self, handle: Transfer, timeout_s: float) -> bool:
        return False

    def leave(self) -> None:
        """Nothing is led."""

    def attend(self) -> None:
        """There are no bytes."""

    def suspect(self, evidence: str) -> None:
        """A test that comes here has gone wrong."""
        raise AssertionError(evidence)

    def give_up(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        self.given_up += slices
        return self.beside

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is open."""


@pytest.fixture
def region() -> Region:
    return Region(torch.zeros(NBYTES, dtype=torch.uint8))


class Scene:
    """Requests over one rail whose link is ours."""

    def __init__(self, region: Region, num_rails: int = 1) -> None:
        self.region = region
        self.tally = Tally()
        self.links: list[FakeLink] = []
        self.requests = Requests(
            "peer", AtOnce(), self.tally, num_rails=num_rails, prefer=lambda _: (),
            shares=shares_of(TransferConfig()), open_rail=self._open,
        )  # fmt: skip
        self.sink: SliceSink = self.requests
        self.requests.open_rails()

    def _open(self, idx: int, opened: Callable[[RailLink | None], None]) -> None:
        self.links.append(FakeLink())
        opened(self.links[-1])

    @property
    def link(self) -> FakeLink:
        return self.links[-1]

    def message(self, nbytes: int = 100, *, writes: bool = True, timeout_s: float = 60.0,
                priority: Priority = Priority.ACTIVATIONS) -> Express:  # fmt: skip
        return Express("peer", writes, self.region, TOKEN, 7, 9, nbytes, None, priority, timeout_s)

    def posted(self, *args, **kwargs) -> Express:
        message = self.message(*args, **kwargs)
        assert self.requests.post_express(message)
        return message

    def in_flight(self) -> int:
        return self.requests.rails()[0].bytes_in_flight


@pytest.fixture
def scene(region: Region) -> Scene:
    return Scene(region)


def test_all_well_keeps_no_books(scene: Scene) -> None:
    messages = [scene.posted(100 + i) for i in range(10)]
    random.shuffle(messages)
    for message in messages:
        assert not message.done()
        scene.sink.arrived(message)
        message.wait()
        assert message.bytes_moved == message.nbytes
        assert message.part is None
    assert not scene.link.slices
    [rail] = scene.requests.rails()
    assert (rail.slices, rail.bytes, rail.bytes_in_flight) == (10, 1045, 0)
    statistics = scene.tally.snapshot(rails=(), immediates_received=0, peers=1, offers=0)
    assert statistics.backends["tcp"].bytes_written == 1045
    assert statistics.priorities[Priority.ACTIVATIONS].queued == 10


def test_ids_ascend_and_the_oldest_is_told(scene: Scene) -> None:
    first, second, third = (scene.posted() for _ in range(3))
    assert first.transfer_id < second.transfer_id < third.transfer_id
    assert {first.oldest, second.oldest, third.oldest} == {first.transfer_id}
    scene.sink.arrived(first)
    scene.sink.arrived(third)
    assert scene.posted().oldest == second.transfer_id


def test_a_lost_one_is_sent_again_as_a_slice(scene: Scene) -> None:
    message = scene.posted(500, priority=Priority.KV_PUT)
    assert scene.in_flight() == 500
    scene.sink.failed(scene.link, [message.unfold()], "reset")
    [part] = scene.link.slices
    assert part.key == (message.transfer_id, 0)
    assert part.operation.kind is RequestKind.WRITE
    assert part.pieces.source_offsets.tolist() == [7]
    assert part.pieces.target_offsets.tolist() == [9]
    assert scene.in_flight() == 500
    assert not message.done()
    scene.sink.done(scene.link, [(part, Status.OK)])
    message.wait()
    assert message.attempts == 2
    assert message.bytes_moved == 500
    assert scene.in_flight() == 0


def test_when_the_link_breaks_all_go_out_over_the_next(scene: Scene) -> None:
    messages = [scene.posted(10 * (i + 1), writes=bool(i % 2)) for i in range(6)]
    scene.sink.arrived(messages[2])
    scene.sink.failed(scene.link, [messages[0].unfold()], "reset")
    scene.sink.broken(scene.link, "reset")
    later = scene.message()
    assert not scene.requests.post_express(later)  # the rail is cooling
    deadline = time.monotonic() + 20
    while len(scene.links) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
        scene.requests.expire(time.monotonic())
    lost = [m for m in messages if m is not messages[2]]
    # A rail that was lost is tried with one slice first, then takes the others.
    while scene.link.slices and not all(m.done() for m in lost):
        part = scene.link.slices.pop()
        scene.sink.done(scene.link, [(part, Status.OK)])
    for message in messages:
        message.wait(0.0)
    assert scene.in_flight() == 0


def test_a_refusal_is_the_callers(scene: Scene) -> None:
    message = scene.posted()
    scene.sink.done(scene.link, [(message.unfold(), Status.NO_RIGHT)])
    with pytest.raises(AccessRefused):
        message.wait()
    assert scene.in_flight() == 0
    scene.sink.arrived(scene.posted())


@pytest.mark.parametrize("writes", [True, False])
def test_the_deadline_ends_it_and_its_lane(scene: Scene, writes: bool) -> None:
    slow = scene.posted(writes=writes, timeout_s=0.0)
    other = scene.posted(writes=writes)
    scene.link.beside = [other.unfold()]
    scene.requests.expire(time.monotonic())
    with pytest.raises(TransferTimeout):
        slow.wait()
    assert scene.link.given_up == [slow.part]
    assert [part.operation.handle for part in scene.link.slices] == [other]
    # Its answer comes after all.
    scene.sink.done(scene.link, [(slow.part, Status.OK)])
    scene.sink.done(scene.link, [(scene.link.slices[0], Status.OK)])
    other.wait()
    assert scene.in_flight() == 0


def test_an_answer_that_crosses_the_trouble_counts_once(scene: Scene) -> None:
    message = scene.posted(300, priority=Priority.KV_GET, writes=False)
    message.unfold()  # as the tick does, between the answer and its report
    scene.sink.arrived(message)
    message.wait()
    assert message.bytes_moved == 300
    assert scene.in_flight() == 0


def test_the_end_of_the_peer_ends_all(scene: Scene) -> None:
    messages = [scene.posted() for _ in range(5)]
    scene.requests.close(PeerLost("peer", "killed"))
    for message in messages:
        with pytest.raises(PeerLost, match="killed"):
            message.wait()
    assert not scene.requests.post_express(scene.message())


def test_what_the_link_does_not_take_leaves_nothing(scene: Scene) -> None:
    scene.link.takes = False
    assert not scene.requests.post_express(scene.message(priority=Priority.WEIGHTS))
    assert scene.in_flight() == 0
    scene.link.takes = True
    first = scene.posted()
    assert first.oldest == first.transfer_id


def test_bulk_is_bounded_and_large_ones_are_pushed(scene: Scene) -> None:
    taken = []
    while scene.requests.post_express(m := scene.message(NBYTES, priority=Priority.KV_PUT)):
        taken.append(m)
    assert 1 < len(taken) < 64
    assert scene.link.pushed == taken
    scene.sink.arrived(taken.pop())
    taken.append(scene.posted(NBYTES, priority=Priority.KV_PUT))
    scene.sink.arrived(scene.posted())  # an urgent one has room of its own
    for message in taken:
        scene.sink.arrived(message)
    assert scene.in_flight() == 0


def test_operations_are_bounded(scene: Scene) -> None:
    messages = [scene.posted(1) for _ in range(OPERATIONS_MAX)]
    assert not scene.requests.post_express(scene.message(1))
    scene.sink.arrived(messages[int.from_bytes(os.urandom(1)) % OPERATIONS_MAX])
    scene.posted(1)


def test_over_several_rails_the_urgent_take_the_least_busy(region: Region) -> None:
    scene = Scene(region, num_rails=3)
    messages = [scene.posted(1000) for _ in range(9)]
    assert [len(link.messages) for link in scene.links] == [3, 3, 3]
    assert not scene.requests.post_express(scene.message(priority=Priority.KV_GET))
    for message in messages:
        scene.sink.arrived(message)
    assert [rail.slices for rail in scene.requests.rails()] == [3, 3, 3]
    assert {rail.bytes_in_flight for rail in scene.requests.rails()} == {0}


def test_one_on_a_silent_rail_goes_out_over_another(region: Region) -> None:
    scene = Scene(region, num_rails=2)
    message = scene.posted(1000)
    silent = next(link for link in scene.links if link.messages)
    well = next(link for link in scene.links if not link.messages)
    silent.suspect = lambda evidence: None
    scene.requests.expire(message.started + 0.01)
    assert message.part is None
    scene.requests.expire(message.started + 1.0)
    [part] = well.slices
    assert part.operation.handle is message
    scene.sink.done(well, [(part, Status.OK)])
    message.wait(0.0)
    assert message.attempts == 2
    scene.sink.done(silent, [(part, Status.OK)])  # its answer comes after all
    assert message.bytes_moved == 1000
    assert {rail.bytes_in_flight for rail in scene.requests.rails()} == {0}
