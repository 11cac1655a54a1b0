"""DeepEP's `Buffer` on a dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dispatch.deepep.carriers import ByCollective, Carrier
from dispatch.deepep.lanes import Lanes
from dispatch.deepep.low_latency import NO_MASK, LowLatencyMode, refuse
from dispatch.deepep.normal import NormalMode
from dispatch.deepep.settings import Config, EventOverlap
from dispatch.deepep.slabs import slab_layout
from dispatch.errors import Unsupported


class Buffer(NormalMode, LowLatencyMode):
    """The communication buffer of one rank. Not thread-safe; every rank makes the same calls.

    Memory is taken at the first call with new sizes, which is a collective call over `transfer`.

    Args:
        group: A process group, None for the default one, or a `Carrier`.
        num_nvl_bytes: Accepted, no effect; so are all up to `explicitly_destroy`.
        num_rdma_bytes: See above.
        low_latency_mode: See above: both modes are there.
        num_qps_per_rank: See above.
        allow_nvlink_for_low_latency_mode: See above.
        allow_mnnvl: See above.
        use_fabric: See above.
        explicitly_destroy: See above.
        enable_shrink: Must be false: ranks are not masked.
        comm: Must be None: an MPI communicator.
        max_tokens: Most tokens of a rank in `dispatch`, the same on all ranks.

    Raises:
        Unsupported: An argument that would change the meaning of the calls.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | Carrier | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        max_tokens: int = 4096,
    ) -> None:
        refuse(enable_shrink, "enable_shrink", NO_MASK)
        refuse(comm is not None, "an MPI communicator", "a process group or a carrier")
        carrier = (
            ByCollective(group) if group is None or isinstance(group, dist.ProcessGroup) else group
        )
        lanes = Lanes(carrier)
        NormalMode.__init__(self, lanes, max_tokens)
        LowLatencyMode.__init__(self, lanes)

    def destroy(self) -> None:
        """Free all memory; what was in flight is lost. Idempotent."""
        self._lanes.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return False: nothing here is compiled for a GPU."""
        return False

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set a number that means nothing here."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event that has happened."""
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a configuration that is accepted and not used."""
        del num_ranks
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return a configuration that is accepted and not used."""
        return Buffer.get_dispatch_config(num_ranks)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of the windows that the worst routing of top-8 needs on one rank."""
        topk = min(8, num_experts)
        layout = slab_layout(num_max_dispatch_tokens_per_rank, hidden, topk, num_experts)
        experts = -(-num_experts // num_ranks)
        one = layout.dispatch_window_bytes(experts) + layout.combine_window_bytes()
        return layout.microbatches * (num_ranks - 1) * one

    def get_comm_stream(self) -> Any:
        """Raise `Unsupported`: there are no streams."""
        raise Unsupported(what="a communication stream", instead="the hooks")

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Raise `Unsupported`: windows belong to the peer that writes to them."""
        del dtype, size, offset, use_rdma_buffer
        raise Unsupported(what="a view of the windows", instead="the tensors that calls return")

    def update_memory_buffers(
        self,
        num_ranks: int,
        num_experts_per_rank: int,
        num_rdma_bytes: int = 0,
        num_nvl_bytes: int = 0,
    ) -> None:
        """NIXL EP: return; memory is taken at the first call.

        Raises:
            Unsupported: For more ranks than the group has.
        """
        del num_experts_per_rank, num_rdma_bytes, num_nvl_bytes
        refuse(num_ranks > self.group_size, f"{num_ranks} ranks", f"a group of {num_ranks}")

    def connect_ranks(self, remote_ranks: Sequence[int], activate: bool = True) -> None:
        """NIXL EP: return if all of them are in the group, connected since it was made.

        Raises:
            Unsupported: A rank from outside, or one that is not to be active.
        """
        refuse(not activate, "a rank that is connected and masked", NO_MASK)
        outside = [rank for rank in remote_ranks if not 0 <= rank < self.group_size]
        refuse(outside, f"connecting ranks {outside}", "a Buffer over the new group")

    def disconnect_ranks(self, remote_ranks: Sequence[int]) -> None:
        """NIXL EP: raise `Unsupported`."""
        raise Unsupported(
            what=f"disconnecting ranks {list(remote_ranks)}", instead="a Buffer over the new group"
        )
