"""The store against a dictionary: random operations of two clients, real engines, a real master.

In a roomy pool the two agree exactly. In a tight one a value may be gone, but is never another,
and what is pinned stays. After each run every byte of the pool is accounted for.
"""

from __future__ import annotations

import itertools
import random
import secrets
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from configs.kvstore_policies import PolicyConfig
from configs.schema import TransferBackend, TransferConfig
from kvstore import GetOutcome, Pieces, Pin, PutOptions, PutOutcome, RegionPiece, Store
from kvstore.values.value_view import ValueView
from tests.support.store_pool import Pool
from tests.support.waits import eventually
from transfer import allocate

STEPS = 250
NAMES = 40
SIZES = (1, 63, 64, 65, 1000, 4096, 20_000)
CHUNKS = (0, 64, 1000, 4096)
SLOT = 1 << 15
AREA = 8 * SLOT
VIEWS_MAX = 3


class Side:
    """One client with registered memory of its own."""

    def __init__(self, pool: Pool, stack: ExitStack, backend: TransferBackend) -> None:
        self.store: Store = pool.connect(transfer=TransferConfig(backend=backend))
        self.maps = backend is not TransferBackend.TCP
        memory = allocate(AREA)
        stack.callback(memory.close)
        self.region = self.store.register(memory)


