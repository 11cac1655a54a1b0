"""Operations on values as steps: names become keys, values become pieces of local memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvstore.client.block_reader import Copied
from kvstore.client.locations import Hit
from kvstore.client.pieces import Pieces
from kvstore.client.put_options import PutOptions, check_group
from kvstore.client.steps import Steps
from kvstore.errors import (
    BlockCorrupt,
    BlockUnreachable,
    InvalidValue,
    KVStoreError,
    LeaseExpired,
)
from kvstore.values.get_result import MISS, GetOutcome, GetResult
from kvstore.values.names import Name, keys_of
from kvstore.values.tensor_header import HEADER_BYTES, TensorHeader
from kvstore.values.values import Part, RegionPiece, Value, parts_of, target_of
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from kvstore.client.client_core import ClientCore
    from kvstore.client.lease_keeper import LeaseKeeper
    from kvstore.values.hot_places import HotPlaces
    from kvstore.values.local_memory import LocalMemory

ATTEMPTS: Final = 3  # a copy that outlasted its lease is begun anew
_ALIGNMENT: Final = 64

_Read = Callable[[Hit, float], Steps[None]]


class ValueOperations:
    """Thread-safe.

    Args:
        core: Operations on blocks.
        memory: Regions of this process's memory.
        leases: Releases what was read.
        hot: Places of blocks that are read again and again.
        namespace: Of the names.
    """

    def __init__(
        self,
        core: ClientCore,
        memory: LocalMemory,
        leases: LeaseKeeper,
        hot: HotPlaces,
        namespace: bytes,
    ) -> None:
        self._core = core
        self._memory = memory
        self._leases = leases
        self._hot = hot
        self._namespace = namespace

    def keys(self, names: Sequence[Name]) -> list[bytes]:
        """Return the keys of names. Raises InvalidKey."""
        return keys_of(names, self._namespace)

    def put(
        self,
        names: Sequence[Name],
        values: Sequence[Value],
        options: PutOptions,
        timeout_s: float | None,
    ) -> Steps[tuple[PutOutcome, ...]]:
        """As `Store.put_batch`."""
        keys = self.keys(names)
        if len(values) != len(keys):
            raise InvalidValue(problem=f"{len(keys)} names, {len(values)} values")
        parts = [parts_of(value) for value in values]
        with ExitStack() as stack:
            placed = self._memory.place(parts, stack, copy=True)
            return (yield from self._core.put(keys, placed.pieces(), options, timeout_s))

    def get(
        self, names: Sequence[Name], timeout_s: float | None, *, hit: Hit | None = None
    ) -> Steps[list[GetResult]]:
        """As `Store.get_batch`; `hit`: what a lookup of the names has just found."""
        keys = self.keys(names)
        results = [MISS] * len(keys)

        def read(hit: Hit, left_s: float) -> Steps[None]:
            room = -(-hit.lengths // _ALIGNMENT) * _ALIGNMENT
            offsets = np.cumsum(room) - room
            with self._core.staging.borrow(int(room.sum())) as region:
                pieces = Pieces.of_blocks(region, offsets, hit.lengths)
                copied = yield from self._core.copy(hit, pieces, left_s)
                self._hot.forget(keys[hit.positions[row]] for row in copied.bad)
                for row, outcome in enumerate(_outcomes(hit, copied)):
                    value, nbytes = None, 0
                    if outcome is GetOutcome.HIT:
                        nbytes = int(hit.lengths[row])
                        value = region.array[offsets[row] : offsets[row] + nbytes].tobytes()
                    results[hit.positions[row]] = GetResult(outcome, value, nbytes)

        yield from self._with_hit(keys, read, timeout_s, hit)
        return results

    def get_into(
        self,
        names: Sequence[Name],
        targets: Sequence[Value],
        timeout_s: float | None,
        *,
        hit: Hit | None = None,
    ) -> Steps[list[GetResult]]:
        """As `Store.get_batch_into`; `hit` as of `get`."""
        keys = self.keys(names)
        if len(targets) != len(keys):
            raise InvalidValue(problem=f"{len(keys)} names, {len(targets)} targets")
        parts = [target_of(target) for target in targets]
        results = [MISS] * len(keys)

        def read(hit: Hit, left_s: float) -> Steps[None]:
            wanted = [
                [_first_bytes(parts[position], nbytes)]
                for position, nbytes in zip(
                    hit.positions.tolist(), hit.lengths.tolist(), strict=True
                )
            ]
            outcomes = yield from self._read_parts(hit, wanted, left_s)
            for row, outcome in enumerate(outcomes):
                nbytes = int(hit.lengths[row]) if outcome is GetOutcome.HIT else 0
                results[hit.positions[row]] = GetResult(outcome, nbytes=nbytes)

        yield from self._with_hit(keys, read, timeout_s, hit)
        return results

    def put_tensor(
        self, name: Name, tensor: torch.Tensor, options: PutOptions, timeout_s: float | None
    ) -> Steps[PutOutcome]:
        """As `Store.put_tensor`."""
        header = TensorHeader.of(tensor).encode()
        outcomes = yield from self.put([name], [[header, tensor]], options, timeout_s)
        return outcomes[0]

    def get_tensor(
        self,
        name: Name,
        target: torch.Tensor | None,
        timeout_s: float | None,
        *,
        hit: Hit | None = None,
    ) -> Steps[torch.Tensor | None]:
        """As `Store.get_tensor`, or `get_tensor_into` if there is a target; `hit` as of `get`."""
        keys = self.keys([name])
        into = None if target is None else target_of(target)
        header = np.zeros(HEADER_BYTES, dtype=np.uint8)
        found: list[tuple[GetOutcome, torch.Tensor]] = []

        def read(hit: Hit, left_s: float) -> Steps[None]:
            nbytes = int(hit.lengths[0]) - HEADER_BYTES
            if nbytes <= 0:
                raise InvalidValue(problem=f"a value of {hit.lengths[0]} bytes is no tensor")
            if into is not None and into.nbytes != nbytes:
                problem = f"a target of {into.nbytes} bytes for a tensor of {nbytes}"
                raise InvalidValue(problem=problem)
            elements = torch.empty(nbytes if into is None else 0, dtype=torch.uint8)
            part: Part = elements.numpy() if into is None else into
            (outcome,) = yield from self._read_parts(hit, [[header, part]], left_s)
            found.append((outcome, elements))

        yield from self._with_hit(keys, read, timeout_s, hit)
        if not found:
            return None
        outcome, elements = found[-1]
        if outcome is not GetOutcome.HIT:
            raise failure(keys[0], outcome)
        if target is None:
            return TensorHeader.read(header).shaped(elements)
        stored, wanted = TensorHeader.read(header), TensorHeader.of(target)
        if stored != wanted:
            raise InvalidValue(problem=f"a target of {wanted} for a tensor of {stored}")
        return target

    def exists(self, names: Sequence[Name], timeout_s: float | None) -> Steps[list[bool]]:
        """As `Store.exists_batch`."""
        return (yield from self._core.exists(self.keys(names), timeout_s))

    def remove(self, names: Sequence[Name], group: str, timeout_s: float | None) -> Steps[int]:
        """As `Store.remove_batch`."""
        keys = self._core.names(self.keys(names))
        check_group(group)
        self._hot.forget(keys, everything=bool(group))
        return (yield from self._core.writing.remove(keys, group=group, timeout_s=timeout_s))

    def _with_hit(
        self,
        keys: Sequence[bytes],
        read: _Read,
        timeout_s: float | None,
        hit: Hit | None = None,
    ) -> Steps[None]:
        """Look up, read what is there, and let it go; again if the lease ended meanwhile."""
        deadline_s = self._core.deadline(timeout_s)
        for attempt in range(ATTEMPTS):
            if hit is None:
                left_s = self._core.left(deadline_s)
                hit = yield from self._core.lookup(keys, every=True, timeout_s=left_s)
            if not hit.num_blocks:
                return
            try:
                return (yield from read(hit, self._core.left(deadline_s)))
            except LeaseExpired:
                if attempt == ATTEMPTS - 1:
                    raise
            finally:
                self._leases.drop(hit.lease)
            hit = None

    def _read_parts(
        self, hit: Hit, wanted: Sequence[Sequence[Part]], left_s: float
    ) -> Steps[list[GetOutcome]]:
        with ExitStack() as stack:
            placed = self._memory.place(wanted, stack, copy=False)
            copied = yield from self._core.copy(hit, placed.pieces(), left_s)
            outcomes = _outcomes(hit, copied)
            placed.copy_out([outcome is GetOutcome.HIT for outcome in outcomes])
            return outcomes


def failure(key: bytes, outcome: GetOutcome) -> KVStoreError:
    """Return the error of a get that found a block and could not have it."""
    if outcome is GetOutcome.CORRUPT:
        return BlockCorrupt(key=key)
    assert outcome is GetOutcome.UNREACHABLE, outcome
    return BlockUnreachable(key=key)


def got(key: bytes, result: GetResult) -> GetResult:
    """Return a hit or a miss; raise what else became of a get of this key."""
    if result.outcome in (GetOutcome.HIT, GetOutcome.MISS):
        return result
    raise failure(key, result.outcome)


def _outcomes(hit: Hit, copied: Copied) -> list[GetOutcome]:
    outcomes = [GetOutcome.HIT] * hit.num_blocks
    for row in copied.unreached:
        outcomes[row] = GetOutcome.UNREACHABLE
    for row in copied.corrupt:
        outcomes[row] = GetOutcome.CORRUPT
    return outcomes


def _first_bytes(part: Part, nbytes: int) -> Part:
    if part.nbytes < nbytes:
        raise InvalidValue(problem=f"a target of {part.nbytes} bytes for a value of {nbytes}")
    if isinstance(part, RegionPiece):
        return RegionPiece(part.region, part.offset, nbytes)
    return part[:nbytes]
