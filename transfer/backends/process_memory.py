"""One-sided copies into and out of a same-host peer's ordinary memory: process_vm_readv, _writev.

Memory that lies in no memory file cannot be mapped, but the kernel copies between processes where
it lets one trace the other (same user, dumpable, no Yama or seccomp in the way). The owner tells
the address of a window to the peer it was offered to, on request, over the control connection;
the peer keeps to the window's bounds. This protects against mistakes, not against that peer: the
kernel would let it read all of our memory anyway.

    requester                               owner
    LOCATE token               ------->     remembers that the address is told
                               <-------     LOCATED token, address, size, probe
    copies ... copies
                               <-------     WITHDRAWN token
    RETIRED token              ------->     nothing is under way any more: the memory is free

Which process the peer is, the kernel tells (SO_PEERCRED of the signal socket), never the peer. A
random number that it holds at a told address proves that we reach its address space.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from transfer import native
from transfer.errors import AccessRefused, PeerLost, ProtocolViolation, TransferTimeout
from transfer.memory.region import TOKEN_BYTES, Region, RegionKey
from transfer.pieces import Ints, Pieces

logger = logging.getLogger(__name__)

_LOCATED: Final = struct.Struct("<16sBBQQQ16s")
_CREDENTIALS: Final = struct.Struct("3i")
NONCE_BYTES: Final = 16
ADDRESS_MAX: Final = 1 << 63


class Answer(IntEnum):
    """What the owner says to LOCATE. NEVER holds for all of its memory."""

    TOLD = 1
    NOT_THIS = 2
    NEVER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The owner's answer.

    Attributes:
        token: of the key.
        answer: only with `Answer.TOLD` does the rest mean anything.
        rights: of the key, as an integer.
        address: where the window starts in the owner's address space.
        nbytes: its size.
        probe: address of the owner's `nonce`.
    """

    token: bytes
    answer: Answer
    rights: int = 0
    address: int = 0
    nbytes: int = 0
    probe: int = 0
    nonce: bytes = bytes(NONCE_BYTES)

    def encode(self) -> bytes:
        """Return the content of a control frame."""
        return _LOCATED.pack(
            self.token, self.answer, self.rights, self.address, self.nbytes, self.probe, self.nonce
        )


def parse_located(content: bytes) -> Located:
    """Undo `Located.encode`.

    Raises:
        ProtocolViolation: a field makes no sense.
    """
    if len(content) != _LOCATED.size:
        raise ProtocolViolation(f"location of {len(content)} bytes")
    token, answer, rights, address, nbytes, probe, nonce = _LOCATED.unpack(content)
    if answer not in Answer._value2member_map_ or max(address, probe) > ADDRESS_MAX:
        raise ProtocolViolation(f"location: answer {answer}, address {address:#x}")
    if nbytes > ADDRESS_MAX - address:
        raise ProtocolViolation(f"location: [{address:#x}, +{nbytes})")
    return Located(
        token=token,
        answer=Answer(answer),
        rights=rights,
        address=address,
        nbytes=nbytes,
        probe=probe,
        nonce=nonce,
    )


class Probe:
    """A random number in our memory; who reads it there reaches our address space."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._array = np.frombuffer(self.nonce, dtype=np.uint8).copy()
        self.address = int(self._array.ctypes.data)


class PeerProcess:
    """The process at the other end of a unix socket, as the kernel knows it.

    Raises:
        OSError: it is dead, or this kernel has no descriptors of processes.
    """

    def __init__(self, sock: socket.socket) -> None:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid = int(_CREDENTIALS.unpack(raw)[0])
        if self.pid <= 0:  # of another pid namespace
            raise OSError(errno.ENXIO, "the peer's process is not visible here")
        self._descriptor = os.pidfd_open(self.pid)

    @property
    def alive(self) -> bool:
        """Whether the process number still is this process's: it runs, or was not reaped."""
        try:
            signal.pidfd_send_signal(self._descriptor, 0)
        except PermissionError:
            return True
        except OSError:
            return False
        return True

    @property
    def exited(self) -> bool:
        """Whether all of its threads have ended: it touches no memory any more."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        # Shared by all who copy and all whose addresses it knows; closed after the last of them.
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)


class Location:
    """A window in the peer's address space."""

    __slots__ = ("address", "live", "nbytes", "num_copies", "rights")

    def __init__(self, located: Located) -> None:
        self.address = located.address
        self.nbytes = located.nbytes
        self.rights = located.rights
        self.live = True
        self.num_copies = 0


