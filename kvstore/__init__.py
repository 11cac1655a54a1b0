"""The pooled KV-cache store: write-once blocks, found by content, moved one-sided by clients.

Names that need the transfer engine are loaded when first used: keys, messages and the master's
state machine import without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.lazy_names import lazy_names

if TYPE_CHECKING:
    from kvstore.client.chain import Chain as Chain
    from kvstore.client.held_hit import HeldHit as HeldHit
    from kvstore.client.locations import Hit as Hit
    from kvstore.client.pieces import Pieces as Pieces
    from kvstore.client.put_options import PutOptions as PutOptions
    from kvstore.client.store_client import StoreClient as StoreClient
    from kvstore.client.tenant import Tenant as Tenant
    from kvstore.client.write_through import WriteThrough as WriteThrough
    from kvstore.errors import BlockCorrupt as BlockCorrupt
    from kvstore.errors import BlockUnreachable as BlockUnreachable
    from kvstore.errors import Fenced as Fenced
    from kvstore.errors import InvalidKey as InvalidKey
    from kvstore.errors import InvalidValue as InvalidValue
    from kvstore.errors import InvariantViolated as InvariantViolated
    from kvstore.errors import KVStoreError as KVStoreError
    from kvstore.errors import LeaseExpired as LeaseExpired
    from kvstore.errors import LeaseLost as LeaseLost
    from kvstore.errors import MasterRefused as MasterRefused
    from kvstore.errors import MasterUnavailable as MasterUnavailable
    from kvstore.errors import NodeUnreachable as NodeUnreachable
    from kvstore.errors import SegmentUnusable as SegmentUnusable
    from kvstore.errors import StoreClosed as StoreClosed
    from kvstore.errors import TenantRefused as TenantRefused
    from kvstore.errors import TooManyHolds as TooManyHolds
    from kvstore.errors import TooManyViews as TooManyViews
    from kvstore.keys import KEY_BYTES as KEY_BYTES
    from kvstore.keys import block_namespace as block_namespace
    from kvstore.keys import named_key as named_key
    from kvstore.keys import prefix_keys as prefix_keys
    from kvstore.master.master_server import MasterServer as MasterServer
    from kvstore.master.store_master import MasterTiming as MasterTiming
    from kvstore.master.store_master import StoreMaster as StoreMaster
    from kvstore.node.store_node import StoreNode as StoreNode
    from kvstore.values.async_store import AsyncStore as AsyncStore
    from kvstore.values.get_result import GetOutcome as GetOutcome
    from kvstore.values.get_result import GetResult as GetResult
    from kvstore.values.store import Store as Store
    from kvstore.values.values import RegionPiece as RegionPiece
    from kvstore.wire.messages import MasterStatistics as MasterStatistics
    from kvstore.wire.messages import Medium as Medium
    from kvstore.wire.messages import Pin as Pin
    from kvstore.wire.messages import PutOutcome as PutOutcome

_HOME = {
    "AsyncStore": "values.async_store",
    "BlockCorrupt": "errors",
    "BlockUnreachable": "errors",
    "Fenced": "errors",
    "GetOutcome": "values.get_result",
    "GetResult": "values.get_result",
    "HeldHit": "client.held_hit",
    "Hit": "client.locations",
    "InvalidKey": "errors",
    "InvalidValue": "errors",
    "InvariantViolated": "errors",
    "KEY_BYTES": "keys",
    "KVStoreError": "errors",
    "LeaseExpired": "errors",
    "LeaseLost": "errors",
    "MasterRefused": "errors",
    "MasterServer": "master.master_server",
    "MasterStatistics": "wire.messages",
    "MasterTiming": "master.store_master",
    "MasterUnavailable": "errors",
    "NodeUnreachable": "errors",
    "Pieces": "client.pieces",
    "Medium": "wire.messages",
    "Pin": "wire.messages",
    "Chain": "client.chain",
    "PutOptions": "client.put_options",
    "PutOutcome": "wire.messages",
    "RegionPiece": "values.values",
    "SegmentUnusable": "errors",
    "Store": "values.store",
    "StoreClient": "client.store_client",
    "StoreClosed": "errors",
    "StoreMaster": "master.store_master",
    "StoreNode": "node.store_node",
    "Tenant": "client.tenant",
    "TenantRefused": "errors",
    "TooManyHolds": "errors",
    "TooManyViews": "errors",
    "WriteThrough": "client.write_through",
    "block_namespace": "keys",
    "named_key": "keys",
    "prefix_keys": "keys",
}

__all__ = list(_HOME)

__getattr__ = lazy_names(__name__, _HOME)
