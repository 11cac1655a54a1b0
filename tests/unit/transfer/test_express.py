"""The short way: books are kept only for what meets trouble, and then all of them."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from configs.schema import TransferConfig
from tests.support.data_connections import SOON_S, TOKEN, make_lane, tcp_pair
from transfer import native
from transfer.errors import AccessRefused, PeerLost, TransferTimeout
from transfer.handle import Transfer
from transfer.memory.region import Access, Region, RegionKey
from transfer.priority import Priority, shares_of
from transfer.rails.express import Express, make_short_way
from transfer.rails.rail import RailLink, RailName
from transfer.rails.requests import OPERATIONS_MAX, Requests
from transfer.rails.slices import Slice
from transfer.statistics import Tally
from transfer.wire import (
    PAYLOAD_BYTES_MAX,
    REQUEST,
    Reply,
    Request,
    RequestKind,
    Status,
    parse_request,
)

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not native.COMPILED, reason="without the compiled part no short way"),
]

NBYTES = 1 << 20
TABLE_BYTES = 16


class AtOnce:
    """An event loop whose calls have been made when `call` returns."""

    is_current = False

    def call(self, function: Callable[[], None]) -> None:
        function()

    def stir(self) -> None:
        """It never sleeps."""


class OneLane:
    """A link over one true lane, whose owner is the test."""

    rail = RailName("tcp", "here", "there")
    orders_immediates = True
    drops_late_writes = True

    def __init__(self) -> None:
        ours, self.owner = tcp_pair()
        self.lane = make_lane("compiled", ours)
        self.lane.urgent = True
        self.slices: list[Slice] = []
        self.given_up: list[Slice] = []
        self.beside: list[Slice] = []  # lost with what is given up
        self.attended = 0
        self.reported: list[tuple[object, int, object]] = []

    def bind(self, load: Any) -> None:
        self.load = load
        load.bind(self, self.rail, self.attend, self.report)
        load.carry(self.lane, (self.lane,), True)

    def report(self, finished: Sequence[tuple[object, int, object]], lane: object) -> None:
        assert lane is self.lane
        self.reported += finished

    def take(self) -> Request:
        """As the owner: read one request with what belongs to it."""
        head = self._receive(REQUEST.size)
        request = parse_request(head)
        writes = request.kind is RequestKind.WRITE
        self._receive(TABLE_BYTES + (request.nbytes if writes else 0))
        return request

    def answer(self, status: Status = Status.OK) -> None:
        """Answer the next request, and move bytes until that has come."""
        request = self.take()
        reads = request.kind is RequestKind.READ and status is Status.OK
        nbytes = request.nbytes if reads else 0
        head = Reply(status=status, transfer_id=request.transfer_id, slice_idx=0, nbytes=nbytes)
        self.owner.sendall(head.encode() + bytes(nbytes))
        before = self.lane.in_flight
        deadline = time.monotonic() + SOON_S
        while self.lane.in_flight == before and time.monotonic() < deadline:
            self.reported += native.compiled.progress([self.lane], 0.1)

    def _receive(self, nbytes: int) -> bytes:
        data = bytearray()
        deadline = time.monotonic() + SOON_S
        self.owner.setblocking(False)
        while len(data) < nbytes and time.monotonic() < deadline:
            try:
                data += self.owner.recv(nbytes - len(data))
            except BlockingIOError:
                self.reported += native.compiled.progress([self.lane], 0.0)
        self.owner.setblocking(True)
        assert len(data) == nbytes
        return bytes(data)

    def room(self, urgent: bool) -> int:
        return 64

    def post(self, part: Slice) -> None:
        self.slices.append(part)

    def progress(self, handle: Transfer, timeout_s: float) -> bool:
        return False

    def leave(self) -> None:
        """Nothing is led."""

    def attend(self) -> None:
        self.attended += 1

    def suspect(self, evidence: str) -> None:
        """A test that comes here has gone wrong."""
        raise AssertionError(evidence)

    def give_up(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        self.given_up += slices
        return self.beside

    def close(self) -> None:
        self.lane.close()
        self.owner.close()

    def abandon(self) -> None:
        """Nobody forks."""


class Scene:
    """Requests whose links are ours."""

    def __init__(self, num_rails: int = 1) -> None:
        self.region = Region(torch.zeros(NBYTES, dtype=torch.uint8))
        self.key = RegionKey("peer", TOKEN, NBYTES, 3, False)
        self.tally = Tally()
        self.links: list[OneLane] = []
        self.way = make_short_way()
        self.way.timeout_s = 60.0
        self.requests = Requests(
            "peer", AtOnce(), self.tally, num_rails=num_rails, prefer=lambda _: (),
            shares=shares_of(TransferConfig()), open_rail=self._open, short_way=self.way,
        )  # fmt: skip
        self.requests.open_rails()

    def _open(self, idx: int, opened: Callable[[RailLink | None], None]) -> None:
        self.links.append(OneLane())
        opened(self.links[-1])

    @property
    def link(self) -> OneLane:
        return self.links[-1]

    def post(
        self, nbytes: int = 100, *, writes: bool = True, priority: Priority | None = None,
        immediate: int | None = None,
    ) -> Any:  # fmt: skip
        return self.way.post(
            writes, "peer", self.region, self.key, 0, 0, nbytes, immediate, priority
        )

    def posted(self, *args: Any, **kwargs: Any) -> Express:
        message = self.post(*args, **kwargs)
        assert type(message) is Express
        return message

    def in_flight(self) -> int:
        return self.requests.rails()[0].bytes_in_flight

    def under_way(self) -> int:
        return len(self.requests._core.books)

    def close(self) -> None:
        for link in self.links:
            link.close()


@pytest.fixture
def scene():
    made = Scene()
    yield made
    made.close()
    assert native.compiled.num_urgent() == 0, "bulk has nothing to give way to"


def test_all_well_keeps_no_books(scene: Scene) -> None:
    messages = [scene.posted(100 + i) for i in range(4)] + [scene.posted(300, writes=False)]
    assert scene.under_way() == 5
    for message in messages:
        assert not message._finished
        scene.link.answer()
        message.wait()
        assert message.bytes_moved == message.nbytes
        assert message.part is None
    assert (scene.link.slices, scene.link.reported, scene.under_way()) == ([], [], 0)
    [rail] = scene.requests.rails()
    assert (rail.slices, rail.bytes, rail.bytes_in_flight) == (5, 706, 0)
    scene.tally.took_short_way(scene.way.take_counts())
    scene.tally.took_short_way(scene.way.take_counts())
    statistics = scene.tally.snapshot(rails=(), immediates_received=0, peers=1, offers=0)
    assert statistics.backends["tcp"].bytes_written == 406
    assert statistics.backends["tcp"].bytes_read == 300
    assert statistics.priorities[Priority.ACTIVATIONS].queued == 5


def test_the_header_says_what_is_wanted(scene: Scene) -> None:
    kinds = [RequestKind.WRITE, RequestKind.READ]
    for number in range(1, 20):
        kind, nbytes = random.choice(kinds), random.randrange(1, 1 << 16)
        signal = random.choice([None, 0, 5, 2**32 - 1]) if kind is RequestKind.WRITE else None
        message = scene.posted(nbytes, writes=kind is RequestKind.WRITE, immediate=signal)
        assert scene.link.take() == Request(
            kind=kind, transfer_id=number, oldest=1, slice_idx=0, num_slices=1, num_pieces=1,
            nbytes=nbytes, immediate=signal, token=TOKEN,
        )  # fmt: skip
        assert (message.transfer_id, message.oldest, message.immediate) == (number, 1, signal)
        assert message.operation == kind.name.lower()


def test_ids_ascend_and_the_oldest_is_told(scene: Scene) -> None:
    first, second, third = (scene.posted() for _ in range(3))
    assert first.transfer_id < second.transfer_id < third.transfer_id
    assert {first.oldest, second.oldest, third.oldest} == {first.transfer_id}
    scene.link.answer()
    assert scene.posted().oldest == second.transfer_id


def test_the_oldest_stays_the_oldest_when_it_is_unfolded(scene: Scene) -> None:
    first, second = scene.posted(), scene.posted()
    core = scene.requests._core
    core.unfold(second)
    core.unfold(first)
    assert scene.posted().oldest == first.transfer_id
    scene.requests.done(scene.link, [(first.unfold(), Status.OK)])
    assert scene.posted().oldest == second.transfer_id


def test_a_lost_one_is_sent_again_as_a_slice(scene: Scene) -> None:
    message = scene.posted(500, priority=Priority.KV_PUT)
    assert scene.in_flight() == 500
    scene.requests.failed(scene.link, [message.unfold()], "reset")
    [part] = scene.link.slices
    assert part.key == (message.transfer_id, 0)
    assert part.operation.kind is RequestKind.WRITE
    assert scene.in_flight() == 500
    assert not message._finished
    scene.requests.done(scene.link, [(part, Status.OK)])
    message.wait()
    assert message.attempts == 2
    assert message.bytes_moved == 500
    assert scene.in_flight() == 0


def test_when_the_link_breaks_all_go_out_over_the_next(scene: Scene) -> None:
    messages = [scene.posted(10 * (i + 1), writes=bool(i % 2)) for i in range(6)]
    scene.link.answer()
    scene.requests.failed(scene.link, [messages[1].unfold()], "reset")
    scene.requests.broken(scene.link, "reset")
    assert scene.post() is None  # the rail is cooling
    deadline = time.monotonic() + SOON_S
    while len(scene.links) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
        scene.requests.expire(time.monotonic())
    # A rail that was lost is tried with one slice first, then takes the others.
    while scene.link.slices and not all(m._finished for m in messages):
        part = scene.link.slices.pop()
        scene.requests.done(scene.link, [(part, Status.OK)])
    for message in messages:
        message.wait(0.0)
    assert scene.in_flight() == 0
    assert scene.posted()


def test_a_refusal_is_the_callers(scene: Scene) -> None:
    message = scene.posted()
    scene.link.answer(Status.NO_RIGHT)
    [(item, status, _)] = scene.link.reported
    assert (item, status) == (message, Status.NO_RIGHT.value)
    scene.requests.done(scene.link, [(message.unfold(), Status.NO_RIGHT)])
    with pytest.raises(AccessRefused):
        message.wait()
    assert scene.in_flight() == 0
    assert scene.posted()


@pytest.mark.parametrize("writes", [True, False])
def test_the_deadline_ends_it_and_its_lane(scene: Scene, writes: bool) -> None:
    scene.way.timeout_s = 0.0
    slow = scene.posted(writes=writes)
    scene.way.timeout_s = 60.0
    other = scene.posted(writes=writes)
    scene.link.beside = [other.unfold()]
    scene.requests.expire(time.monotonic())
    with pytest.raises(TransferTimeout):
        slow.wait(0.0)
    assert scene.link.given_up == [slow.part]
    assert [part.operation.handle for part in scene.link.slices] == [other]
    # Its answer comes after all.
    scene.requests.done(scene.link, [(slow.unfold(), Status.OK)])
    scene.requests.done(scene.link, [(scene.link.slices[0], Status.OK)])
    other.wait()
    assert scene.in_flight() == 0


def test_an_answer_that_crosses_the_trouble_counts_once(scene: Scene) -> None:
    message = scene.posted(300, priority=Priority.KV_GET, writes=False)
    scene.requests._core.unfold(message)  # as the tick does, before the answer comes
    scene.link.answer()
    [(item, status, _)] = scene.link.reported
    assert item is message
    scene.requests.done(scene.link, [(message.unfold(), Status(status))])
    message.wait()
    assert message.bytes_moved == 300
    assert scene.in_flight() == 0


def test_the_end_of_the_peer_ends_all(scene: Scene) -> None:
    messages = [scene.posted() for _ in range(5)]
    scene.requests.close(PeerLost("peer", "killed"))
    for message in messages:
        with pytest.raises(PeerLost, match="killed"):
            message.wait()
    assert scene.post() is None
    assert scene.under_way() == 0


def test_a_lane_that_takes_nothing_leaves_nothing(scene: Scene) -> None:
    scene.link.lane.close()
    assert scene.post() is None
    assert (scene.in_flight(), scene.under_way()) == (0, 0)


def test_bulk_is_bounded(scene: Scene) -> None:
    taken = []
    while message := scene.post(NBYTES, priority=Priority.KV_PUT):
        taken.append(message)
    assert 1 < len(taken) < 64
    assert scene.link.attended, "somebody has to send the rest"
    assert scene.link.lane.unsent
    scene.link.answer()
    taken.append(scene.posted(NBYTES, priority=Priority.KV_PUT))
    taken.append(scene.posted())  # an urgent one has room of its own
    for message in taken[1:]:
        scene.link.answer()
        message.wait(0.0)
    assert scene.in_flight() == 0


def test_operations_are_bounded(scene: Scene) -> None:
    for _ in range(OPERATIONS_MAX):
        scene.posted(1)
    assert scene.post(1) is None
    scene.link.answer()
    assert scene.posted(1)


def test_what_waits_is_told_of_room(scene: Scene) -> None:
    called = []
    books = scene.requests._core.books
    first, second = scene.posted(), scene.posted()
    second.when_done(lambda: called.append(second.bytes_moved))
    books.awaited = True
    scene.link.answer()
    assert not books.awaited, "whoever awaits a turn was called"
    assert first._finished
    scene.link.answer()
    assert called == [100]


def test_who_waits_leads(scene: Scene) -> None:
    message = scene.posted(3000, writes=False)
    thread = threading.Thread(target=message.wait, args=(SOON_S,))
    thread.start()
    request = scene.link.take()
    reply = Reply(status=Status.OK, transfer_id=request.transfer_id, slice_idx=0, nbytes=3000)
    scene.link.owner.sendall(reply.encode() + bytes(1000))
    scene.link.owner.sendall(bytes(2000))
    message.wait()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert message.bytes_moved == 3000


def test_over_several_rails_the_urgent_take_the_least_busy() -> None:
    scene = Scene(num_rails=3)
    messages = [scene.posted(1000) for _ in range(9)]
    assert [link.lane.in_flight for link in scene.links] == [3, 3, 3]
    assert scene.post(1000, priority=Priority.KV_GET) is None, "bulk is spread"
    for link in scene.links * 3:
        link.answer()
    for message in messages:
        message.wait(0.0)
    assert [rail.slices for rail in scene.requests.rails()] == [3, 3, 3]
    assert {rail.bytes_in_flight for rail in scene.requests.rails()} == {0}
    scene.close()


def test_one_on_a_silent_rail_goes_out_over_another() -> None:
    scene = Scene(num_rails=2)
    message = scene.posted(1000)
    silent = next(link for link in scene.links if link.lane.in_flight)
    well = next(link for link in scene.links if not link.lane.in_flight)
    silent.suspect = lambda evidence: None
    scene.requests.expire(message.started + 0.01)
    assert message.part is None
    scene.requests.expire(message.started + 1.0)
    [part] = well.slices
    assert part.operation.handle is message
    scene.requests.done(well, [(part, Status.OK)])
    message.wait(0.0)
    assert message.attempts == 2
    scene.requests.done(silent, [(part, Status.OK)])  # its answer comes after all
    assert message.bytes_moved == 1000
    assert {rail.bytes_in_flight for rail in scene.requests.rails()} == {0}
    scene.close()


class Weird(Region):
    """Not exactly a region."""


def unusual(scene: Scene) -> dict[str, dict[str, object]]:
    """What has to go the long way, be it to be refused there."""
    return {
        "stranger": {"peer": "stranger"}, "no name": {"peer": []}, "none": {"peer": None},
        "region": {"region": Weird(scene.region.tensor)}, "no region": {"region": 7},
        "no key": {"key": "key"}, "owner": {"key": RegionKey("other", TOKEN, NBYTES, 3, False)},
        "slab": {"key": RegionKey("peer", TOKEN, NBYTES, 3, False, "file")},
        "no right": {"key": RegionKey("peer", TOKEN, NBYTES, Access.READ.value, False)},
        "negative": {"ours": -1}, "negative there": {"theirs": -1}, "float": {"ours": 0.0},
        "true": {"ours": True}, "beyond": {"ours": NBYTES - 99}, "beyond there": {"theirs": NBYTES},
        "huge": {"theirs": 1 << 70}, "nothing": {"nbytes": 0}, "backwards": {"nbytes": -5},
        "large": {"nbytes": PAYLOAD_BYTES_MAX + 1}, "immediate": {"immediate": 1 << 32},
        "text": {"immediate": "7"}, "class": {"priority": 0}, "size": {"nbytes": NBYTES + 1},
    }  # fmt: skip


def test_the_unusual_goes_the_long_way(scene: Scene) -> None:
    good = {"peer": "peer", "region": scene.region, "key": scene.key, "ours": 0, "theirs": 0,
            "nbytes": 100, "immediate": None, "priority": None}  # fmt: skip
    for what, wrong in unusual(scene).items():
        assert scene.way.post(True, *(good | wrong).values()) is None, what
    assert scene.way.post(False, *(good | {"immediate": 7}).values()) is None, "a read signals not"
    assert (scene.in_flight(), scene.under_way()) == (0, 0)
    assert scene.way.post(True, *good.values()) is not None


def test_messages_overtake_no_slices_of_their_kind(scene: Scene) -> None:
    books = scene.requests._core.books
    books.num_queued = 1
    assert scene.post(priority=Priority.KV_PUT) is None
    assert scene.posted(), "what is urgent does not wait behind bulk"
    books.urgent_queued = 1
    assert scene.post() is None
    books.num_queued = books.urgent_queued = 0
    assert scene.posted(priority=Priority.KV_PUT)


def test_nothing_is_left_of_what_ended() -> None:
    scene = Scene()
    for _ in range(100):
        message = scene.posted()
        scene.link.answer()
        message.wait()
    scene.close()
    assert isinstance(scene.link.owner, socket.socket)
    assert scene.under_way() == 0
