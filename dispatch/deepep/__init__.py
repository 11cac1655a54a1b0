"""DeepEP's calls on a dispatcher, so that an engine written for DeepEP or NIXL EP can try this one.

    buffer = Buffer(group)                               a process group, or a `Carrier`
    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, M, E)
    combined_x, event, hook = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)

Shapes and types are DeepEP's, for CPU tensors; `dispatch.deepep.slabs` and
`dispatch.deepep.rank_rows` draw them. What differs: every dispatch has its combine, and at most two
are in flight; E need not divide by the number of ranks; a lost rank is `PassFailed` and never a
mask. What is not there raises `Unsupported` before anything is sent. Rows are copied into DeepEP's
shapes and out of them; whoever wants the speed calls a `Dispatcher`.
"""

from __future__ import annotations

from dispatch.deepep.buffer import Buffer
from dispatch.deepep.carriers import Alone, ByCollective, ByTransfer, Carrier, swap_by_group
from dispatch.deepep.rank_rows import NormalHandle
from dispatch.deepep.settings import Config, EventOverlap
from dispatch.deepep.slabs import LowLatencyHandle

__all__ = [
    "Alone",
    "Buffer",
    "ByCollective",
    "ByTransfer",
    "Carrier",
    "Config",
    "EventOverlap",
    "LowLatencyHandle",
    "NormalHandle",
    "swap_by_group",
]
