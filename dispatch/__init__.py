"""Token dispatch: rows to the ranks that hold their experts, results back, summed at the source.

Names are loaded when first used: `ExpertMap` and the errors need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dispatch.collective import CollectiveDispatcher as CollectiveDispatcher
    from dispatch.dispatcher import Dispatcher as Dispatcher
    from dispatch.errors import CallOrder as CallOrder
    from dispatch.errors import CapacityExceeded as CapacityExceeded
    from dispatch.errors import DispatchError as DispatchError
    from dispatch.errors import ExpertUnowned as ExpertUnowned
    from dispatch.errors import InputInvalid as InputInvalid
    from dispatch.errors import LayoutMismatch as LayoutMismatch
    from dispatch.errors import MessageMismatch as MessageMismatch
    from dispatch.errors import PassFailed as PassFailed
    from dispatch.errors import PlacementInvalid as PlacementInvalid
    from dispatch.errors import StaleEpoch as StaleEpoch
    from dispatch.errors import Unsupported as Unsupported
    from dispatch.expert_load import ExpertLoad as ExpertLoad
    from dispatch.expert_load import GroupLoad as GroupLoad
    from dispatch.expert_load import LoadWindow as LoadWindow
    from dispatch.expert_map import ExpertMap as ExpertMap
    from dispatch.handle import DispatchHandle as DispatchHandle
    from dispatch.handle import ExpertRows as ExpertRows
    from dispatch.layout import DispatchLayout as DispatchLayout
    from dispatch.local import LocalDispatcher as LocalDispatcher
    from dispatch.statistics import DispatchStatistics as DispatchStatistics
    from dispatch.transfer_dispatcher import TransferDispatcher as TransferDispatcher

_HOME = {
    "CallOrder": "errors",
    "CapacityExceeded": "errors",
    "CollectiveDispatcher": "collective",
    "DispatchError": "errors",
    "DispatchHandle": "handle",
    "DispatchLayout": "layout",
    "DispatchStatistics": "statistics",
    "Dispatcher": "dispatcher",
    "ExpertLoad": "expert_load",
    "ExpertMap": "expert_map",
    "ExpertRows": "handle",
    "ExpertUnowned": "errors",
    "GroupLoad": "expert_load",
    "InputInvalid": "errors",
    "LayoutMismatch": "errors",
    "LoadWindow": "expert_load",
    "LocalDispatcher": "local",
    "MessageMismatch": "errors",
    "PassFailed": "errors",
    "PlacementInvalid": "errors",
    "StaleEpoch": "errors",
    "TransferDispatcher": "transfer_dispatcher",
    "Unsupported": "errors",
}

__all__ = list(_HOME)

__getattr__ = lazy_names(__name__, _HOME)