class Model:
    """What the pool should hold, and every operation as done to both."""

    def __init__(self, rng: random.Random, sides: list[Side], *, tight: bool) -> None:
        self.rng = rng
        self.sides = sides
        self.tight = tight
        self.values: dict[bytes, tuple[bytes, int]] = {}  # key -> bytes, chunk_bytes
        self.removed: dict[bytes, set[bytes]] = {}  # what a client may still have leases on
        self.pinned: set[bytes] = set()
        self.keys = [rng.randbytes(16) for _ in range(NAMES)]
        self.views: list[tuple[Any, ValueView, bytes]] = []  # open ones

    def step(self) -> None:
        operations = (
            self.put, self.put, self.put_batch, self.get, self.get_batch, self.get_into,
            self.get_ranges, self.prefix, self.exists, self.remove, self.open_view, self.end_view,
        )  # fmt: skip
        self.rng.choice(operations)(self.rng.choice(self.sides))

    # -- operations ---------------------------------------------------------------------------

    def put(self, side: Side) -> None:
        key, data, chunk = self.some_key(), self.some_bytes(), self.rng.choice(CHUNKS)
        pin = Pin.HARD if self.rng.random() < 0.05 and len(self.pinned) < 3 else Pin.NONE
        options = PutOptions(chunk_bytes=chunk, pin=pin)
        outcome = side.store.put(key, self.some_shape(side, data), options=options)
        self.expect_put(key, data, chunk, outcome, pinned=pin is Pin.HARD)

    def put_batch(self, side: Side) -> None:
        keys = self.rng.sample(self.keys, self.rng.randint(1, 8))
        data, chunk = [self.some_bytes() for _ in keys], self.rng.choice(CHUNKS)
        values = [self.some_shape(side, item, i) for i, item in enumerate(data)]
        outcomes = side.store.put_batch(keys, values, options=PutOptions(chunk_bytes=chunk))
        for key, item, outcome in zip(keys, data, outcomes, strict=True):
            self.expect_put(key, item, chunk, outcome)

    def get(self, side: Side) -> None:
        key = self.some_key()
        found = side.store.get(key)
        if found is not None and found in self.removed.get(key, set()):
            return  # a lease that this client had before another removed it
        self.expect_found(key, found)

    def get_batch(self, side: Side) -> None:
        keys = self.rng.choices(self.keys, k=self.rng.randint(1, 10))
        for key, result in zip(keys, side.store.get_batch(keys), strict=True):
            assert result.outcome in (GetOutcome.HIT, GetOutcome.MISS)
            self.expect_found(key, result.value)

    def get_into(self, side: Side) -> None:
        keys = self.rng.sample(self.keys, self.rng.randint(2, 6))
        targets = [self.some_target(side, i) for i in range(len(keys))]
        results = side.store.get_batch_into(keys, targets)
        for key, target, result in zip(keys, targets, results, strict=True):
            found = bytes(as_array(target)[: result.nbytes]) if result else None
            self.expect_found(key, found)

    def get_ranges(self, side: Side) -> None:
        """Random pieces of several blocks at once, scattered over registered memory."""
        keys = self.rng.sample(self.keys, self.rng.randint(1, 5))
        client = side.store.client
        hit = client.lookup(keys)
        rows = self.some_ranges(hit)
        if rows:
            columns = np.array(rows, dtype=np.int64).T
            pieces = Pieces(
                regions=(side.region,),
                region_idx=np.zeros(len(rows), dtype=np.int64),
                blocks=columns[0].copy(),
                starts=columns[1].copy(),
                offsets=columns[2].copy(),
                lengths=columns[3].copy(),
            )
            copied = client.copy(hit, pieces)
            assert not copied.bad
            for block, start, offset, nbytes in rows:
                data, _ = self.values[hit.keys[block]]
                found = side.region.array[offset : offset + nbytes].tobytes()
                assert found == data[start : start + nbytes], (block, start, nbytes)
        found = {keys[i] for i in hit.positions.tolist()}
        client.release(hit)
        for key in keys:
            self.expect_there(key, key in found)

    def prefix(self, side: Side) -> None:
        keys = self.rng.sample(self.keys, self.rng.randint(1, 8))
        client = side.store.client
        with client.hold(client.lookup_prefix(keys)) as held:
            run = held.hit.num_blocks
            expected = next((i for i, key in enumerate(keys) if key not in self.values), len(keys))
            assert run == expected or (self.tight and run < expected)
            room = -(-held.hit.lengths // 64) * 64
            good = client.get_into(held.hit, side.region, np.cumsum(room) - room)
            assert good == run
        for key in keys[:run]:
            assert key in self.values

    def open_view(self, side: Side) -> None:
        """Look at a value in place, through some of the steps that follow."""
        key = self.some_key()
        viewing = side.store.view(key)
        view = viewing.__enter__()
        if view is None:
            self.expect_there(key, False)
            return
        assert view.in_place is side.maps
        data = bytes(view.memory)
        if data not in self.removed.get(key, set()):
            self.expect_found(key, data)
        self.views.append((viewing, view, data))
        if len(self.views) > VIEWS_MAX:
            self.end_view(side)

    def end_view(self, side: Side) -> None:
        del side
        if self.views:
            viewing, view, data = self.views.pop(self.rng.randrange(len(self.views)))
            assert view.memory == data, "what is viewed stays as it was"
            viewing.__exit__(None, None, None)

    def exists(self, side: Side) -> None:
        keys = self.rng.sample(self.keys, 5)
        for key, there in zip(keys, side.store.exists_batch(keys), strict=True):
            self.expect_there(key, there)

    def remove(self, side: Side) -> None:
        key = self.some_key()
        there = side.store.remove(key)
        self.expect_there(key, there)
        data, _ = self.values.pop(key, (b"", 0))
        self.removed.setdefault(key, set()).add(data)
        self.pinned.discard(key)

    # -- what must be -------------------------------------------------------------------------

    def expect_put(
        self, key: bytes, data: bytes, chunk: int, outcome: PutOutcome, *, pinned: bool = False
    ) -> None:
        known = self.values.get(key)
        if known is None:
            allowed = {PutOutcome.STORED}
        elif known == (data, chunk):
            allowed = {PutOutcome.EXISTS}
        else:
            allowed = {PutOutcome.CONFLICT}
            if known[0] == data:  # in other parts; if it is one part either way, nothing differs
                allowed.add(PutOutcome.EXISTS)
        if self.tight and key not in self.pinned:
            allowed |= {PutOutcome.STORED, PutOutcome.NO_SPACE}
        assert outcome in allowed, (outcome, allowed)
        if outcome is PutOutcome.STORED:
            if known is not None:
                self.removed.setdefault(key, set()).add(known[0])
            self.values[key] = data, chunk
        elif outcome is PutOutcome.NO_SPACE and known is not None:
            self.removed.setdefault(key, set()).add(known[0])
            del self.values[key]
        if pinned and outcome in (PutOutcome.STORED, PutOutcome.EXISTS):
            self.pinned.add(key)

    def expect_found(self, key: bytes, found: bytes | None) -> None:
        self.expect_there(key, found is not None)
        if found is not None:
            assert found == self.values[key][0]

    def expect_there(self, key: bytes, there: bool) -> None:
        if there or not self.tight or key in self.pinned:
            assert there == (key in self.values)

    # -- random things ------------------------------------------------------------------------

    def some_key(self) -> bytes:
        return self.rng.choice(self.keys)

    def some_bytes(self) -> bytes:
        # Often the same bytes again, so that EXISTS and CONFLICT both come.
        return random.Random(self.rng.randint(0, 2)).randbytes(self.rng.choice(SIZES))

    def some_shape(self, side: Side, data: bytes, slot: int = 0):
        array = np.frombuffer(data, dtype=np.uint8)
        kind = self.rng.randint(0, 4)
        if kind == 0:
            return data
        if kind == 1:
            return torch.from_numpy(array.copy())
        if kind == 2 and len(data) > 2:
            cut = self.rng.randint(1, len(data) - 1)
            return [data[:cut], array[cut:].copy()]
        if kind == 3:
            offset = slot * SLOT + self.rng.randint(0, SLOT - len(data))
            side.region.array[offset : offset + len(data)] = array
            return RegionPiece(side.region, offset, len(data))
        return bytearray(data)

    def some_target(self, side: Side, index: int):
        nbytes = max(SIZES) + self.rng.randint(0, 50)
        kind = self.rng.randint(0, 2)
        if kind == 0:
            return bytearray(nbytes)
        if kind == 1:
            return torch.empty(nbytes, dtype=torch.uint8)
        return side.region.tensor[index * SLOT : index * SLOT + nbytes]

    def some_ranges(self, hit) -> list[tuple[int, int, int, int]]:
        rows, offset = [], 0
        for block in range(hit.num_blocks):
            length, chunk = int(hit.lengths[block]), int(hit.chunk_bytes[block])
            cuts = {self.rng.randint(0, length) for _ in range(self.rng.choice((0, 2, 4)))}
            if chunk:
                cuts |= {c for c in range(0, length, chunk) if self.rng.random() < 0.3}
            if self.rng.random() < 0.3:
                cuts |= {0, length}
            ordered = sorted(cuts)
            for start, end in itertools.pairwise(ordered):
                if end > start and self.rng.random() < 0.8:
                    rows.append((block, start, offset, end - start))
                    offset += end - start + self.rng.randint(0, 3)
        return rows


def as_array(target) -> np.ndarray:
    return target.numpy() if isinstance(target, torch.Tensor) else np.frombuffer(target, np.uint8)


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_the_store_is_a_dictionary(tight, backend):
    compare(backend, tight=tight, masters=1)


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_with_several_masters_too(tight):
    compare(TransferBackend.SHARED_MEMORY, tight=tight, masters=3)


def compare(backend: TransferBackend, *, tight: bool, masters: int) -> None:
    seed = secrets.randbits(32)
    with ExitStack() as stack:
        segment_bytes = (1 << 17 if tight else 4 << 20) * masters
        pool = Pool(
            stack,
            nodes=2,
            masters=masters,
            segment_bytes=segment_bytes,
            lease_s=5.0,
            policies=PolicyConfig(),  # blocks are moved between the nodes meanwhile
        )
        sides = [Side(pool, stack, backend) for _ in range(2)]
        model = Model(random.Random(seed), sides, tight=tight)
        for number in range(STEPS):
            try:
                model.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {number}: {error}") from error
        for _ in range(VIEWS_MAX):
            model.end_view(sides[0])
        for master in pool.masters:
            master.check_invariants()
            figures = master.statistics()
            assert figures.open_puts == figures.quarantined_bytes == 0, seed
            assert figures.corrupt_blocks == figures.unreachable_blocks == 0, seed
        for side in sides:
            side.store.remove_batch(model.keys)
            side.store.close()

        def all_free() -> bool:
            for master in pool.masters:
                master.check_invariants()
            figures = [master.statistics() for master in pool.masters]
            return all(f.leases == 0 and f.free_bytes == f.capacity_bytes for f in figures)

        eventually(all_free, f"every byte is free again, seed {seed}")
