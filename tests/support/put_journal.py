"""What writers of the same names wrote down of each call, and whether it can all be true."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SIZES = (4096, 9000, 65_536, 262_144)
HEAD_BYTES = 8


def value_of(name: str, version: int) -> bytes:
    """What a version of a name holds: its number first."""
    rng = random.Random(f"{name} {version}")
    return version.to_bytes(HEAD_BYTES, "little") + rng.randbytes(size_of(name) - HEAD_BYTES)


def size_of(name: str) -> int:
    """All versions of a name are equally long."""
    return SIZES[sum(name.encode()) % len(SIZES)]


def is_version(name: str, value: bytes) -> bool:
    """Tell whether these bytes are a version of this name, whole."""
    return value == value_of(name, int.from_bytes(value[:HEAD_BYTES], "little"))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, its beginning and end on the monotonic clock; no outcome: it did not return.

    Attributes:
        what: "put" or "remove".
        way: "posted", "asked", "batch"; of a removal "".
    """

    what: str
    name: str
    version: int
    began_s: float
    ended_s: float = float("inf")
    outcome: str = ""
    way: str = ""

    @property
    def is_stored(self) -> bool:
        # "exists": its own bytes, which a node told to a new master.
        return self.what == "put" and self.outcome in ("stored", "exists")


class JournalWriter:
    """One process's end. A line that was written stays, whatever becomes of the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *fields: object) -> None:
        os.write(self._file, json.dumps(fields).encode() + b"\n")


@dataclass
class Journals:
    """All that was written down in a folder; read it as often as you like."""

    folder: Path
    begun: dict[int, Call] = field(default_factory=dict)
    ended: list[Call] = field(default_factory=list)
    _read: Counter[str] = field(default_factory=Counter)

    def read(self) -> list[Call]:
        """Return the calls that ended since the last time."""
        fresh = []
        for path in sorted(self.folder.iterdir()):
            with path.open("rb") as file:
                file.seek(self._read[path.name])
                lines = file.read()
            whole = lines[: lines.rfind(b"\n") + 1]
            self._read[path.name] += len(whole)
            fresh += [call for line in whole.splitlines() if (call := self._take(line))]
        self.ended += fresh
        return fresh

    def _take(self, line: bytes) -> Call | None:
        kind, number, *fields = json.loads(line)
        if kind == "begin":
            what, name, version, began_s = fields
            self.begun[number] = Call(what=what, name=name, version=version, began_s=began_s)
            return None
        outcome, way, ended_s = fields
        call = self.begun.pop(number)
        return Call(
            what=call.what, name=call.name, version=call.version, began_s=call.began_s,
            ended_s=ended_s, outcome=outcome, way=way,
        )  # fmt: skip

    def calls(self) -> Iterator[Call]:
        """All of them, those that never ended too."""
        yield from self.ended
        yield from self.begun.values()

    def of_names(self) -> dict[str, list[Call]]:
        found = defaultdict(list)
        for call in self.calls():
            found[call.name].append(call)
        return found

    def ways(self) -> Counter[str]:
        """Count how puts were stored."""
        return Counter(call.way for call in self.ended if call.is_stored)


def contradictions(calls: list[Call], *, evicts: bool = False) -> list[str]:
    """Say what cannot be true of the calls of one name.

    Of two puts that stored it, one began after the other ended, or they overlap; either way
    somebody must have removed it in between. A call without a clear end may have done so.
    """
    stored = sorted((c for c in calls if c.is_stored), key=lambda c: c.ended_s)
    removed = [c for c in calls if c.what == "remove" and c.outcome == "True"]
    unclear = [c for c in calls if c.outcome in ("", "raised", "failed")]
    found = []
    if not evicts:
        for first, second in itertools.pairwise(stored):
            since_s, until_s = min(first.began_s, second.began_s), second.ended_s
            between = [*removed, *(c for c in unclear if c.what == "remove")]
            if not any(c.began_s < until_s and c.ended_s > since_s for c in between):
                found.append(f"stored twice: {first} {second}")
        unsure = sum(c.what == "remove" for c in unclear)
        if len(stored) > len(removed) + unsure + 1:
            found.append(f"{len(stored)} stored, {len(removed)} and perhaps {unsure} removed")
    # What was removed comes back with a node that was silent for too long.
    if not evicts and len(removed) > len(stored) + sum(c.what == "put" for c in unclear):
        found.append(f"{len(removed)} removed of {len(stored)} stored")
    if calls and not stored and not unclear and all(c.what == "put" for c in calls):
        outcomes = {c.outcome for c in calls}
        if outcomes <= {"conflict", "in_progress"}:
            found.append(f"nobody stored it: {calls}")
    return found
