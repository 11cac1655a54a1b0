"""The errors of the transfer engine.

    TransferError
        EngineClosed                the engine is not open (any more)
        HandshakeRefused            the other side did not prove itself, or does not want us
            PeerUnreachable         nobody answered in time (retryable)
        PeerUnknown                 no connection to a peer of this name
        PeerLost                    the connection to the peer broke, or the peer was fenced
        AccessRefused               out of bounds, or without the right
            RegionUnknown           the key was withdrawn, or was never offered to us
        TransferTimeout             an operation was not finished at its deadline (retryable)
        ImmediateTimeout            immediates did not arrive in time (retryable)
        Interrupted                 somebody called `interrupt`
        ProtocolViolation           bytes from the wire make no sense
        StorageFailed               a file did not take or give its bytes
            StorageFull             the file system has no room, or a limit was met (retryable)
            StorageBusy             another process owns the file (retryable)
        DeviceUnavailable           this process cannot use memory, or cards, of that kind
        RegistrationFailed          memory that the network cards cannot be given
        ControlError
            RpcTimeout              no reply in time (retryable)
            RemoteError             the handler of the request raised

Each carries what is known as attributes, and survives pickling.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


def _rebuild(kind: type[TransferError], message: str, fields: dict[str, object]) -> TransferError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(fields)
    return error


class TransferError(Exception):
    """Base of all errors of this package."""

    retryable: ClassVar[bool] = False

    def __reduce__(
        self,
    ) -> tuple[object, tuple[type[TransferError], str, dict[str, object]]]:
        return (_rebuild, (type(self), str(self.args[0]) if self.args else "", dict(self.__dict__)))


class EngineClosed(TransferError):
    """The engine was not opened, was closed, or its thread failed (then the cause is chained)."""


class HandshakeRefused(TransferError):
    """No authenticated connection came about.

    Attributes:
        address: who was called ("" on the side that was called).
        reason: why; the side without the secret only ever sees that the connection was closed.
        peer: name that the other side claims, "" if it told none.
    """

    def __init__(self, address: str, reason: str, peer: str = "") -> None:
        super().__init__(f"handshake with {address or 'a caller'} refused: {reason}")
        self.address = address
        self.reason = reason
        self.peer = peer


class PeerUnreachable(HandshakeRefused):
    """Nobody answered at the address, or not in time."""

    retryable: ClassVar[bool] = True


class PeerUnknown(TransferError):
    """The engine has no connection to a peer of this name, and never lost one."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"no peer {peer!r} is connected")
        self.peer = peer


class PeerLost(TransferError):
    """The peer is gone, or was fenced.

    Attributes:
        peer: its name.
        evidence: what was seen.
        backend: "shared_memory" or "tcp", "" where no operation was under way.
        attempts: how often the operation was tried.
        bytes_moved: how many of its bytes are known to be in place.
        elapsed_s: how long the operation had been running.
        rail: the rail that was used last, "" where there is none.
    """

    def __init__(
        self,
        peer: str,
        evidence: str,
        *,
        backend: str = "",
        attempts: int = 0,
        bytes_moved: int = 0,
        elapsed_s: float = 0.0,
        rail: str = "",
    ) -> None:
        super().__init__(f"peer {peer} lost: {evidence}")
        self.peer = peer
        self.evidence = evidence
        self.backend = backend
        self.attempts = attempts
        self.bytes_moved = bytes_moved
        self.elapsed_s = elapsed_s
        self.rail = rail


class AccessRefused(TransferError):
    """An access outside of the offered window, or without the right to it.

    Attributes:
        peer: owner of the memory.
        reason: which rule was broken, with the numbers where they are known.
        backend, attempts, bytes_moved, elapsed_s, rail: as of `PeerLost`, where the owner has
            refused it; what is refused here at once was not under way.
    """

    def __init__(
        self,
        peer: str,
        reason: str,
        *,
        backend: str = "",
        attempts: int = 0,
        bytes_moved: int = 0,
        elapsed_s: float = 0.0,
        rail: str = "",
    ) -> None:
        super().__init__(f"access to memory of {peer} refused: {reason}")
        self.peer = peer
        self.reason = reason
        self.backend = backend
        self.attempts = attempts
        self.bytes_moved = bytes_moved
        self.elapsed_s = elapsed_s
        self.rail = rail


