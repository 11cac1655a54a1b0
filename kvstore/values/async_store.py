"""`Store` for asyncio: the same operations, awaited; any number of them at once.

async with AsyncStore(store) as pool:
    values = await asyncio.gather(*(pool.get(name) for name in names))
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvstore.client.async_driver import AsyncDriver
from kvstore.client.block_view import BlockView, open_blocks
from kvstore.client.locations import Hit
from kvstore.client.pieces import IntsLike, Pieces
from kvstore.client.put_options import DEFAULT, PutOptions
from kvstore.client.steps import Steps
from kvstore.timeouts import check_timeout
from kvstore.values.get_result import GetOutcome, GetResult
from kvstore.values.names import Name, key_of
from kvstore.values.value_operations import got
from kvstore.values.value_view import TensorView, ValueView
from kvstore.values.values import Part, Value, nbytes_of, parts_of, target_of
from kvstore.values.viewing import AsyncViewing
from kvstore.values.views import TENSOR, VALUE, VIEW_S_MAX
from kvstore.wire.messages import PutOutcome

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from kvstore.values.plain_puts import Written
    from kvstore.values.store import Store
    from transfer import Region


class AsyncStore:
    """Belongs to one event loop at a time. Requests to a master take turns, bytes move all at once.

    The short ways of `Store` are here too: hot values are copied at once, single puts are posted
    (up to 256 KiB by the loop itself, larger ones by a thread), or take one request. Requests to a
    master of this host are made by the loop, others by a thread.

    A call that is cancelled raises CancelledError once it has ended, by its deadline at the
    latest: nothing reads or writes the caller's memory after that. Errors are those of `Store`.

    Args:
        store: Belongs to the caller, who closes it after this.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._operations = store.operations
        self._driver = AsyncDriver(store.client.driver)
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def close(self) -> None:
        """End the threads; no call may be under way."""
        self._driver.close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def put(
        self,
        name: Name,
        value: Value,
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> PutOutcome:
        """As `Store.put`."""
        check_timeout(timeout_s)
        store, started_s = self._store, time.monotonic()
        outcome: PutOutcome | Written | None = None
        key, parts = key_of(name, store.namespace), parts_of(value)
        if len(parts) == 1 and store.quick_writes.expects(nbytes_of(parts), options):
            async with self._turn_of_puts():
                left_s = None
                if timeout_s is not None:
                    left_s = max(0.001, timeout_s - (time.monotonic() - started_s))
                outcome = await self._put_quickly(key, parts[0], options, left_s)
            await self._driver.give_way()
        if not isinstance(outcome, PutOutcome):
            outcome = None
        if outcome is None or outcome is PutOutcome.FAILED:
            slow = store.put_slowly(key, parts, options, timeout_s, started_s, outcome)
            return await self._driver.run(slow)
        return outcome

    def _turn_of_puts(self) -> asyncio.Lock:
        """Short puts take turns: the reply to one brings the place of the next."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        return self._turn[1]

    async def _put_quickly(
        self, key: bytes, part: Part, options: PutOptions, timeout_s: float | None
    ) -> PutOutcome | Written | None:
        quick = self._store.quick_writes
        outcome = await self._driver.run_here(quick.put_steps(key, part, options, timeout_s))
        if outcome is None:
            outcome = await self._driver.call(lambda: quick.put(key, part, options, timeout_s))
        return outcome

    async def put_batch(
        self,
        names: Sequence[Name],
        values: Sequence[Value],
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> tuple[PutOutcome, ...]:
        """As `Store.put_batch`."""
        return await self._driver.run(self._operations.put(names, values, options, timeout_s))

    async def put_tensor(
        self,
        name: Name,
        tensor: torch.Tensor,
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> PutOutcome:
        """As `Store.put_tensor`."""
        steps = self._operations.put_tensor(name, tensor, options, timeout_s)
        return await self._driver.run(steps)

    async def get(self, name: Name, *, timeout_s: float | None = None) -> bytes | None:
        """As `Store.get`."""
        check_timeout(timeout_s)
        quick, key = self._store.quick_reads, key_of(name, self._store.namespace)
        value = quick.get_here(key)
        if value is not None:
            return value
        found = await self._driver.run(quick.get_steps(key, timeout_s))
        if not isinstance(found, Hit):
            return found
        steps = self._operations.get([key], timeout_s, hit=found)
        (result,) = await self._driver.run(steps)
        return got(key, result).value

    def view(
        self, name: Name, *, max_s: float = VIEW_S_MAX, timeout_s: float | None = None
    ) -> AsyncViewing[ValueView]:
        """As `Store.view`, for an `async with` block."""
        check_timeout(timeout_s)
        check_timeout(max_s, "max_s")
        views, key = self._store.views, key_of(name, self._store.namespace)

        async def begin() -> ValueView | None:
            view = views.open_here(key, VALUE, max_s)
            if view is not None:
                return view
            return await self._driver.run(views.value_steps(key, max_s, timeout_s))

        return AsyncViewing(begin)

    def view_tensor(
        self, name: Name, *, max_s: float = VIEW_S_MAX, timeout_s: float | None = None
    ) -> AsyncViewing[TensorView]:
        """As `Store.view_tensor`, for an `async with` block."""
        check_timeout(timeout_s)
        check_timeout(max_s, "max_s")
        views, key = self._store.views, key_of(name, self._store.namespace)

        async def begin() -> TensorView | None:
            view = views.open_here(key, TENSOR, max_s)
            if view is not None:
                return view
            return await self._driver.run(views.tensor_steps(key, max_s, timeout_s))

        return AsyncViewing(begin)

    async def get_batch(
        self, names: Sequence[Name], *, timeout_s: float | None = None
    ) -> list[GetResult]:
        """As `Store.get_batch`."""
        return await self._driver.run(self._operations.get(names, timeout_s))

    async def get_into(
        self, name: Name, target: Value, *, timeout_s: float | None = None
    ) -> int | None:
        """As `Store.get_into`."""
        check_timeout(timeout_s)
        store, key, part = self._store, key_of(name, self._store.namespace), target_of(target)
        piece = store.registered(part)
        found = await self._driver.run(
            store.quick_reads.get_into_steps(key, part, piece, timeout_s)
        )
        if found is None or isinstance(found, int):
            return found
        steps = self._operations.get_into([key], [target], timeout_s, hit=found)
        (result,) = await self._driver.run(steps)
        return got(key, result).nbytes if result.outcome is not GetOutcome.MISS else None

    async def get_batch_into(
        self, names: Sequence[Name], targets: Sequence[Value], *, timeout_s: float | None = None
    ) -> list[GetResult]:
        """As `Store.get_batch_into`."""
        return await self._driver.run(self._operations.get_into(names, targets, timeout_s))

    async def get_tensor(
        self, name: Name, *, timeout_s: float | None = None
    ) -> torch.Tensor | None:
        """As `Store.get_tensor`."""
        return await self._driver.run(self._operations.get_tensor(name, None, timeout_s))

    async def get_tensor_into(
        self, name: Name, target: torch.Tensor, *, timeout_s: float | None = None
    ) -> bool:
        """As `Store.get_tensor_into`."""
        steps = self._operations.get_tensor(name, target, timeout_s)
        return await self._driver.run(steps) is not None

    async def exists(self, name: Name, *, timeout_s: float | None = None) -> bool:
        """As `Store.exists`."""
        return (await self.exists_batch([name], timeout_s=timeout_s))[0]

    async def exists_batch(
        self, names: Sequence[Name], *, timeout_s: float | None = None
    ) -> list[bool]:
        """As `Store.exists_batch`."""
        return await self._driver.run(self._operations.exists(names, timeout_s))

    async def remove(self, name: Name, *, timeout_s: float | None = None) -> bool:
        """As `Store.remove`."""
        return await self.remove_batch([name], timeout_s=timeout_s) > 0

    async def remove_batch(
        self, names: Sequence[Name], *, group: str = "", timeout_s: float | None = None
    ) -> int:
        """As `Store.remove_batch`."""
        return await self._driver.run(self._operations.remove(names, group, timeout_s))

    # -- blocks in registered memory ----------------------------------------------------------

    async def lookup_prefix(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> Hit:
        """As `StoreClient.lookup_prefix`; hold or release the hit with the client."""
        core = self._store.client.core
        return await self._driver.run(core.lookup(keys, every=False, timeout_s=timeout_s))

    def view_blocks(
        self, hit: Hit, *, max_s: float = VIEW_S_MAX, timeout_s: float | None = None
    ) -> AsyncViewing[BlockView]:
        """As `StoreClient.view`, for an `async with` block."""
        check_timeout(timeout_s)
        check_timeout(max_s, "max_s")
        client = self._store.client
        steps = open_blocks(client.core, client.segments, client.leases, hit, max_s, timeout_s)
        return AsyncViewing(lambda: self._driver.run(steps))

    async def get_ranges(
        self,
        hit: Hit,
        region: Region,
        offsets: IntsLike,
        *,
        start: int = 0,
        nbytes: int | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As `StoreClient.get_ranges`; without `nbytes`, as `StoreClient.get_into`."""
        lengths = hit.lengths if nbytes is None else np.full_like(hit.lengths, nbytes)
        pieces = Pieces.of_blocks(region, offsets, lengths)
        pieces = pieces.starting_at(np.full_like(hit.lengths, start))
        return await self._driver.run(self._num_good(hit, pieces, timeout_s))

    async def put_blocks(
        self,
        keys: Sequence[bytes],
        pieces: Pieces,
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> tuple[PutOutcome, ...]:
        """As `StoreClient.put_pieces`."""
        core = self._store.client.core
        return await self._driver.run(core.put(keys, pieces, options, timeout_s))

    def _num_good(self, hit: Hit, pieces: Pieces, timeout_s: float | None) -> Steps[int]:
        return (yield from self._store.client.core.copy(hit, pieces, timeout_s)).num_good
