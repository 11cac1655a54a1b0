"""Proves that a writer cannot write in a node's segments any more, though it never said so.

    it has mapped the memory    its process has exited, as the kernel says, and its link is closed
    it writes over tcp          its link is closed, and its key void: nothing of it lands again
    it writes by RDMA, or its process is not visible here                              no proof
    it writes to a disk         as over tcp, and the disk has done all that it had asked for

A disk's bytes go through the node, whoever the writer is: that one is stopped, or alive and lost
its link, makes no difference there.

Who only lost its link may come back. It is told with its next key that nothing may start which was
begun before (`OfferSegment.anew`), so what it was granted by then stays free. The order of things:

    cut off (key void) ─▶ the master lists what it has here ─▶ still cut off? ─▶ that is free
                                                                    └─▶ back, with a key: nothing is

Of the dead all is free, of others what they have had for longer than a put may take, so that not
even a reply that comes late lets them begin with it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from transfer import TransferError

if TYPE_CHECKING:
    from transfer import RegionKey, TransferEngine

CUT_MAX: Final = 1 << 14
AWAITED_S: Final = 5.0  # until it is asked again whether a disk is done for one that is dead


class Exits(Protocol):
    """A process."""

    @property
    def exited(self) -> bool:
        """Whether all of it has ended."""


class CutOff(Protocol):
    """Makes a writer's keys void."""

    def __call__(self, name: str, /, *, disks: bool) -> bool:
        """Make those to segments of disks void, or to the others.

        Returns:
            False if a disk is still writing something for it. May wait for that, a second.
        """


class _Unknown:
    """Something of which nobody can tell when it ends."""

    exited = False


class WriterWitness:
    """Thread-safe.

    Args:
        engine: The node's.
        cut_off: Makes a writer's keys void.
        period_s: How often writers are asked about of whose end nothing was noticed.
    """

    def __init__(self, engine: TransferEngine, cut_off: CutOff, *, period_s: float) -> None:
        self._engine = engine
        self._cut_off = cut_off
        self._period_s = period_s
        self._due_s = time.monotonic() + period_s
        self._lock = threading.Lock()
        self._processes: dict[str, Exits] = {}  # of those who could map the memory
        self._lost: set[str] = set()  # of these
        self._left: set[str] = set()  # of these, connected: they gave back all that they had
        self._awaited: dict[str, float] = {}  # of these: a disk is not done; when to look again
        self._cut: OrderedDict[str, bool] = OrderedDict()  # name -> whether it still is
        self._cut_max_reached = False

    def admit(self, name: str, offer: Callable[[], RegionKey]) -> tuple[RegionKey, bool]:
        """Give a peer access; return its key, and whether what it began before must not start.

        Raises:
            TransferError: It is gone, or as `offer`.
        """
        try:
            process: Exits | None = self._engine.process_of(name)
        except OSError:
            process = _Unknown()
        with self._lock:
            if process is not None and not isinstance(self._processes.get(name), _Unknown):
                self._processes[name] = process
            self._lost.discard(name)
            self._left.discard(name)
            self._awaited.pop(name, None)
            anew = name in self._cut or self._cut_max_reached
            if name in self._cut:
                self._cut[name] = False
            return offer(), anew

    def trust(self, name: str) -> None:
        """Somebody who is not connected yet is given access: nobody can tell when it ends."""
        with self._lock:
            self._processes[name] = _Unknown()
            self._left.discard(name)

    def left(self, name: str) -> None:
        """A writer has given all of its keys back: with its link it is forgotten.

        Else a process that lives for long would be watched once for every client it ever had.
        """
        with self._lock:
            if name in self._processes and name not in self._lost:
                self._left.add(name)

    def lost(self, name: str) -> None:
        """A peer's link is closed."""
        with self._lock:
            if name in self._left:
                self._left.discard(name)
                self._processes.pop(name)
            elif name in self._processes:
                self._lost.add(name)

    def is_due(self, now: float) -> bool:
        """Tell whether the masters are to be told of the dead, or asked for the late."""
        with self._lock:
            noticed = [name for name in self._lost if self._awaited.get(name, now) <= now]
            return now >= self._due_s or any(self._processes[name].exited for name in noticed)

    def asked(self, dead: Iterable[str], now: float) -> None:
        """All masters were asked, and told of these dead."""
        with self._lock:
            self._due_s = now + self._period_s
            for name in dead:
                self._lost.discard(name)
                self._processes.pop(name, None)
                self._awaited.pop(name, None)

    def cut_off_dead(self, *, disks: bool = False) -> list[str]:
        """Return whose processes have ended, and are not known to all masters.

        Args:
            disks: As of `cut_off`.
        """
        with self._lock:
            dead = [name for name in self._lost if self._processes[name].exited]
        return self.cut_off(dead, disks=disks)

    def cut_off(self, names: Iterable[str], *, disks: bool = False) -> list[str]:
        """Return those of these writers that write nothing here before they get another key.

        Args:
            names: Of the writers.
            disks: Here: in the segments of disks, instead of all others.
        """
        out = []
        for name in names:
            if not self._shut(name, disks=disks):
                continue
            if not self._cut_off(name, disks=disks):
                with self._lock:
                    if name in self._lost:
                        self._awaited[name] = time.monotonic() + AWAITED_S
                break  # a disk that hangs does so for all; they are asked about again
            out.append(name)
        return out

    def _shut(self, name: str, *, disks: bool) -> bool:
        with self._lock:
            process = self._processes.get(name)
            if process is not None and not process.exited and not disks:
                return False
            if name == self._engine.name or self._is_connected(name):
                return False
            self._cut[name] = True
            self._cut.move_to_end(name)
            while len(self._cut) > CUT_MAX:
                self._cut.popitem(last=False)
                self._cut_max_reached = True
        return True

    def is_out(self, name: str) -> bool:
        """Tell whether a writer that was cut off has not come back."""
        with self._lock:
            return self._cut.get(name, False)

    def _is_connected(self, name: str) -> bool:
        try:
            self._engine.peer(name)
        except TransferError:
            return False
        return True
