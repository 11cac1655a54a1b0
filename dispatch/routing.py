"""Route: which token goes to which rank, in which order. Integers only, deterministic.

Legend: T tokens, K choices of a token, W members, E logical experts, S slots (one per member and
expert that it holds, members ascending, experts ascending), N choices with a slot.

A choice is numbered token * K + k. Sorting the choices by slot, stably, gives the order that
everything else follows: grouped by member, inside by expert, inside by (token, k).

    T = 3, K = 2, two members: member 0 holds experts 0 1, member 1 holds 2 3
    topk_ids       0 2 | 2 3 | -1 0          choice numbers 0 1 | 2 3 | 4 5
    slots          0 2 | 2 3 |  4 0          4 = S: masked
    order          0 5 | 1 2 3               choices sorted by slot; 4 is left out
    choice_bounds  [0, 2, 5]                 member 0: order[0:2], member 1: order[2:5]
    row_tokens     0 2 | 0 1                 each token once per member
    row_bounds     [0, 2, 4]
    choice_rows    0 1 | 0 1 1               where a choice's row is among its member's rows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dispatch.expert_map import ExpertMap

Indices = npt.NDArray[np.int64]
# Numpy sorts 16-bit integers by radix, which is what makes large batches cheap.
SlotNumbers = npt.NDArray[np.uint16]


class Routing(NamedTuple):
    """Where the choices of one rank go in one layer (see the module's example).

    Attributes:
        order: [N] choice numbers, sorted by slot, then by choice number.
        counts: [S] choices of each slot.
        choice_bounds: Member w has `order[choice_bounds[w] : choice_bounds[w + 1]]`.
        choice_tokens: [N] token of each choice of `order`.
        choice_rows: [N] row of each choice of `order` among its member's rows.
        row_tokens: Token of each row, grouped by member, ascending.
        row_bounds: Member w has `row_tokens[row_bounds[w] : row_bounds[w + 1]]`.
        num_masked: Choices that are -1.
        num_missing: Choices whose expert nobody holds.
        num_invalid: Choices that are no expert of the layer at all; nothing else is valid then.
    """

    order: Indices
    counts: Indices
    choice_bounds: list[int]
    choice_tokens: Indices
    choice_rows: Indices
    row_tokens: Indices
    row_bounds: list[int]
    num_masked: int
    num_missing: int
    num_invalid: int


class LayerRoute:
    """The slots of one layer as one source rank sees them, and how its choices spread over them.

    Immutable; safe to share between threads.

    Args:
        expert_map: Where the experts live.
        members: All ranks that take part, ascending; experts of others count as missing.
        source_rank: Whose choices are routed.
        layer: Which layer.
    """

    def __init__(
        self, expert_map: ExpertMap, members: Sequence[int], source_rank: int, layer: int
    ) -> None:
        held = [
            expert_map.experts_of(rank, layer) if rank in expert_map.placement else ()
            for rank in members
        ]
        bounds = np.cumsum([0, *map(len, held)])
        self.num_slots = int(bounds[-1])
        assert self.num_slots + 2 < 1 << 16, "slot numbers are 16 bits"
        self.slot_bounds: list[int] = bounds.tolist()
        self.slot_experts: Indices = np.array([e for experts in held for e in experts], np.int64)
        self._bounds = bounds
        self._members = np.arange(len(members))
        self._edges = np.arange(len(members) + 1)
        self._slot_of = self._slots(expert_map.route(layer, source_rank), members, held)
        self._empty = self._route(np.empty(0, np.uint16), 0, 1)

    def _slots(
        self, target: Indices, members: Sequence[int], held: Sequence[tuple[int, ...]]
    ) -> SlotNumbers:
        """Return the slot of each expert id + 2, framed so that clipping finds what is invalid.

        S + 2 | S | slot of 0 | slot of 1 | ... | slot of E - 1 | S + 2
        <= -2   -1                                                 >= E
        """
        slot_of = np.full(len(target) + 3, self.num_slots + 1, np.uint16)
        slot_of[1] = self.num_slots
        slot_of[[0, -1]] = self.num_slots + 2
        for member, rank in enumerate(members):
            for position, logical in enumerate(held[member]):
                if target[logical] == rank:
                    slot_of[logical + 2] = self.slot_bounds[member] + position
        return slot_of

    def slots(self, topk_ids: Indices) -> SlotNumbers:
        """Return the slot of each choice: [T * K].

        S stands for masked, S + 1 for an expert that nobody holds, S + 2 for an invalid id.

        Args:
            topk_ids: [T, K] int64, contiguous, any values.
        """
        return self._slot_of.take(topk_ids.reshape(-1) + 2, mode="clip")

    def route(self, slots: SlotNumbers, num_tokens: int, topk: int) -> Routing:
        """Return where the choices go. Takes the result of `slots`, does not keep it."""
        return self._route(slots, num_tokens, topk) if num_tokens else self._empty

    def _route(self, slots: SlotNumbers, num_tokens: int, topk: int) -> Routing:
        num_slots = self.num_slots
        counts = np.bincount(slots, minlength=num_slots + 3)
        ends = np.zeros(num_slots + 1, np.int64)
        counts[:num_slots].cumsum(out=ends[1:])
        bounds = ends[self._bounds]
        order = slots.argsort(kind="stable")[: ends[-1]]
        tokens = order // topk
        # One flag per (member, token): a token's row is sent once to a member however many of its
        # experts are there, and a prefix sum over the flags numbers the rows.
        member_of = self._members.repeat(bounds[1:] - bounds[:-1])
        flag_of = member_of * num_tokens + tokens
        flags = np.zeros(len(self._members) * num_tokens, np.bool_)
        flags[flag_of] = True
        rows = flags.nonzero()[0]
        row_bounds = rows.searchsorted(self._edges * num_tokens)
        choice_rows = (flags.cumsum() - 1)[flag_of] - row_bounds[member_of]
        masked, missing, invalid = counts[num_slots:].tolist()
        return Routing(
            order=order,
            counts=counts[:num_slots],
            choice_bounds=bounds.tolist(),
            choice_tokens=tokens,
            choice_rows=choice_rows,
            row_tokens=rows % num_tokens if num_tokens else rows,
            row_bounds=row_bounds.tolist(),
            num_masked=masked,
            num_missing=missing,
            num_invalid=invalid,
        )


class ExpertMajor:
    """From rows as they arrive, source after source, to rows expert after expert, and back.

    Every source lists its rows by (expert, token, k), so the counts alone fix the permutation:

        counts     source 0: 2 1    source 1: 1 1          (two local experts)
        arrival    a0 a1 b2 | a3 b4                        letter = expert
        gather     0 1 3 2 4       row i of the result is arrival gather[i]: a0 a1 a3 b2 b4
        place      0 1 3 2 4       arrival j is row place[j] of the result

    Immutable; safe to share between threads.
    """

    def __init__(self, num_sources: int, num_experts: int) -> None:
        self._experts = np.tile(np.arange(num_experts, dtype=np.uint16), num_sources)

    def arrange(self, counts: npt.NDArray[np.integer]) -> tuple[Indices, Indices]:
        """Return `gather` and `place`.

        Args:
            counts: [sources, local experts], rows of each.
        """
        gather = self._experts.repeat(counts.reshape(-1)).argsort(kind="stable")
        place = np.empty_like(gather)
        place[gather] = np.arange(len(gather))
        return gather, place