class Locations:
    """The windows of one peer whose addresses were told to us. Thread-safe.

    Args:
        ask: sends LOCATE for a token.
        retire: sends RETIRED for a token: no copy of ours is under way there any more.
        find_process: the peer's process. May raise `OSError`.
        may_wait: whether this thread may wait for an answer. The engine's own takes it.
        enabled: False to go by sockets always.

    Attributes:
        refusal: why this peer's memory is not reached this way, None if it is or nobody knows.
    """

    def __init__(
        self,
        peer: str,
        *,
        ask: Callable[[bytes], object],
        retire: Callable[[bytes], object],
        find_process: Callable[[], PeerProcess],
        may_wait: Callable[[], bool],
        enabled: bool,
    ) -> None:
        self._peer = peer
        self._ask = ask
        self._retire = retire
        self._find_process = find_process
        self._may_wait = may_wait
        self._changed = threading.Condition()
        # None: asked, or told in vain. Either way the owner may wait for our RETIRED.
        self._locations: dict[bytes, Location | None] = {}
        self._answers: dict[bytes, Located] = {}
        self._num_asked: Counter[bytes] = Counter()  # questions that are not answered yet
        self._process: PeerProcess | None = None
        self._closed = False
        self.refusal: str | None = None if enabled else "turned off here"

    def get(self, key: RegionKey, deadline: float) -> Location | None:
        """Return where a key's window is, asking at the first use; None if not this way.

        Raises:
            TransferTimeout: no answer.
        """
        location = self._locations.get(key.token)
        if location is not None and location.live and _is_of(location, key):
            return location
        if self.refusal is not None or not self._may_wait():
            return None
        located = self._await_answer(key.token, deadline)
        if located is None or not self._may_use(located, key):
            return None
        with self._changed:
            if key.token not in self._locations:
                return None  # withdrawn meanwhile
            location = self._locations[key.token] or Location(located)
            self._locations[key.token] = location
            return location

    def on_located(self, content: bytes) -> None:
        """Take an answer. On the engine's thread.

        Raises:
            ProtocolViolation: it is malformed, or nobody asked.
        """
        located = parse_located(content)
        with self._changed:
            token = located.token
            if not self._num_asked[token]:
                raise ProtocolViolation("a location that nobody asked for")
            self._num_asked[token] -= 1
            if not self._num_asked[token]:
                del self._num_asked[token]
            # Of a key that was withdrawn as the question was under way nobody waits for it.
            if located.answer is not Answer.TOLD:
                self._locations.pop(token, None)
            elif token in self._locations:
                self._answers[token] = located
            if located.answer is Answer.NEVER:
                self.refusal = "the peer does not tell addresses"
            self._changed.notify_all()

    def drop(self, token: bytes) -> None:
        """Forget a withdrawn key, and tell the owner once no copy is under way."""
        with self._changed:
            if token not in self._locations:
                return
            location = self._locations.pop(token)
            self._answers.pop(token, None)
            if location is not None:
                location.live = False
            idle = location is None or not location.num_copies
            self._changed.notify_all()
        if idle:
            self._retire(token)

    def close(self) -> None:
        """Retire all; present and future questions are answered with None."""
        with self._changed:
            self._closed = True
            tokens = list(self._locations)
            self._changed.notify_all()
        for token in tokens:
            self.drop(token)
        with self._changed:
            self._process = None

    def write(self, key: RegionKey, location: Location, source: Region, pieces: Pieces) -> bool:
        """Copy pieces of our region into the window. The caller has checked the bounds.

        Returns:
            False if the kernel does not permit it (any more): nothing says what was copied.

        Raises:
            PeerLost: the process is dead.
            AccessRefused: the key was withdrawn, or the memory is gone over there.
        """
        offsets = (pieces.target_offsets, pieces.source_offsets)
        return self._copy(native.process_vm_write, key, location, source, offsets, pieces.lengths)

    def read(self, key: RegionKey, location: Location, target: Region, pieces: Pieces) -> bool:
        """Copy pieces of the window into our region. As `write`."""
        offsets = (pieces.source_offsets, pieces.target_offsets)
        return self._copy(native.process_vm_read, key, location, target, offsets, pieces.lengths)

    def _copy(
        self,
        call: Callable[[int, int, int, Ints, Ints, Ints], int],
        key: RegionKey,
        location: Location,
        region: Region,
        offsets: tuple[Ints, Ints],
        lengths: Ints,
    ) -> bool:
        with self._changed:
            if not location.live:
                raise AccessRefused(self._peer, "the key was withdrawn")
            process = self._process
            assert process is not None, "a location is made only where the process was found"
            location.num_copies += 1
        try:
            if not process.alive:
                raise PeerLost(self._peer, "its process is dead")
            call(process.pid, location.address, region.start, *offsets, lengths)
            return True
        except PermissionError as error:
            self.refusal = f"the kernel does not permit it any more: {error.strerror}"
            return False
        except ProcessLookupError as error:
            raise PeerLost(self._peer, "its process is dead") from error
        except OSError as error:
            raise AccessRefused(self._peer, f"process memory: {error.strerror}") from error
        finally:
            self._end_copy(key.token, location)

    def _end_copy(self, token: bytes, location: Location) -> None:
        with self._changed:
            location.num_copies -= 1
            last = not location.live and not location.num_copies
        if last:
            self._retire(token)

    def _await_answer(self, token: bytes, deadline: float) -> Located | None:
        with self._changed:
            asks = token not in self._locations and not self._closed
            if asks:
                self._locations[token] = None
                self._num_asked[token] += 1
        if asks:
            self._ask(token)
        with self._changed:
            while token not in self._answers:
                if self._closed or token not in self._locations:
                    return None
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    raise TransferTimeout(self._peer, "locate", backend="process_memory")
            return self._answers[token]

    def _may_use(self, located: Located, key: RegionKey) -> bool:
        if not _is_of(located, key):
            raise AccessRefused(
                self._peer, f"a window of {located.nbytes} bytes, {key.nbytes} named"
            )
        if self._process is None:
            self.refusal = self._try(located)
            if self.refusal is not None:
                logger.info("memory of %s goes through sockets: %s", self._peer, self.refusal)
        return self.refusal is None

    def _try(self, located: Located) -> str | None:
        """Read the owner's nonce: permission and identity in one. Say what is wrong."""
        found = np.zeros(NONCE_BYTES, dtype=np.uint8)
        zero, length = np.zeros(1, dtype=np.int64), np.full(1, NONCE_BYTES, dtype=np.int64)
        try:
            process = self._find_process()
            native.process_vm_read(
                process.pid, located.probe, int(found.ctypes.data), zero, zero, length
            )
        except OSError as error:
            return f"process_vm_readv: {error.strerror}"
        if found.tobytes() != located.nonce or not process.alive:
            return "the process behind the socket is not the peer"
        with self._changed:
            self._process = None if self._closed else process
        return None


def _is_of(place: Location | Located, key: RegionKey) -> bool:
    """Whether what was told for a token is what this key says."""
    return place.nbytes == key.nbytes and place.rights == key.rights


assert _LOCATED.size == TOKEN_BYTES + 2 + 3 * 8 + NONCE_BYTES
