"""Which master has a key, and what a request to all of them is made of.

    shard of a key = its first 8 bytes (big-endian) modulo the number of masters

Keys are hashes, so all masters have equally much to do. Masters never talk to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import MasterRefused, MasterUnavailable
from kvstore.wire import messages as m

Outcome = m.Reply | MasterUnavailable
ReplyT = TypeVar("ReplyT", bound=m.Reply)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One reply made of several.

    Attributes:
        reply: As from a single master.
        leftovers: What masters are to be told still; nobody waits for that.
    """

    reply: m.Reply
    leftovers: tuple[tuple[int, m.Request], ...] = ()


Merge = Callable[[Sequence[Outcome]], Merged]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request in parts.

    Attributes:
        parts: (shard, its part), each shard at most once.
        merge: Takes what became of each part, in the same order. Raises MasterUnavailable if too
            much is missing.
    """

    parts: tuple[tuple[int, m.Request], ...]
    merge: Merge


def shard_of(key: bytes, num_shards: int) -> int:
    """Return the number of the master that has this key."""
    return int.from_bytes(key[:8], "big") % num_shards


def by_shard(keys: Sequence[bytes], num_shards: int) -> dict[int, list[int]]:
    """Return the positions of the keys of each shard, in order; shards without any are left out."""
    positions: dict[int, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(shard_of(key, num_shards), []).append(position)
    return positions


def pick(column: Sequence[T], positions: Sequence[int]) -> list[T]:
    """Return a part of a column; an empty column stays empty."""
    return [column[position] for position in positions] if column else []


def arrived(operation: str, outcome: Outcome, expected: type[ReplyT]) -> ReplyT:
    """Return a reply. Raises MasterUnavailable if there is none, MasterRefused if it is another."""
    if isinstance(outcome, MasterUnavailable):
        raise outcome
    if not isinstance(outcome, expected):
        raise MasterRefused(operation=operation, problem=f"answered {type(outcome).__name__}")
    return outcome


class NodeNames:
    """The segments that several replies name, each once."""

    def __init__(self) -> None:
        self._idx: dict[m.NodeAddress, int] = {}

    @property
    def nodes(self) -> list[m.NodeAddress]:
        """The merged list."""
        return list(self._idx)

    def translate(self, nodes: Sequence[m.NodeAddress]) -> list[int]:
        """Return the indices of these in the merged list."""
        return [self._idx.setdefault(node, len(self._idx)) for node in nodes]
