"""Loops over rows of columns, compiled where a C compiler was found: the master's work per key.

A column is an `array`, a row a position in it. The only module that imports `kvstore._rows`;
MOE_RUNTIME_NATIVE=0 keeps it from being used. Without it the functions below do the same.
Measured with blocks by the thousand, a loop in Python takes 30 to 100 ns a row, these 3 to 15.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, TypeVar

from transfer.compiled_part import compiled_part

compiled = compiled_part("kvstore._rows")

COMPILED: Final = compiled is not None
T = TypeVar("T")
NOWHERE: Final = -1  # beyond the ends of a queue
Ends = tuple[int, int]  # the oldest row of a queue, and the youngest


def _gather(column: array[int], rows: Sequence[int], /) -> list[int]:
    """Return the values of these rows."""
    return [column[row] for row in rows]


def _total(column: array[int], rows: Sequence[int], /) -> int:
    """Return the sum of the values of these rows."""
    return sum(map(column.__getitem__, rows))


def _all_are(column: array[int], rows: Sequence[int], value: int, /) -> bool:
    """Tell whether all of these rows have this value."""
    return all(column[row] == value for row in rows)


def _all_own(column: array[int], rows: Sequence[int], /) -> bool:
    """Tell whether each of these rows names itself."""
    return all(column[row] == row for row in rows)


def _where(column: array[int], rows: Sequence[int], value: int, /) -> list[int]:
    """Return those of these rows that have this value."""
    return [row for row in rows if column[row] == value]


def _fill(column: array[int], rows: Sequence[int], value: int, /) -> None:
    """Give all of these rows this value."""
    for row in rows:
        column[row] = value


def _stairs(column: array[int], rows: Sequence[int], first: int, step: int, /) -> None:
    """Give these rows the values first, first + step, first + 2 step ..."""
    for row in rows:
        column[row] = first
        first += step


def _scatter(column: array[int], rows: Sequence[int], values: Sequence[int], /) -> None:
    """Give each of these rows its value."""
    for row, value in zip(rows, values, strict=True):
        column[row] = value


def _add(column: array[int], rows: Sequence[int], delta: int, reached: int, /) -> list[int]:
    """Add to each in its turn; return those that came to `reached`. One may be named twice."""
    found = []
    for row in rows:
        value = column[row] = column[row] + delta
        if value == reached:
            found.append(row)
    return found


def _pick(objects: list[T], rows: Sequence[int], /) -> list[T]:
    """Return the objects of these rows."""
    return [objects[row] for row in rows]


def _place(objects: list[T], rows: Sequence[int], fresh: Sequence[T], /) -> None:
    """Give each of these rows its object."""
    for row, each in zip(rows, fresh, strict=True):
        objects[row] = each


def _claim(index: dict[T, int], keys: list[T], rows: list[int], /) -> list[int]:
    """Enter keys with their rows; return the positions of those that had another row already."""
    enter = index.setdefault
    entries = enumerate(zip(keys, rows, strict=True))
    return [position for position, (key, row) in entries if enter(key, row) != row]


def _drop(index: dict[T, int], keys: Sequence[T], /) -> None:
    """Take keys out, all of which are there."""
    for key in keys:
        del index[key]


def _extend(
    older: array[int], newer: array[int], rows: Sequence[int], oldest: int, youngest: int, /
) -> Ends:
    """Enter rows into a queue with these ends, the last one as the youngest; return its ends."""
    for row in rows:
        older[row] = youngest
        newer[row] = NOWHERE
        if youngest == NOWHERE:
            oldest = row
        else:
            newer[youngest] = row
        youngest = row
    return oldest, youngest


def _renew(
    older: array[int], newer: array[int], rows: Sequence[int], oldest: int, youngest: int, /
) -> Ends:
    """Make rows of a queue with these ends the youngest, one after the other; return its ends."""
    for row in rows:
        if row == youngest:
            continue
        before, after = older[row], newer[row]
        if before == NOWHERE:
            oldest = after
        else:
            newer[before] = after
        older[after] = before
        older[row], newer[row], newer[youngest] = youngest, NOWHERE, row
        youngest = row
    return oldest, youngest


def _follow(links: array[int], row: int, count: int, /) -> list[int]:
    """Return a row and what its link leads to, and so on, at most so many."""
    found: list[int] = []
    while row != NOWHERE and len(found) < count:
        found.append(row)
        row = links[row]
    return found


# -- names of blocks that went: see `kvstore/eviction/gone.py` and `kvstore/compiled/gone.c` ------

RETURNED: Final = -1
_MIX: Final = 0x9E3779B97F4A7C15


def _print_of(name: Hashable) -> int:
    return (hash(name) * _MIX & 0xFFFFFFFFFFFFFFFF) >> 32


def _slots_from(slots: array[int], own: int) -> Iterator[int]:
    """Yield the slots in use from this one on, and then an empty one."""
    while slots[own] != NOWHERE:
        yield own
        own = (own + 1) % len(slots)
    yield own


def _own_slot(slots: array[int], name_print: int) -> int:
    return name_print * len(slots) >> 32


def _enter_gone(prints: array[int], slots: array[int], place: int) -> None:
    *_, empty = _slots_from(slots, _own_slot(slots, prints[place]))
    slots[empty] = place


def _empty_slot(prints: array[int], slots: array[int], hole: int) -> None:
    """Empty a slot; what was put behind it for want of a place is entered again."""
    *behind, _ = _slots_from(slots, hole)
    places = [slots[slot] for slot in behind[1:]]
    for slot in behind:
        slots[slot] = NOWHERE
    for place in places:
        _enter_gone(prints, slots, place)


def _remember(
    prints: array[int],
    numbers: array[int],
    slots: array[int],
    names: list[Hashable],
    fresh: list[int],
    place: int,
    /,
) -> None:
    """Enter names with their numbers, from this place of the ring on."""
    for name, number in zip(names, fresh, strict=True):
        prints[place], numbers[place] = _print_of(name), number
        _enter_gone(prints, slots, place)
        place += 1


def _recall(
    prints: array[int], numbers: array[int], slots: array[int], names: Sequence[Hashable], /
) -> list[int | None]:
    """Take names out; return their numbers, None for what is not there (any more)."""
    found: list[int | None] = []
    for name in names:
        wanted = _print_of(name)
        *used, _ = _slots_from(slots, _own_slot(slots, wanted))
        slot = next((slot for slot in used if prints[slots[slot]] == wanted), NOWHERE)
        number = RETURNED if slot == NOWHERE else numbers[slots[slot]]
        found.append(None if number == RETURNED else number)
        if slot != NOWHERE:
            numbers[slots[slot]] = RETURNED
            _empty_slot(prints, slots, slot)
    return found


def _forget(
    prints: array[int], numbers: array[int], slots: array[int], place: int, end: int, most: int, /
) -> tuple[list[int], int]:
    """Take the oldest out from this place on; return their numbers, and how far it came."""
    forgotten: list[int] = []
    while place < end and len(forgotten) < most:
        if numbers[place] != RETURNED:
            forgotten.append(numbers[place])
            *used, _ = _slots_from(slots, _own_slot(slots, prints[place]))
            _empty_slot(prints, slots, next(slot for slot in used if slots[slot] == place))
        place += 1
    return forgotten, place


def _close_up(
    prints: array[int],
    numbers: array[int],
    slots: array[int],
    to_prints: array[int],
    to_numbers: array[int],
    to_slots: array[int],
    place: int,
    end: int,
    kept: int,
    /,
) -> int:
    """Move what did not return into another ring that has so many; return how many it has then.

    Here it counts as returned from then on: `recall` finds no number of it.
    """
    del slots
    for i in range(place, end):
        if numbers[i] != RETURNED:
            to_prints[kept], to_numbers[kept] = prints[i], numbers[i]
            numbers[i] = RETURNED
            _enter_gone(to_prints, to_slots, kept)
            kept += 1
    return kept


gather, total, where = _gather, _total, _where
all_are, all_own = _all_are, _all_own
fill, stairs, scatter, add = _fill, _stairs, _scatter, _add
pick, place, claim, drop = _pick, _place, _claim, _drop
extend, renew, follow = _extend, _renew, _follow
remember, recall, forget, close_up = _remember, _recall, _forget, _close_up
if compiled is not None:
    gather, total, where = compiled.gather, compiled.total, compiled.where
    all_are, all_own = compiled.all_are, compiled.all_own
    fill, stairs, scatter, add = compiled.fill, compiled.stairs, compiled.scatter, compiled.add
    pick, place, claim, drop = compiled.pick, compiled.place, compiled.claim, compiled.drop
    extend, renew, follow = compiled.extend, compiled.renew, compiled.follow
    remember, recall = compiled.remember, compiled.recall
    forget, close_up = compiled.forget, compiled.close_up
