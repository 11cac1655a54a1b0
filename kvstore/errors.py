"""Errors of the KV store.

    KVStoreError
    ├── MasterUnavailable      (retryable)
    ├── MasterRefused
    ├── Fenced
    ├── TenantRefused
    ├── LeaseExpired           (retryable)
    ├── LeaseLost              (retryable)
    ├── NodeUnreachable        (retryable)
    ├── BlockUnreachable       (retryable)
    ├── BlockCorrupt
    ├── InvalidKey             (a ValueError)
    ├── InvalidValue           (a ValueError)
    ├── TooManyHolds
    ├── TooManyViews
    ├── SegmentUnusable
    ├── StoreClosed
    ├── EtcdUnavailable        (retryable)
    ├── DrainIncomplete        (retryable)
    │   └── DrainStuck
    ├── AdminTokenInvalid
    ├── AdminRefused
    ├── AdminUnavailable       (retryable)
    └── InvariantViolated

Every error carries its facts as fields and survives pickling. `retryable` says whether the same
call can succeed later without anything else being changed.
"""

from __future__ import annotations

from typing import Final

from transfer.typed_error import TypedError


class KVStoreError(TypedError):
    """Base of all errors of this package."""


class MasterUnavailable(KVStoreError):
    """The store master did not answer in time: a lookup is a miss, a put did not happen."""

    retryable = True

    operation: str
    address: str
    problem: str

    def _message(self) -> str:
        who = f"store master at {self.address}" if self.address else "no store master"
        return f"{who}: {self.operation} failed: {self.problem}"


class MasterRefused(KVStoreError):
    """The master answered, and the answer is that the request is not legal.

    `reason` is one of `kvstore.wire.columns.RefusalReason`.
    """

    operation: str
    problem: str
    reason: str = "malformed"

    def _message(self) -> str:
        return f"store master refused {self.operation}: {self.problem}"


_OF_TENANTS: Final = {
    "unknown_tenant": "no master's configuration has it",
    "wrong_token": "its token is another one",
    "not_entered": "the masters serve tenants only, and none of theirs was named",
}


class TenantRefused(KVStoreError):
    """The master does not know the tenant (`unknown_tenant`), or its token is another one
    (`wrong_token`), or it wants to know a tenant and none is given (`not_entered`).
    """

    tenant: str
    reason: str

    def _message(self) -> str:
        return f"tenant {self.tenant!r}: {_OF_TENANTS.get(self.reason, self.reason)}"


class Fenced(KVStoreError):
    """This incarnation was declared out of the cluster; only a new one may use the store."""

    incarnation: str

    def _message(self) -> str:
        return f"incarnation {self.incarnation} is fenced"


class LeaseExpired(KVStoreError):
    """The blocks may have been evicted while they were read: nothing of the copy counts."""

    retryable = True

    lease_id: int
    late_s: float

    def _message(self) -> str:
        return f"lease {self.lease_id} ended {self.late_s:.3g} s before the copy did"


class LeaseLost(KVStoreError):
    """Bytes that were read in place may not have been the right ones to the end: nobody kept them
    there any more. What was made of them does not count.
    """

    retryable = True

    lease_id: int
    problem: str

    def _message(self) -> str:
        return f"lease {self.lease_id} {self.problem}: what was read in place may have changed"


class NodeUnreachable(KVStoreError):
    """A store node could not be connected, or did not offer its segment in time."""

    retryable = True

    node: str
    address: str
    problem: str

    def _message(self) -> str:
        return f"store node {self.node} at {self.address}: {self.problem}"


class BlockUnreachable(KVStoreError):
    """A block is in the pool, but no copy of it could be read from here in time."""

    retryable = True

    key: bytes

    def _message(self) -> str:
        return f"block {self.key.hex()}: no copy is within reach"


class BlockCorrupt(KVStoreError):
    """The bytes of a block did not match its checksum in any copy. The bad copies are reported
    and dropped: asking again finds a miss, and the block can be put anew.
    """

    key: bytes

    def _message(self) -> str:
        return f"block {self.key.hex()}: no copy has the right bytes"


class InvalidKey(KVStoreError, ValueError):
    """A key is neither a name of 1 to `NAME_BYTES_MAX` bytes nor a key of 16 bytes."""

    problem: str

    def _message(self) -> str:
        return f"invalid key: {self.problem}"


class InvalidValue(KVStoreError, ValueError):
    """A value cannot be stored, a target cannot take one, or an argument makes no sense.

    Nothing was asked or moved.
    """

    problem: str

    def _message(self) -> str:
        return f"invalid value: {self.problem}"


class TooManyHolds(KVStoreError):
    """More leases are held open than a client renews. Something does not close them."""

    held: int

    def _message(self) -> str:
        return f"{self.held} leases are held already"


class TooManyViews(KVStoreError):
    """A client would keep more bytes of the pool in place than it may (`kvstore.view_bytes`)."""

    nbytes: int
    held_bytes: int
    max_bytes: int

    def _message(self) -> str:
        return (
            f"a view of {self.nbytes} bytes, where {self.held_bytes} of at most {self.max_bytes} "
            "are held in place already"
        )


class SegmentUnusable(KVStoreError):
    """A file or device is not what a segment can lie in. Nothing of it was changed."""

    path: str
    expected: str
    seen: str

    def _message(self) -> str:
        return f"{self.path}: expected {self.expected}, seen {self.seen}"


class StoreClosed(KVStoreError):
    """The object was closed, or its thread ended on an unexpected error (`problem`)."""

    what: str
    problem: str = "closed"

    def _message(self) -> str:
        return f"{self.what}: {self.problem}"


class AdminTokenInvalid(KVStoreError):
    """The file of the administrators' token can't be used."""

    path: str
    problem: str

    def _message(self) -> str:
        return f"administrators' token {self.path}: {self.problem}"


class DrainIncomplete(KVStoreError):
    """Something is left on a node that was drained. The masters go on, unless it is gone."""

    retryable = True

    node: str
    left_blocks: int
    problem: str

    def _message(self) -> str:
        return f"{self.left_blocks} blocks are left on {self.node}: {self.problem}"


class DrainStuck(DrainIncomplete):
    """What is left on a node has nowhere to go, until a node comes or there is room."""

    retryable = False


class AdminRefused(KVStoreError):
    """The administration service said no; `status` is that of HTTP."""

    operation: str
    status: int
    problem: str

    def _message(self) -> str:
        return f"{self.operation}: {self.problem}"


class AdminUnavailable(KVStoreError):
    """The administration service gave no usable answer."""

    retryable = True

    url: str
    problem: str

    def _message(self) -> str:
        return f"no answer from {self.url}: {self.problem}"


class EtcdUnavailable(KVStoreError):
    """etcd did not answer, or not as expected. Whoever asked goes on with what it knows."""

    retryable = True

    operation: str
    problem: str

    def _message(self) -> str:
        return f"etcd: {self.operation}: {self.problem}"


class InvariantViolated(KVStoreError):
    """The store's own bookkeeping is wrong. Never the caller's fault."""

    where: str
    problem: str

    def _message(self) -> str:
        return f"{self.where}: {self.problem}"
