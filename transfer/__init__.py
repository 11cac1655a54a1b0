"""Moves bytes between the registered memory of any two processes; authenticated control channel.

Same-host peers copy into each other's mapped memory, others talk tcp; see docs/transfer.md.
Names are loaded when first used: the errors, and what else needs none, import without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.lazy_names import lazy_names

if TYPE_CHECKING:
    from transfer.engine import TransferEngine as TransferEngine
    from transfer.errors import AccessRefused as AccessRefused
    from transfer.errors import AddressInvalid as AddressInvalid
    from transfer.errors import ControlError as ControlError
    from transfer.errors import DeviceUnavailable as DeviceUnavailable
    from transfer.errors import EngineClosed as EngineClosed
    from transfer.errors import HandshakeRefused as HandshakeRefused
    from transfer.errors import ImmediateTimeout as ImmediateTimeout
    from transfer.errors import Interrupted as Interrupted
    from transfer.errors import PeerLost as PeerLost
    from transfer.errors import PeerUnknown as PeerUnknown
    from transfer.errors import PeerUnreachable as PeerUnreachable
    from transfer.errors import ProtocolViolation as ProtocolViolation
    from transfer.errors import RegionUnknown as RegionUnknown
    from transfer.errors import RegistrationFailed as RegistrationFailed
    from transfer.errors import RemoteError as RemoteError
    from transfer.errors import RpcTimeout as RpcTimeout
    from transfer.errors import StorageBusy as StorageBusy
    from transfer.errors import StorageFailed as StorageFailed
    from transfer.errors import StorageFull as StorageFull
    from transfer.errors import TransferError as TransferError
    from transfer.errors import TransferTimeout as TransferTimeout
    from transfer.explanation import Explanation as Explanation
    from transfer.handle import Transfer as Transfer
    from transfer.memory.memory import Memory as Memory
    from transfer.memory.memory import allocate as allocate
    from transfer.memory.region import Access as Access
    from transfer.memory.region import Region as Region
    from transfer.memory.region import RegionKey as RegionKey
    from transfer.pages import Pages as Pages
    from transfer.peer import Peer as Peer
    from transfer.prepared import Prepared as Prepared
    from transfer.priority import Priority as Priority
    from transfer.statistics import BackendStatistics as BackendStatistics
    from transfer.statistics import PriorityStatistics as PriorityStatistics
    from transfer.statistics import RailStatistics as RailStatistics
    from transfer.statistics import TransferStatistics as TransferStatistics
    from transfer.wire import NOTE_BYTES_MAX as NOTE_BYTES_MAX

_HOME = {
    "Access": "memory.region",
    "AccessRefused": "errors",
    "BackendStatistics": "statistics",
    "AddressInvalid": "errors",
    "ControlError": "errors",
    "DeviceUnavailable": "errors",
    "EngineClosed": "errors",
    "Explanation": "explanation",
    "HandshakeRefused": "errors",
    "ImmediateTimeout": "errors",
    "Interrupted": "errors",
    "Memory": "memory.memory",
    "NOTE_BYTES_MAX": "wire",
    "Pages": "pages",
    "Peer": "peer",
    "PeerLost": "errors",
    "PeerUnknown": "errors",
    "PeerUnreachable": "errors",
    "Prepared": "prepared",
    "Priority": "priority",
    "PriorityStatistics": "statistics",
    "ProtocolViolation": "errors",
    "RailStatistics": "statistics",
    "Region": "memory.region",
    "RegionKey": "memory.region",
    "RegionUnknown": "errors",
    "RegistrationFailed": "errors",
    "RemoteError": "errors",
    "RpcTimeout": "errors",
    "StorageBusy": "errors",
    "StorageFailed": "errors",
    "StorageFull": "errors",
    "Transfer": "handle",
    "TransferEngine": "engine",
    "TransferError": "errors",
    "TransferStatistics": "statistics",
    "TransferTimeout": "errors",
    "allocate": "memory.memory",
}

__all__ = list(_HOME)

__getattr__ = lazy_names(__name__, _HOME)
