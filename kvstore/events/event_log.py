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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from configs.kv_events import EventForm

KEYS_PER_BATCH: Final = 4096


class Medium(StrEnum):
    """Where a copy lies; the values are vLLM's names."""

    DRAM = "CPU"
    SSD = "STORAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """These blocks are in this medium now."""

    keys: tuple[bytes, ...]
    medium: Medium


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


class EventLog:
    """Collects changes until they are taken. It begins with `Cleared`. Not thread-safe.

    Args:
        first_sequence: Number of the first batch. Higher than all of an earlier master, so that
            its subscribers see a gap.
    """

    def __init__(self, *, first_sequence: int) -> None:
        self._next = first_sequence
        self._pending: list[_Run | Cleared] = [Cleared()]

    def stored(self, keys: Sequence[bytes], medium: Medium = Medium.DRAM) -> None:
        """Note the first copies of blocks in a medium."""
        self._note(Stored, keys, medium)

    def removed(self, keys: Sequence[bytes], medium: Medium = Medium.DRAM) -> None:
        """Note that the last copies of blocks in a medium are gone."""
        self._note(Removed, keys, medium)

    def restate(self, present: Iterable[tuple[bytes, Medium]]) -> None:
        """Tell the whole state anew; what was noted and not taken is part of it."""
        self._pending = [Cleared()]
        for key, medium in present:
            self.stored((key,), medium)

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
        self, kind: type[Stored] | type[Removed], keys: Sequence[bytes], medium: Medium
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
            told += len(part)

    def _number(self, changes: list[Change]) -> EventBatch:
        batch = EventBatch(sequence=self._next, changes=tuple(changes))
        self._next += 1
        return batch


class EventFold:
    """The set that changes applied in order add up to. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes in order; each may be applied again."""
        for change in changes:
            match change:
                case Stored():
                    self._keys[change.medium].update(change.keys)
                case Removed():
                    self._keys[change.medium].difference_update(change.keys)
                case Cleared():
                    for keys in self._keys.values():
                        keys.clear()

    def changes(self) -> tuple[Change, ...]:
        """Return changes that lead from any state to this one."""
        changes: list[Change] = [Cleared()]
        for medium, keys in self._keys.items():
            ordered = sorted(keys)
            for start in range(0, len(ordered), KEYS_PER_BATCH):
                part = tuple(ordered[start : start + KEYS_PER_BATCH])
                changes.append(Stored(keys=part, medium=medium))
        return tuple(changes)


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
    events = [_event(change, form, block_tokens) for change in changes]
    return _encoder.encode([at_s, events, _DATA_PARALLEL_RANK])


def _event(change: Change, form: EventForm, block_tokens: int) -> list[Any] | dict[str, Any]:
    values: list[Any]
    match change:
        case Stored():
            names = _STORED_FIELDS
            medium = change.medium.value
            values = ["BlockStored", change.keys, None, (), block_tokens, None, medium, None]
        case Removed():
            names = _REMOVED_FIELDS
            values = ["BlockRemoved", change.keys, change.medium.value]
        case Cleared():
            names = ("type",)
            values = ["AllBlocksCleared"]
    return values if form is EventForm.ARRAY else dict(zip(names, values, strict=True))


def _change(item: _Run | Cleared) -> Change:
    if isinstance(item, Cleared):
        return item
    return item.kind(keys=tuple(item.keys), medium=item.medium)
