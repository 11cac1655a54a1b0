"""What `route` takes and returns: the tables of a layer, and where a rank's choices go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dispatch.kernels.operands import check_operand
from dispatch.routing import LayerRoute

INT32 = (torch.int32,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSlots:
    """The slots of one layer as one source rank sees them; any number of experts and members.

    An expert with several instances appears with the one that this source uses.

    Attributes:
        slot_of_expert: [E] int32: a slot, or -1 for an expert that nobody holds.
        member_of_slot: [S] int32, ascending.
        slot_bounds: [W + 1] int32: member w has the slots `[slot_bounds[w], slot_bounds[w + 1])`.
    """

    slot_of_expert: torch.Tensor
    member_of_slot: torch.Tensor
    slot_bounds: torch.Tensor

    @property
    def num_slots(self) -> int:
        """S."""
        return len(self.member_of_slot)

    @property
    def num_members(self) -> int:
        """W."""
        return len(self.slot_bounds) - 1

    def check(self, device: torch.device) -> None:
        """Accept tables on this device.

        Raises:
            InputInvalid: Another device, type or shape.
        """
        for name in ("slot_of_expert", "member_of_slot", "slot_bounds"):
            check_operand(name, getattr(self, name), (None,), INT32, device=device)

    @classmethod
    def of(cls, route: LayerRoute, num_experts: int, device: torch.device) -> ExpertSlots:
        """Return the tables of a layer on a device."""
        slots = route.slots(torch.arange(num_experts).unsqueeze(0).numpy()).astype("int32")
        slots[slots >= route.num_slots] = -1
        bounds = torch.tensor(route.slot_bounds, dtype=torch.int32)
        members = torch.arange(len(bounds) - 1, dtype=torch.int32)
        return cls(
            slot_of_expert=torch.from_numpy(slots).to(device),
            member_of_slot=members.repeat_interleave(bounds.diff()).to(device),
            slot_bounds=bounds.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """Where the choices of one rank go (see the example of `route`). All int32.

    Nothing here was waited for: N and the number of rows are known on the device only, as
    `choice_bounds[W]` and `row_bounds[W]`. Entries past them are undefined.

    Attributes:
        counts: [S + 3] choices of each slot; then those that are masked (-1), whose expert nobody
            holds, and that are no expert at all.
        choice_bounds: [W + 1].
        row_bounds: [W + 1].
        order: [T * K], N of them defined.
        choice_rows: [T * K], N of them defined, in the order of `order`.
        row_tokens: [T * min(K, W)], `row_bounds[W]` of them defined.
        places: [T, K] position in `order`, or -1.
        targets: [T, K] member, or -1.
        token_rows: [T, K] row among the member's rows at the token's first choice there, else -1.
    """

    counts: torch.Tensor
    choice_bounds: torch.Tensor
    row_bounds: torch.Tensor
    order: torch.Tensor
    choice_rows: torch.Tensor
    row_tokens: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    token_rows: torch.Tensor

    @classmethod
    def empty(cls, topk_ids: torch.Tensor, slots: ExpertSlots) -> Routed:
        """Return results to be filled in; all zeros if there are no choices."""
        (num_tokens, topk), num_members = topk_ids.shape, slots.num_members
        make = topk_ids.new_empty if num_tokens * topk else topk_ids.new_zeros

        def empty(*shape: int) -> torch.Tensor:
            return make(shape, dtype=torch.int32)

        return cls(
            counts=empty(slots.num_slots + 3),
            choice_bounds=empty(num_members + 1),
            row_bounds=empty(num_members + 1),
            order=empty(num_tokens * topk),
            choice_rows=empty(num_tokens * topk),
            row_tokens=empty(num_tokens * min(topk, num_members)),
            places=empty(num_tokens, topk),
            targets=empty(num_tokens, topk),
            token_rows=empty(num_tokens, topk),
        )
