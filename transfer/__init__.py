"""Moves bytes between the registered memory of any two processes; authenticated control channel.

Same-host peers copy into each other's mapped memory, others talk tcp; see docs/transfer.md.
"""

from __future__ import annotations

from transfer.engine import TransferEngine
from transfer.errors import (
    AccessRefused,
    ControlError,
    DeviceUnavailable,
    EngineClosed,
    HandshakeRefused,
    ImmediateTimeout,
    Interrupted,
    PeerLost,
    PeerUnknown,
    PeerUnreachable,
    ProtocolViolation,
    RegionUnknown,
    RegistrationFailed,
    RemoteError,
    RpcTimeout,
    StorageBusy,
    StorageFailed,
    StorageFull,
    TransferError,
    TransferTimeout,
)
from transfer.explanation import Explanation
from transfer.handle import Transfer
from transfer.memory.memory import Memory, allocate
from transfer.memory.region import Access, Region, RegionKey
from transfer.pages import Pages
from transfer.peer import Peer
from transfer.prepared import Prepared
from transfer.priority import Priority
from transfer.statistics import (
    BackendStatistics,
    PriorityStatistics,
    RailStatistics,
    TransferStatistics,
)

__all__ = [
    "Access",
    "AccessRefused",
    "BackendStatistics",
    "ControlError",
    "DeviceUnavailable",
    "EngineClosed",
    "Explanation",
    "HandshakeRefused",
    "ImmediateTimeout",
    "Interrupted",
    "Memory",
    "Pages",
    "Peer",
    "PeerLost",
    "PeerUnknown",
    "PeerUnreachable",
    "Prepared",
    "Priority",
    "PriorityStatistics",
    "ProtocolViolation",
    "RailStatistics",
    "Region",
    "RegionKey",
    "RegionUnknown",
    "RegistrationFailed",
    "RemoteError",
    "RpcTimeout",
    "StorageBusy",
    "StorageFailed",
    "StorageFull",
    "Transfer",
    "TransferEngine",
    "TransferError",
    "TransferStatistics",
    "TransferTimeout",
    "allocate",
]
