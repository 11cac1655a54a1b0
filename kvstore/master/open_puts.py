"""Puts between allocation and commit, and the extents of those that ended badly.

A put holds its key: nobody else writes the same block meanwhile. It loses the key, and its extent
goes to quarantine, when its writer is fenced, is too slow, or gives up without knowing whether
its bytes are still under way. Quarantine ends when the writer itself says that the write is over
(it answers for its own engine), or when its incarnation is certainly dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import InvariantViolated
from kvstore.master.block import Extent, ExtentState


class PutId(NamedTuple):
    """Names one put: chosen by the client, so that a lost reply loses nothing."""

    client: str
    batch: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPut:
    """One block being written."""

    put_id: PutId
    extent: Extent
    checksum: int
    pinned: bool
    opened_s: float


class OpenPuts:
    """The puts under way and in quarantine. Not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[PutId, OpenPut] = {}  # in the order of opening
        self._quarantined: dict[PutId, OpenPut] = {}
        self._holders: dict[bytes, PutId] = {}

    def __len__(self) -> int:
        return len(self._open)

    def holds(self, key: bytes) -> bool:
        """Tell whether somebody is writing this block now."""
        return key in self._holders

    def find(self, put_id: PutId) -> OpenPut | None:
        """Return an open put."""
        return self._open.get(put_id)

    def add(self, put: OpenPut) -> None:
        """Enter a put whose extent was just allocated."""
        assert put.put_id not in self._open, put
        assert put.extent.key not in self._holders, put
        assert put.extent.state is ExtentState.OPEN, put
        self._open[put.put_id] = put
        self._holders[put.extent.key] = put.put_id

    def take(self, put_id: PutId) -> OpenPut | None:
        """Remove a put that its writer ended, from quarantine too; None if it is unknown."""
        put = self._open.get(put_id)
        if put is not None:
            self._forget(put)
            return put
        return self._quarantined.pop(put_id, None)

    def quarantine(self, put_id: PutId) -> None:
        """Take the key from a put and put its extent beyond use. Unknown puts are ignored."""
        put = self._open.get(put_id)
        if put is None:
            return
        self._forget(put)
        if put.extent.state is ExtentState.OPEN:  # else it was lost with its node
            put.extent.become(ExtentState.QUARANTINED)
            self._quarantined[put_id] = put

    def lose(self, extents: set[Extent]) -> None:
        """Forget the extents of a lost node; their writers find out when they commit."""
        for put_id in [p for p, put in self._quarantined.items() if put.extent in extents]:
            del self._quarantined[put_id]
        for put in [put for put in self._open.values() if put.extent in extents]:
            self._forget(put)

    def of_client(self, client: str) -> list[PutId]:
        """Puts of one client, open or in quarantine."""
        return [put_id for put_id in self._all_ids() if put_id.client == client]

    def of_batch(self, client: str, batch: int) -> list[PutId]:
        """Puts of one batch, open or in quarantine."""
        return [put_id for put_id in self.of_client(client) if put_id.batch == batch]

    def opened_before(self, deadline_s: float) -> list[PutId]:
        """Open puts older than this."""
        late = []
        for put in self._open.values():
            if put.opened_s >= deadline_s:
                break
            late.append(put.put_id)
        return late

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless keys, puts and extents agree."""
        held = {put.extent.key: put_id for put_id, put in self._open.items()}
        if held != self._holders or len(held) != len(self._open):
            self._fail("the keys held are not those of the open puts")
        for puts, state in (
            (self._open, ExtentState.OPEN),
            (self._quarantined, ExtentState.QUARANTINED),
        ):
            for put in puts.values():
                if put.extent.state is not state:
                    self._fail(f"{put.put_id} should be {state}, is {put.extent.state}")

    def extents(self) -> set[Extent]:
        """All extents that a writer may still write into."""
        return {put.extent for puts in (self._open, self._quarantined) for put in puts.values()}

    def _all_ids(self) -> Iterator[PutId]:
        yield from self._open
        yield from self._quarantined

    def _forget(self, put: OpenPut) -> None:
        del self._open[put.put_id]
        del self._holders[put.extent.key]

    @staticmethod
    def _fail(problem: str) -> None:
        raise InvariantViolated(where="OpenPuts", problem=problem)
