"""Errors of the KV store.

    KVStoreError
    ├── MasterUnavailable      (retryable)
    ├── MasterRefused
    ├── Fenced
    ├── TenantRefused
    ├── LeaseExpired           (retryable)
    ├── NodeUnreachable        (retryable)
    ├── BlockUnreachable       (retryable)
    ├── BlockCorrupt
    ├── InvalidKey             (a ValueError)
    ├── InvalidValue           (a ValueError)
    ├── TooManyHolds
    ├── SegmentUnusable
    ├── StoreClosed
    ├── EtcdUnavailable        (retryable)
    ├── AdminTokenInvalid
    ├── AdminRefused
    ├── AdminUnavailable       (retryable)
    └── InvariantViolated

Every error carries its facts as fields and survives pickling. `retryable` says whether the same
call can succeed later without anything else being changed.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KVStoreError(Exception):
    """Base of all errors of this package."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take keyword fields only, which the default protocol would not pass on.
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[KVStoreError], fields: dict[str, object]) -> KVStoreError:
    return kind(**fields)  # type: ignore[arg-type]


class MasterUnavailable(KVStoreError):
    """The store master did not answer in time: a lookup is a miss, a put did not happen."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, operation: str, address: str, problem: str) -> None:
        message = f"store master at {address}: {operation} failed: {problem}"
        super().__init__(message, operation=operation, address=address, problem=problem)
        self.operation = operation
        self.address = address
        self.problem = problem


class MasterRefused(KVStoreError):
    """The master answered, and the answer is that the request is not legal.

    `reason` is one of `kvstore.wire.columns.RefusalReason`.
    """

    def __init__(self, *, operation: str, problem: str, reason: str = "malformed") -> None:
        message = f"store master refused {operation}: {problem}"
        super().__init__(message, operation=operation, problem=problem, reason=reason)
        self.operation = operation
        self.problem = problem
        self.reason = reason


class TenantRefused(KVStoreError):
    """The master does not know the tenant (`unknown_tenant`), or its token is another one
    (`wrong_token`), or it wants to know a tenant and none is given (`not_entered`).
    """

    def __init__(self, *, tenant: str, reason: str) -> None:
        super().__init__(f"tenant {tenant!r}: {reason}", tenant=tenant, reason=reason)
        self.tenant = tenant
        self.reason = reason


class Fenced(KVStoreError):
    """This incarnation was declared out of the cluster; only a new one may use the store."""

    def __init__(self, *, incarnation: str) -> None:
        super().__init__(f"incarnation {incarnation} is fenced", incarnation=incarnation)
        self.incarnation = incarnation


class LeaseExpired(KVStoreError):
    """The blocks may have been evicted while they were read: nothing of the copy counts."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, lease_id: int, late_s: float) -> None:
        message = f"lease {lease_id} ended {late_s:.3g} s before the copy did"
        super().__init__(message, lease_id=lease_id, late_s=late_s)
        self.lease_id = lease_id
        self.late_s = late_s


class NodeUnreachable(KVStoreError):
    """A store node could not be connected, or did not offer its segment in time."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, node: str, address: str, problem: str) -> None:
        message = f"store node {node} at {address}: {problem}"
        super().__init__(message, node=node, address=address, problem=problem)
        self.node = node
        self.address = address
        self.problem = problem


class BlockUnreachable(KVStoreError):
    """A block is in the pool, but no copy of it could be read from here in time."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, key: bytes) -> None:
        super().__init__(f"block {key.hex()}: no copy is within reach", key=key)
        self.key = key


class BlockCorrupt(KVStoreError):
    """The bytes of a block did not match its checksum in any copy. The bad copies are reported
    and dropped: asking again finds a miss, and the block can be put anew.
    """

    def __init__(self, *, key: bytes) -> None:
        super().__init__(f"block {key.hex()}: no copy has the right bytes", key=key)
        self.key = key


class InvalidKey(KVStoreError, ValueError):
    """A key is neither a name of 1 to `NAME_BYTES_MAX` bytes nor a key of 16 bytes."""

    def __init__(self, *, problem: str) -> None:
        super().__init__(f"invalid key: {problem}", problem=problem)
        self.problem = problem


class InvalidValue(KVStoreError, ValueError):
    """A value cannot be stored, or a target cannot take one. Nothing was asked or moved."""

    def __init__(self, *, problem: str) -> None:
        super().__init__(f"invalid value: {problem}", problem=problem)
        self.problem = problem


class TooManyHolds(KVStoreError):
    """More leases are held open than a client renews. Something does not close them."""

    def __init__(self, *, held: int) -> None:
        super().__init__(f"{held} leases are held already", held=held)
        self.held = held


class SegmentUnusable(KVStoreError):
    """A file or device is not what a segment can lie in. Nothing of it was changed."""

    def __init__(self, *, path: str, expected: str, seen: str) -> None:
        super().__init__(
            f"{path}: expected {expected}, seen {seen}", path=path, expected=expected, seen=seen
        )
        self.path = path
        self.expected = expected
        self.seen = seen


class StoreClosed(KVStoreError):
    """The object was closed, or its thread ended on an unexpected error (`problem`)."""

    def __init__(self, *, what: str, problem: str = "closed") -> None:
        super().__init__(f"{what}: {problem}", what=what, problem=problem)
        self.what = what
        self.problem = problem


class AdminTokenInvalid(KVStoreError):
    """The file of the administrators' token can't be used."""

    def __init__(self, *, path: str, problem: str) -> None:
        super().__init__(f"administrators' token {path}: {problem}", path=path, problem=problem)
        self.path = path
        self.problem = problem


class AdminRefused(KVStoreError):
    """The administration service said no; `status` is that of HTTP."""

    def __init__(self, *, operation: str, status: int, problem: str) -> None:
        message = f"{operation}: {problem}"
        super().__init__(message, operation=operation, status=status, problem=problem)
        self.operation = operation
        self.status = status
        self.problem = problem


class AdminUnavailable(KVStoreError):
    """The administration service gave no usable answer."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, url: str, problem: str) -> None:
        super().__init__(f"no answer from {url}: {problem}", url=url, problem=problem)
        self.url = url
        self.problem = problem


class EtcdUnavailable(KVStoreError):
    """etcd did not answer, or not as expected. Whoever asked goes on with what it knows."""

    retryable: ClassVar[bool] = True

    def __init__(self, *, operation: str, problem: str) -> None:
        super().__init__(f"etcd: {operation}: {problem}", operation=operation, problem=problem)
        self.operation = operation
        self.problem = problem


class InvariantViolated(KVStoreError):
    """The store's own bookkeeping is wrong. Never the caller's fault."""

    def __init__(self, *, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}", where=where, problem=problem)
        self.where = where
        self.problem = problem
