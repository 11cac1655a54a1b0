"""What subscribers are told of the pool: changes, numbered batches of them, and their bytes.

A change is about keys in one medium. The master notes changes in an `EventLog`, and each step that
changed something becomes one batch (or several, if it touched very many keys). Batches have
consecutive numbers. Applied in order they yield the set of (key, medium) that is in the pool:

    Stored   adds its keys             the first copy of a block in a medium
    Removed  takes its keys out        the last one went
    Cleared  empties the set           a master starts, or the state is told anew

A block that changes its tier is stored in one medium and removed from another.

The bytes are those that vLLM publishes: MessagePack of [seconds, events, data parallel rank].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from configs.kv_events import EventForm
from kvstore.events.chains import Chains, Link, Links, parents_first, runs_of, tokens_of

KEYS_PER_BATCH: Final = 4096


class Medium(StrEnum):
    """Where a copy lies; the values are vLLM's names."""

    DRAM = "CPU"
    SSD = "STORAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """These blocks are in this medium now. `links`: what is known of some of them."""

    keys: tuple[bytes, ...]
    medium: Medium
    links: Links = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """These blocks are not in this medium any more."""

    keys: tuple[bytes, ...]
    medium: Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """Nothing that was told before counts."""


Change = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Changes in the order in which they happened; `sequence` is one more than the last's."""

    sequence: int
    changes: tuple[Change, ...]


@dataclass(slots=True)
class _Run:
    """Keys that changed alike, one after the other."""

    kind: type[Stored] | type[Removed]
    medium: Medium
    keys: list[bytes] = field(default_factory=list)
    links: dict[bytes, Link] = field(default_factory=dict)


class EventLog:
    """Collects changes until they are taken. It begins with `Cleared`. Not thread-safe.

    Args:
        first_sequence: Number of the first batch. Higher than all of an earlier master, so that
            its subscribers see a gap.
    """

    def __init__(self, *, first_sequence: int) -> None:
        self._next = first_sequence
        self._pending: list[_Run | Cleared] = [Cleared()]
        self._chains = Chains()

    def describe(self, keys: Sequence[bytes], links: Iterable[Link]) -> None:
        """Say of blocks that will be stored what they are; each is told once, when it is there."""
        self._chains.describe(keys, links)

    def stored(self, keys: Sequence[bytes], medium: Medium = Medium.DRAM) -> None:
        """Note the first copies of blocks in a medium."""
        self._note(Stored, keys, medium, self._chains.stored(keys))

    def removed(self, keys: Sequence[bytes], medium: Medium = Medium.DRAM) -> None:
        """Note that the last copies of blocks in a medium are gone."""
        self._note(Removed, keys, medium, {})
        self._chains.removed(keys)

    def restate(self, present: Iterable[tuple[bytes, Medium]]) -> None:
        """Tell the whole state anew; what was noted and not taken is part of it."""
        self._pending = [Cleared()]
        self._chains.restate()
        by_medium: dict[Medium, list[bytes]] = {}
        for key, medium in present:
            by_medium.setdefault(medium, []).append(key)
        for medium, keys in by_medium.items():
            links = self._chains.stored(keys)
            self._note(Stored, parents_first(keys, links), medium, links)

    def take(self) -> list[EventBatch]:
        """Return what was noted since the last call, as batches of at most KEYS_PER_BATCH keys."""
        batches: list[EventBatch] = []
        changes: list[Change] = []
        num_keys = 0
        for item in self._pending:
            change = _change(item)
            size = 0 if isinstance(change, Cleared) else len(change.keys)
            if changes and num_keys + size > KEYS_PER_BATCH:
                batches.append(self._number(changes))
                changes, num_keys = [], 0
            changes.append(change)
            num_keys += size
        if changes:
            batches.append(self._number(changes))
        self._pending = []
        return batches

    def _note(
        self,
        kind: type[Stored] | type[Removed],
        keys: Sequence[bytes],
        medium: Medium,
        links: Links,
    ) -> None:
        told = 0
        while told < len(keys):
            last = self._pending[-1] if self._pending else None
            if (
                not isinstance(last, _Run)
                or (last.kind, last.medium) != (kind, medium)
                or len(last.keys) == KEYS_PER_BATCH
            ):
                last = _Run(kind, medium)
                self._pending.append(last)
            part = keys[told : told + KEYS_PER_BATCH - len(last.keys)]
            last.keys.extend(part)
            if links:
                last.links.update((key, links[key]) for key in part if key in links)
            told += len(part)

    def _number(self, changes: list[Change]) -> EventBatch:
        batch = EventBatch(sequence=self._next, changes=tuple(changes))
        self._next += 1
        return batch