class RegionUnknown(AccessRefused):
    """The key names nothing: it was withdrawn, or was offered to somebody else, or to nobody."""


class TransferTimeout(TransferError, TimeoutError):
    """An operation was not finished at its deadline; some of its bytes may be in place.

    Attributes: as of `PeerLost`, with `operation` ("write", "read", "notify", ...).
    """

    retryable: ClassVar[bool] = True

    def __init__(
        self,
        peer: str,
        operation: str,
        *,
        backend: str = "",
        attempts: int = 1,
        bytes_moved: int = 0,
        elapsed_s: float = 0.0,
        rail: str = "",
    ) -> None:
        super().__init__(
            f"{operation} with {peer} not finished after {elapsed_s:.3f} s"
            f" ({bytes_moved} bytes moved, attempt {attempts},"
            f" {rail or backend or 'no backend'})"
        )
        self.peer = peer
        self.operation = operation
        self.backend = backend
        self.attempts = attempts
        self.bytes_moved = bytes_moved
        self.elapsed_s = elapsed_s
        self.rail = rail


class ImmediateTimeout(TransferError, TimeoutError):
    """Immediates did not arrive in time; nothing was consumed.

    Attributes:
        missing: the (peer, immediate) pairs whose count was not reached.
    """

    retryable: ClassVar[bool] = True

    def __init__(self, missing: Iterable[tuple[str, int]]) -> None:
        self.missing = tuple(missing)
        super().__init__(f"{len(self.missing)} immediates missing, first: {self.missing[:4]}")


class Interrupted(TransferError):
    """`TransferEngine.interrupt` was called; it holds until `resume`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"interrupted: {reason}")
        self.reason = reason


class ProtocolViolation(TransferError):
    """Bytes from the wire that no correct peer sends; the connection is closed.

    Attributes:
        problem: what was found and what was expected.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"malformed bytes from the wire: {problem}")
        self.problem = problem


class StorageFailed(TransferError):
    """A file did not take or give its bytes: EIO, cut short, closed, or not what it should be.

    Attributes:
        path: the file.
        operation: "open", "read", "write" or "sync".
        reason: what went wrong.
        offset: first byte in the file of the access, -1 where none was made.
        errno: of the system call, 0 where none failed.
    """

    def __init__(
        self, path: str, operation: str, reason: str, *, offset: int = -1, errno: int = 0
    ) -> None:
        where = f" at byte {offset}" if offset >= 0 else ""
        super().__init__(f"{operation} of {path}{where} failed: {reason}")
        self.path = path
        self.operation = operation
        self.reason = reason
        self.offset = offset
        self.errno = errno


class StorageFull(StorageFailed):
    """The file system has no room, or a quota or file size limit was met."""

    retryable: ClassVar[bool] = True


class StorageBusy(StorageFailed):
    """Another process, or another slab of this one, owns the file."""

    retryable: ClassVar[bool] = True


class DeviceUnavailable(TransferError):
    """This process cannot use memory, or network cards, of that kind.

    Attributes:
        kind: as "cuda:0" or "RDMA".
        reason: what is missing.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"no {kind} here: {reason}")
        self.kind = kind
        self.reason = reason


class RegistrationFailed(TransferError):
    """Memory could not be registered with the network cards, which has to be done to use it.

    Attributes:
        nbytes: size of the memory.
        reason: what the system says; often a limit of locked memory (`ulimit -l`).
    """

    def __init__(self, nbytes: int, reason: str) -> None:
        super().__init__(f"{nbytes} bytes cannot be registered with the network cards: {reason}")
        self.nbytes = nbytes
        self.reason = reason


class ControlError(TransferError):
    """A request on the control channel failed."""


class RpcTimeout(ControlError, TimeoutError):
    """No reply in time. The request may or may not have been handled."""

    retryable: ClassVar[bool] = True

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__(f"no reply from {address} within {timeout_s:.3f} s")
        self.address = address
        self.timeout_s = timeout_s


class RemoteError(ControlError):
    """The handler at the server raised.

    Attributes:
        kind: name of the exception's class over there.
        detail: its message.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
