"""Operations as generators: they yield what has to be waited for, a driver does the waiting.

    operation ── yields Ask, Reach, Move ... ──▶ driver     blocking: `driver.py`
              ◀── the result, or the error thrown in ──     asyncio:  `async_driver.py`

So every operation is written once, holds no thread while it waits, and is the same for both.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.wire import messages as m

if TYPE_CHECKING:
    from transfer import RegionKey, Transfer

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=m.Reply)


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request to the master; gives its reply."""

    request: m.Request
    expected: type[Any]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Reach:
    """Connect to a node and ask for its segment; gives the key to it."""

    where: m.NodeAddress
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """Wait until a transfer has ended; its own deadline bounds that."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Nothing to wait for: what follows copies or sums up so many bytes in the thread it is in."""

    nbytes: int


Effect = Ask | Reach | Move | Pause | Work
Steps = Generator[Effect, Any, T]


def ask(
    request: m.Request, expected: type[ReplyT], *, timeout_s: float | None = None
) -> Steps[ReplyT]:
    """Ask the master. Raises as `MasterLink.ask`."""
    reply = yield Ask(request, expected, timeout_s)
    assert isinstance(reply, expected), reply
    return reply


def reach(where: m.NodeAddress, deadline_s: float) -> Steps[RegionKey]:
    """Get the key to a segment. Raises NodeUnreachable."""
    key: RegionKey = yield Reach(where, deadline_s)
    return key


def settle(transfer: Transfer) -> Steps[None]:
    """Wait for the end of a transfer. Raises TransferError."""
    yield Move(transfer)


def pause(seconds: float) -> Steps[None]:
    """Wait."""
    yield Pause(seconds)


def work(nbytes: int) -> Steps[None]:
    """Say how much is to be done now; see `Work`."""
    yield Work(nbytes)
