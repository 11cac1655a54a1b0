"""The pooled KV-cache store: write-once blocks, found by content, moved one-sided by clients.

Names that need the transfer engine are loaded when first used: keys, messages and the master's
state machine import without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.client.locations import PrefixHit as PrefixHit
    from kvstore.client.store_client import StoreClient as StoreClient
    from kvstore.client.write_through import WriteThrough as WriteThrough
    from kvstore.errors import Fenced as Fenced
    from kvstore.errors import InvariantViolated as InvariantViolated
    from kvstore.errors import KVStoreError as KVStoreError
    from kvstore.errors import LeaseExpired as LeaseExpired
    from kvstore.errors import MasterRefused as MasterRefused
    from kvstore.errors import MasterUnavailable as MasterUnavailable
    from kvstore.errors import NodeUnreachable as NodeUnreachable
    from kvstore.errors import StoreClosed as StoreClosed
    from kvstore.keys import KEY_BYTES as KEY_BYTES
    from kvstore.keys import block_namespace as block_namespace
    from kvstore.keys import named_key as named_key
    from kvstore.keys import prefix_keys as prefix_keys
    from kvstore.master.master_server import MasterServer as MasterServer
    from kvstore.master.store_master import MasterTiming as MasterTiming
    from kvstore.master.store_master import StoreMaster as StoreMaster
    from kvstore.node.store_node import StoreNode as StoreNode
    from kvstore.wire.messages import MasterStatistics as MasterStatistics
    from kvstore.wire.messages import PutOutcome as PutOutcome

_HOME = {
    "Fenced": "errors",
    "InvariantViolated": "errors",
    "KEY_BYTES": "keys",
    "KVStoreError": "errors",
    "LeaseExpired": "errors",
    "MasterRefused": "errors",
    "MasterServer": "master.master_server",
    "MasterStatistics": "wire.messages",
    "MasterTiming": "master.store_master",
    "MasterUnavailable": "errors",
    "NodeUnreachable": "errors",
    "PrefixHit": "client.locations",
    "PutOutcome": "wire.messages",
    "StoreClient": "client.store_client",
    "StoreClosed": "errors",
    "StoreMaster": "master.store_master",
    "StoreNode": "node.store_node",
    "WriteThrough": "client.write_through",
    "block_namespace": "keys",
    "named_key": "keys",
    "prefix_keys": "keys",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
