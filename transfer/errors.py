"""The errors of the transfer engine.

    TransferError
        EngineClosed                the engine is not open (any more)
        HandshakeRefused            the other side did not prove itself, or does not want us
            PeerUnreachable         nobody answered in time (retryable)
            AddressInvalid          nobody can be there: it is no address (a ValueError)
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

from dataclasses import KW_ONLY, dataclass, field
from typing import dataclass_transform

from transfer.typed_error import TypedError


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class TransferError(TypedError):
    """Base of all errors of this package, whose first facts may be given by place."""

    def __init_subclass__(cls) -> None:
        """As of the base, but for the order of facts, which counts here."""
        super().__init_subclass__(kw_only=False)


class EngineClosed(TransferError):
    """The engine was not opened, was closed, or its thread failed (then the cause is chained)."""

    reason: str

    def _message(self) -> str:
        return self.reason


class HandshakeRefused(TransferError):
    """No authenticated connection came about.

    Attributes:
        address: who was called ("" on the side that was called).
        reason: why; the side without the secret only ever sees that the connection was closed.
        peer: name that the other side claims, "" if it told none.
    """

    address: str
    reason: str
    peer: str = ""

    def _message(self) -> str:
        return f"handshake with {self.address or 'a caller'} refused: {self.reason}"


class PeerUnreachable(HandshakeRefused):
    """Nobody answered at the address, or not in time."""

    retryable = True


class AddressInvalid(HandshakeRefused, ValueError):
    """What was to be called is no address: `reason` says what is expected. Nobody was called."""

    def _message(self) -> str:
        return f"{self.address!r} is no address: {self.reason}"


class PeerUnknown(TransferError):
    """The engine has no connection to a peer of this name, and never lost one."""

    peer: str

    def _message(self) -> str:
        return f"no peer {self.peer!r} is connected"


@dataclass(kw_only=True, eq=False, repr=False)
class OperationFacts:
    """What is known of an operation that was under way; the defaults if there was none.

    Attributes:
        backend: "shared_memory" or "tcp", "" where no operation was under way.
        attempts: how often the operation was tried.
        bytes_moved: how many of its bytes are known to be in place.
        elapsed_s: how long the operation had been running.
        rail: the rail that was used last, "" where there is none.
    """

    backend: str = ""
    attempts: int = 0
    bytes_moved: int = 0
    elapsed_s: float = 0.0
    rail: str = ""


class PeerLost(OperationFacts, TransferError):
    """The peer is gone, or was fenced.

    Attributes:
        peer: its name.
        evidence: what was seen.
    """

    peer: str
    evidence: str

    def _message(self) -> str:
        return f"peer {self.peer} lost: {self.evidence}"


class AccessRefused(OperationFacts, TransferError):
    """An access outside of the offered window, or without the right to it.

    What is refused here at once was not under way; the facts of an operation are those of one
    that the owner has refused.

    Attributes:
        peer: owner of the memory.
        reason: which rule was broken, with the numbers where they are known.
    """

    peer: str
    reason: str

    def _message(self) -> str:
        return f"access to memory of {self.peer} refused: {self.reason}"


class RegionUnknown(AccessRefused):
    """The key names nothing: it was withdrawn, or was offered to somebody else, or to nobody."""


class TransferTimeout(OperationFacts, TransferError, TimeoutError):
    """An operation was not finished at its deadline; some of its bytes may be in place.

    Attributes:
        peer: the other side's name.
        operation: "write", "read", "notify", ...
    """

    retryable = True

    peer: str
    operation: str
    _: KW_ONLY
    attempts: int = 1

    def _message(self) -> str:
        return (
            f"{self.operation} with {self.peer} not finished after {self.elapsed_s:.3f} s"
            f" ({self.bytes_moved} bytes moved, attempt {self.attempts},"
            f" {self.rail or self.backend or 'no backend'})"
        )


class ImmediateTimeout(TransferError, TimeoutError):
    """Immediates did not arrive in time; nothing was consumed.

    Attributes:
        missing: the (peer, immediate) pairs whose count was not reached.
    """

    retryable = True

    missing: tuple[tuple[str, int], ...]

    def _message(self) -> str:
        first = ", ".join(f"{immediate} of {peer}" for peer, immediate in self.missing[:4])
        more = f" and {len(self.missing) - 4} others" if len(self.missing) > 4 else ""
        return f"not all immediates came in time; missing: {first}{more}"


class Interrupted(TransferError):
    """`TransferEngine.interrupt` was called; it holds until `resume`."""

    reason: str

    def _message(self) -> str:
        return f"interrupted: {self.reason}"


class ProtocolViolation(TransferError):
    """Bytes from the wire that no correct peer sends; the connection is closed.

    Attributes:
        problem: what was found and what was expected.
    """

    problem: str

    def _message(self) -> str:
        return f"malformed bytes from the wire: {self.problem}"


class StorageFailed(TransferError):
    """A file did not take or give its bytes: EIO, cut short, closed, or not what it should be.

    Attributes:
        path: the file.
        operation: "open", "read", "write" or "sync".
        reason: what went wrong.
        offset: first byte in the file of the access, -1 where none was made.
        errno: of the system call, 0 where none failed.
    """

    path: str
    operation: str
    reason: str
    _: KW_ONLY
    offset: int = -1
    errno: int = 0

    def _message(self) -> str:
        where = f" at byte {self.offset}" if self.offset >= 0 else ""
        return f"{self.operation} of {self.path}{where} failed: {self.reason}"


class StorageFull(StorageFailed):
    """The file system has no room, or a quota or file size limit was met."""

    retryable = True


class StorageBusy(StorageFailed):
    """Another process, or another slab of this one, owns the file."""

    retryable = True


class DeviceUnavailable(TransferError):
    """This process cannot use memory, or network cards, of that kind.

    Attributes:
        kind: as "cuda:0" or "RDMA".
        reason: what is missing.
    """

    kind: str
    reason: str

    def _message(self) -> str:
        return f"no {self.kind} here: {self.reason}"


class RegistrationFailed(TransferError):
    """Memory could not be registered with the network cards, which has to be done to use it.

    Attributes:
        nbytes: size of the memory.
        reason: what the system says; often a limit of locked memory (`ulimit -l`).
    """

    nbytes: int
    reason: str

    def _message(self) -> str:
        return f"{self.nbytes} bytes cannot be registered with the network cards: {self.reason}"


class ControlError(TransferError):
    """A request on the control channel failed.

    Attributes:
        reason: what happened, in one line.
    """

    reason: str

    def _message(self) -> str:
        return self.reason


class RpcTimeout(ControlError, TimeoutError):
    """No reply in time. The request may or may not have been handled."""

    retryable = True

    reason: str = field(init=False)
    address: str
    timeout_s: float

    def __post_init__(self) -> None:
        """Say which server. How long the last attempt took misleads whoever has made several."""
        self.reason = (
            f"no reply from {self.address} in time: nobody is there, it hangs or is busy, or it has"
            " another cluster secret"
        )
        super().__post_init__()


class RemoteError(ControlError):
    """The handler at the server raised.

    Attributes:
        kind: name of the exception's class over there.
        detail: its message.
    """

    reason: str = field(init=False)
    kind: str
    detail: str

    def __post_init__(self) -> None:
        """Say what it said."""
        self.reason = f"{self.kind}: {self.detail}"
        super().__post_init__()
