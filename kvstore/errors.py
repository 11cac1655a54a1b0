"""Errors of the KV store.

    KVStoreError
    ├── MasterUnavailable      (retryable)
    ├── MasterRefused
    ├── Fenced
    ├── LeaseExpired           (retryable)
    ├── NodeUnreachable        (retryable)
    ├── StoreClosed
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


class StoreClosed(KVStoreError):
    """The object was closed, or its thread ended on an unexpected error (`problem`)."""

    def __init__(self, *, what: str, problem: str = "closed") -> None:
        super().__init__(f"{what}: {problem}", what=what, problem=problem)
        self.what = what
        self.problem = problem


class InvariantViolated(KVStoreError):
    """The store's own bookkeeping is wrong. Never the caller's fault."""

    def __init__(self, *, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}", where=where, problem=problem)
        self.where = where
        self.problem = problem
