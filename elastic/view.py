"""Members and views: who takes part in epoch `e`, and which experts each of them holds.

A view is one record. It changes only by compare-and-set from epoch `e` to `e + 1`
(`elastic.store`), so there is exactly one view per epoch. A rank is a frozen slot number: slots
have holes and are never renumbered. An incarnation is one life of a process; a slot whose process
was restarted has the same rank and another incarnation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from dispatch import DispatchError, ExpertMap
from elastic.errors import RecordInvalid


class Role(StrEnum):
    """What a member does beside holding its experts."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process as others see it.

    Attributes:
        rank: The slot number.
        incarnation: Name of this life of the process, 16 hex characters; also its peer name.
        role: What it serves.
        node: Name of the failure domain; processes of one node share it.
        address: Where its transfer engine listens.
        pid: Process id on its node.
    """

    rank: int
    incarnation: str
    role: Role
    node: str
    address: str
    pid: int

    def encode(self) -> bytes:
        """Return the member as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Member:
        """Read what `encode` wrote.

        Raises:
            RecordInvalid: The bytes are not a member.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise RecordInvalid(what="member", problem=str(error)) from None


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int
    members: tuple[Member, ...]
    expert_map: dict[str, object]
    weights_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One epoch of the group.

    Attributes:
        epoch: Counts from 1; 0 means "no view yet".
        members: Sorted by rank, each rank once, never empty.
        expert_map: Which member holds which experts; names only ranks of `members`.
        weights_version: Which weights the experts are of.
    """

    epoch: int
    members: tuple[Member, ...]
    expert_map: ExpertMap
    weights_version: str = ""

    def __post_init__(self) -> None:
        ranks = [member.rank for member in self.members]
        if self.epoch < 1:
            raise RecordInvalid(what="view", problem=f"epoch {self.epoch}, expected >= 1")
        if not ranks or ranks != sorted(set(ranks)):
            raise RecordInvalid(
                what="view", problem=f"ranks {ranks}, expected sorted, unique, not empty"
            )
        strangers = set(self.expert_map.ranks) - set(ranks)
        if strangers:
            raise RecordInvalid(what="view", problem=f"experts at {sorted(strangers)}, not members")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks, ascending."""
        return tuple(member.rank for member in self.members)

    @property
    def incarnations(self) -> frozenset[str]:
        """The members' incarnations."""
        return frozenset(member.incarnation for member in self.members)

    def member(self, rank: int) -> Member | None:
        """Return the member with this rank, if there is one."""
        return next((member for member in self.members if member.rank == rank), None)

    def named(self, incarnation: str) -> Member | None:
        """Return the member with this incarnation, if there is one."""
        return next((m for m in self.members if m.incarnation == incarnation), None)

    def others(self, incarnation: str) -> tuple[Member, ...]:
        """Return all members but that one."""
        return tuple(m for m in self.members if m.incarnation != incarnation)

    def encode(self) -> bytes:
        """Return the view as JSON; equal views give equal bytes."""
        wire = _Wire(self.epoch, self.members, self.expert_map.to_wire(), self.weights_version)
        return msgspec.json.encode(wire, order="sorted")

    @classmethod
    def decode(cls, data: bytes) -> View:
        """Read what `encode` wrote.

        Raises:
            RecordInvalid: The bytes are not a view, or the view contradicts itself.
        """
        try:
            wire = msgspec.json.decode(data, type=_Wire)
            expert_map = ExpertMap.from_wire(wire.expert_map)
        except (msgspec.MsgspecError, DispatchError, ValueError, KeyError, TypeError) as error:
            raise RecordInvalid(what="view", problem=str(error)) from None
        return cls(
            epoch=wire.epoch,
            members=wire.members,
            expert_map=expert_map,
            weights_version=wire.weights_version,
        )