class EventFold:
    """The set that changes applied in order add up to. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._links: dict[bytes, Link] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes in order; each may be applied again."""
        for change in changes:
            match change:
                case Stored():
                    self._keys[change.medium].update(change.keys)
                    self._links.update(change.links)
                case Removed():
                    self._keys[change.medium].difference_update(change.keys)
                    self._forget_links(change.keys)
                case Cleared():
                    for keys in self._keys.values():
                        keys.clear()
                    self._links.clear()

    def changes(self) -> tuple[Change, ...]:
        """Return changes that lead from any state to this one."""
        changes: list[Change] = [Cleared()]
        for medium, keys in self._keys.items():
            ordered = parents_first(sorted(keys), self._links)
            for start in range(0, len(ordered), KEYS_PER_BATCH):
                part = tuple(ordered[start : start + KEYS_PER_BATCH])
                links = {key: self._links[key] for key in part if key in self._links}
                changes.append(Stored(keys=part, medium=medium, links=links))
        return tuple(changes)

    def _forget_links(self, keys: Iterable[bytes]) -> None:
        if self._links:
            for key in keys:
                if not any(key in there for there in self._keys.values()):
                    self._links.pop(key, None)


# Names and order of vLLM's fields; those behind `lora_name` have defaults there.
_STORED_FIELDS: Final[tuple[str, ...]] = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
)
_REMOVED_FIELDS: Final[tuple[str, ...]] = ("type", "block_hashes", "medium")
_DATA_PARALLEL_RANK: Final = 0  # a pool has no ranks; this is what a lone publisher says
_encoder = msgspec.msgpack.Encoder()


def encode_changes(
    changes: Iterable[Change], *, at_s: float, form: EventForm, block_tokens: int
) -> bytes:
    """Return the MessagePack payload of one message.

    Args:
        changes: What happened, in order.
        at_s: Seconds since the epoch.
        form: How each event is written.
        block_tokens: Tokens per block, as told to subscribers.
    """
    events = [event for change in changes for event in _events(change, form, block_tokens)]
    return _encoder.encode([at_s, events, _DATA_PARALLEL_RANK])


def _events(
    change: Change, form: EventForm, block_tokens: int
) -> Iterator[list[Any] | dict[str, Any]]:
    """Yield what one change is to a subscriber: a part of a chain is an event of its own."""
    match change:
        case Stored():
            for run in runs_of(change.keys, change.links):
                names, values = _STORED_FIELDS, _stored(run, change, block_tokens)
                yield values if form is EventForm.ARRAY else dict(zip(names, values, strict=True))
        case Removed():
            values = ["BlockRemoved", change.keys, change.medium.value]
            named = dict(zip(_REMOVED_FIELDS, values, strict=True))
            yield values if form is EventForm.ARRAY else named
        case Cleared():
            yield ["AllBlocksCleared"] if form is EventForm.ARRAY else {"type": "AllBlocksCleared"}


def _stored(run: list[bytes], change: Stored, block_tokens: int) -> list[Any]:
    first = change.links.get(run[0])
    parent = None if first is None else first.parent
    tokens = tokens_of(run, change.links)
    size = block_tokens if first is None else first.num_tokens
    return ["BlockStored", run, parent, tokens, size, None, change.medium.value, None]


def _change(item: _Run | Cleared) -> Change:
    if isinstance(item, Cleared):
        return item
    if item.kind is Removed:
        return Removed(keys=tuple(item.keys), medium=item.medium)
    return Stored(keys=tuple(item.keys), medium=item.medium, links=item.links)
