"""Token dispatch: rows to the ranks that hold their experts, results back, summed at the source.

`ExpertMap` and the errors need no torch; everything else is imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dispatch.errors import (
    CallOrder,
    CapacityExceeded,
    DispatchError,
    ExpertUnowned,
    InputInvalid,
    LayoutMismatch,
    MessageMismatch,
    PassFailed,
    PlacementInvalid,
    StaleEpoch,
    Unsupported,
)
from dispatch.expert_load import ExpertLoad, GroupLoad, LoadWindow
from dispatch.expert_map import ExpertMap

if TYPE_CHECKING:
    from dispatch.collective import CollectiveDispatcher
    from dispatch.dispatcher import Dispatcher
    from dispatch.handle import DispatchHandle, ExpertRows
    from dispatch.layout import DispatchLayout
    from dispatch.local import LocalDispatcher
    from dispatch.statistics import DispatchStatistics
    from dispatch.transfer_dispatcher import TransferDispatcher

__all__ = [
    "CallOrder",
    "CapacityExceeded",
    "CollectiveDispatcher",
    "DispatchError",
    "DispatchHandle",
    "DispatchLayout",
    "DispatchStatistics",
    "Dispatcher",
    "ExpertLoad",
    "ExpertMap",
    "ExpertRows",
    "ExpertUnowned",
    "GroupLoad",
    "InputInvalid",
    "LayoutMismatch",
    "LoadWindow",
    "LocalDispatcher",
    "MessageMismatch",
    "PassFailed",
    "PlacementInvalid",
    "StaleEpoch",
    "TransferDispatcher",
    "Unsupported",
]

_MODULES = {
    "CollectiveDispatcher": "dispatch.collective",
    "DispatchHandle": "dispatch.handle",
    "DispatchLayout": "dispatch.layout",
    "DispatchStatistics": "dispatch.statistics",
    "Dispatcher": "dispatch.dispatcher",
    "ExpertRows": "dispatch.handle",
    "LocalDispatcher": "dispatch.local",
    "TransferDispatcher": "dispatch.transfer_dispatcher",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'dispatch' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
