"""Operations that begin over rails like RDMA's, which break, and end over tcp: each exactly once.

The rails are made of wishes: they do to the peer's memory, by hand, what a card would do.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.engines import (
    engine_pair,
    offer,
)
from tests.support.waits import eventually
from transfer import Priority, TransferEngine, allocate
from transfer.memory.region import Region
from transfer.pieces import copy_between
from transfer.priority import shares_of
from transfer.rails import deputy
from transfer.rails.deputy import Deputy, Replaceable, Replacement
from transfer.rails.rail import RailLink, RailName
from transfer.rails.slices import Slice
from transfer.wire import RequestKind, Status

NBYTES = 8 << 20
WINDOW = 4


class CardRail:
    """A link that keeps what is posted until it is told to do it, or to break."""

    orders_immediates = False
    drops_late_writes = False

    def __init__(self, cards: Cards, idx: int) -> None:
        self.rail = RailName("verbs", f"a{idx}", f"b{idx}")
        self.cards = cards
        self.posted: list[Slice] = []

    def room(self, urgent: bool) -> int:
        return WINDOW - len(self.posted)

    def post(self, part: Slice) -> None:
        self.posted.append(part)

    def progress(self, handle: Any, timeout_s: float) -> bool:
        return False

    def leave(self) -> None: ...

    def attend(self) -> None: ...

    def suspect(self, evidence: str) -> None: ...

    def give_up(self, slices: Sequence[Slice]) -> Sequence[Slice]:
        self.posted = [part for part in self.posted if part not in slices]
        return ()

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class Cards:
    """All rails from one engine to another's window."""

    def __init__(self, user: TransferEngine, owner: TransferEngine, window: Region) -> None:
        self.user, self.owner, self.window = user, owner, window
        self.rails: dict[int, CardRail] = {}
        self.present = True
        self.num_done = 0
        link = user._table.get(owner.name)
        assert link is not None
        self.requests = Replaceable(
            owner.name, user._loop, user._tally, num_rails=2, prefer=lambda _: (),
            shares=shares_of(user._config), open_rail=self._open, orders_immediates=False,
        )  # fmt: skip
        opener = user._links.opener
        self.deputy = Deputy(
            self.requests, lambda: opener._make(Replacement, owner.name, "tcp", link.facts, None)
        )
        link.requests, link.deputy, link.backend = self.requests, self.deputy, "verbs"

    def _open(self, idx: int, done: Callable[[RailLink | None], None]) -> None:
        if self.present:
            self.rails[idx] = CardRail(self, idx)
        done(self.rails[idx] if self.present else None)  # type: ignore[arg-type]

    def do(self, count: int, rng: random.Random) -> None:
        """Let a card do some of what is posted, in order, as reliable connections do."""
        rails = [rail for rail in self.rails.values() if rail.posted]
        for rail in rng.sample(rails, min(len(rails), 1)):
            parts, rail.posted = rail.posted[:count], rail.posted[count:]
            for part in parts:
                self._move(part)
            ended = [(part, Status.OK) for part in parts]
            self.requests.done(rail, ended)  # type: ignore[arg-type]

    def _move(self, part: Slice) -> None:
        operation = part.operation
        ours, theirs, pieces = operation.region, self.window, part.pieces
        assert ours is not None
        if operation.kind is RequestKind.WRITE:
            copy_between(theirs.array, theirs.start, ours.array, ours.start, pieces)
        else:
            copy_between(ours.array, ours.start, theirs.array, theirs.start, pieces)
        whole = operation.signal is part or operation.num_slices == 1
        if operation.immediate is not None and whole:
            self.owner._board.count(self.user.name, [operation.immediate])
        self.num_done += 1

    def remove(self) -> None:
        """The devices are gone: what was posted has not arrived, the owner says."""
        self.present = False
        rails, self.rails = list(self.rails.values()), {}
        for rail in rails:
            self.user._loop.ask(lambda rail=rail: self.requests.broken(rail, "device removed"))


@pytest.fixture
def rng() -> Any:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


def test_what_cards_have_begun_tcp_ends_and_back(rng: random.Random) -> None:
    with engine_pair("tcp") as (user, owner):
        window, back = allocate(NBYTES), allocate(NBYTES)
        region = owner.register(window)
        key = offer(owner, region, user)
        cards = Cards(user, owner, region)
        torch.manual_seed(rng.randrange(1 << 31))
        source = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
        ours, landing = user.register(source), user.register(back)
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(0.001):
                cards.do(rng.randint(1, 3), rng)

        def write_all(immediate: int) -> list[Any]:
            cuts = sorted(rng.sample(range(1, NBYTES), 11))
            bounds = list(zip([0, *cuts], [*cuts, NBYTES], strict=True))
            rng.shuffle(bounds)
            return [
                user.write(
                    owner.name,
                    ours,
                    key,
                    a,
                    a,
                    b - a,
                    immediate=immediate,
                    priority=Priority.WEIGHTS,
                    timeout_s=60.0,
                )
                for a, b in bounds
            ]

        transfers = write_all(5)
        eventually(lambda: any(r.posted for r in [*cards.rails.values()]), "slices are posted")
        for _ in range(rng.randint(1, 8)):
            cards.do(rng.randint(1, 2), rng)
        begun = cards.num_done
        cards.remove()
        transfers += write_all(6)
        for transfer in transfers:
            transfer.wait()
        assert begun > 0
        assert cards.num_done == begun, "the rest went over tcp"
        assert cards.deputy.requests is not None
        owner.expect({(user.name, 5): 12, (user.name, 6): 12}, timeout_s=60.0)
        assert not owner.arrived({(user.name, 5): 1})
        assert not owner.arrived({(user.name, 6): 1})
        assert torch.equal(window.tensor, source)
        user.read(owner.name, landing, key, 0, 0, NBYTES).wait()
        assert torch.equal(back.tensor, source)

        cards.present = True
        eventually(lambda: cards.requests.deputy is None, "the cards are back")
        worker = threading.Thread(target=work)
        worker.start()
        try:
            window.tensor.zero_()
            for transfer in write_all(7):
                transfer.wait()
        finally:
            stop.set()
            worker.join()
        assert cards.num_done > begun
        owner.expect({(user.name, 7): 12}, timeout_s=60.0)
        assert torch.equal(window.tensor, source)


def test_a_short_absence_moves_nothing(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deputy, "GONE_S", 60.0)  # short, however busy the machine is
    with engine_pair("tcp") as (user, owner):
        window = allocate(4096)
        region = owner.register(window)
        cards = Cards(user, owner, region)
        key = offer(owner, region, user)
        source = user.register(torch.ones(4096, dtype=torch.uint8))
        transfer = user.write(owner.name, source, key, 0, 0, 4096, immediate=1)
        eventually(lambda: any(r.posted for r in [*cards.rails.values()]), "slices are posted")
        cards.remove()
        time.sleep(0.1)
        cards.present = True
        deadline = time.monotonic() + 60.0
        while not transfer.done() and time.monotonic() < deadline:
            cards.do(1, rng)
            time.sleep(0.005)
        transfer.wait()
        assert cards.deputy.requests is None
        owner.expect({(user.name, 1): 1}, timeout_s=60.0)


def test_what_has_no_address_waits_for_the_cards() -> None:
    with engine_pair("tcp") as (user, owner):
        region = owner.register(allocate(4096))
        cards = Cards(user, owner, region)
        key = offer(owner, region, user)
        source = user.register(torch.ones(4096, dtype=torch.uint8))
        transfer = user.write(owner.name, source, key, 0, 0, 4096, timeout_s=8.0)
        eventually(lambda: any(r.posted for r in [*cards.rails.values()]), "slices are posted")
        (operation,) = cards.requests._core.operations.values()
        operation.movable = False  # type: ignore[union-attr]
        cards.remove()
        eventually(lambda: cards.requests.deputy is not None, "tcp is there")
        with pytest.raises(TimeoutError):
            transfer.wait()
