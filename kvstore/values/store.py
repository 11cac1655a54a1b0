"""The pool as a dictionary of values: put, get, get_into, exists, remove, of one and of many.

    with Store.connect(address, secret=secret) as store:
        store.put("name", b"value")        -> PutOutcome
        store.get("name")                  -> b"value", or None if it is not there

Names are of up to `NAME_BYTES_MAX` bytes, or keys of 16 bytes such as those of `prefix_keys`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from configs.schema import KVStoreConfig, TransferConfig
from kvstore.client.locations import Hit
from kvstore.client.put_options import DEFAULT, PutOptions
from kvstore.client.steps import Steps
from kvstore.client.store_client import NOBODY, StoreClient
from kvstore.client.tenant import Tenant
from kvstore.discovery.directory import as_directory
from kvstore.discovery.finding import directory_of, followed
from kvstore.keys import block_namespace
from kvstore.timeouts import check_timeout
from kvstore.values.get_result import GetOutcome, GetResult
from kvstore.values.local_memory import LocalMemory
from kvstore.values.names import Name, key_of
from kvstore.values.value_operations import ValueOperations, got
from kvstore.values.value_view import TensorView, ValueView
from kvstore.values.values import Part, RegionPiece, Value, nbytes_of, parts_of, target_of
from kvstore.values.viewing import Viewing
from kvstore.values.views import TENSOR, VALUE, VIEW_S_MAX, Views
from kvstore.wire.messages import Pin, PutOutcome
from transfer import TransferEngine

if TYPE_CHECKING:
    import torch

    from kvstore.discovery.directory import MasterDirectory
    from transfer import Memory, Region

VALUES: Final = block_namespace("values", "bytes", "named")


class Store:
    """Values of any kind by name, over a `StoreClient`. Thread-safe; every call has a deadline.

    All may raise MasterUnavailable (retryable: nothing answered in time), Fenced, TenantRefused,
    InvalidKey and InvalidValue.

    Args:
        client: Access to the pool.
        namespace: Names of other namespaces are other names.
    """

    def __init__(self, client: StoreClient, *, namespace: bytes = VALUES) -> None:
        self.client = client
        self.namespace = namespace
        self._memory = LocalMemory(client.core.engine, client.core.staging)
        self.quick_reads = client.quick_reads()
        self.quick_writes = client.quick_writes()
        self.operations = ValueOperations(
            client.core, self._memory, client.leases, self.quick_reads.hot, namespace
        )
        self.views = Views(
            client.core, client.segments, client.leases, self.quick_reads, self.operations
        )
        self._stack = ExitStack()

    @classmethod
    def connect(
        cls,
        masters: str | Sequence[str] | MasterDirectory | None = None,
        *,
        secret: bytes,
        config: KVStoreConfig | None = None,
        transfer: TransferConfig | None = None,
        tenant: Tenant = NOBODY,
    ) -> Store:
        """Open an engine and a client of its own; `close` ends both.

        Args:
            masters: As of `StoreClient`. None: where `config.masters` says, which names addresses
                or an etcd; its records are followed until `close`.
            secret: The cluster secret.
            config: The store's knobs.
            transfer: Those of the engine.
            tenant: For whom the store acts.

        Raises:
            ValueError: Nothing says where a master is, or something that is no address.
        """
        config = config or KVStoreConfig()
        directory = directory_of(config.masters) if masters is None else as_directory(masters)
        name = secrets.token_hex(8)
        engine = TransferEngine(transfer or TransferConfig(), name=name, secret=secret)
        client = StoreClient(engine, directory, config, secret=secret, tenant=tenant)

        engine.on_notify(client.on_notify)
        with ExitStack() as stack:
            if masters is None:
                stack.enter_context(followed(directory))
            stack.enter_context(engine)
            stack.enter_context(client)
            store = cls(client)
            store._stack = stack.pop_all()
        return store

    def close(self) -> None:
        """Let go of everything; the client too if `connect` made it."""
        self.quick_reads.hot.close()
        self._memory.close()
        self._stack.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def register(self, memory: Memory | torch.Tensor) -> Region:
        """Register memory once: values and targets inside of it move without copies from then on.

        It must outlive the store, or `release`.
        """
        return self._memory.register(memory)

    def registered(self, part: Part) -> RegionPiece | None:
        """Return where bytes are in a region that was registered; None if they are in none."""
        return self._memory.registered(part)

    def release(self, region: Region) -> None:
        """Undo `register`."""
        self._memory.release(region)

    # -- writing ------------------------------------------------------------------------------

    def put(
        self,
        name: Name,
        value: Value,
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> PutOutcome:
        """Store one value; see `put_batch`."""
        check_timeout(timeout_s)
        key, parts = key_of(name, self.namespace), parts_of(value)
        started_s = time.monotonic()
        outcome = self.put_quickly(key, parts, options, timeout_s)
        if outcome is None or outcome is PutOutcome.FAILED:
            steps = self.put_slowly(key, parts, options, timeout_s, started_s, outcome)
            return self.client.driver.run(steps)
        return outcome

    def put_quickly(
        self, key: bytes, parts: list[Part], options: PutOptions, timeout_s: float | None
    ) -> PutOutcome | None:
        """Put one value the short way, in this thread; see `QuickWrites.put`."""
        if len(parts) > 1:
            return None
        return self.quick_writes.put(key, parts[0], options, timeout_s)

    def put_slowly(
        self,
        key: bytes,
        parts: list[Part],
        options: PutOptions,
        timeout_s: float | None,
        started_s: float,
        outcome: PutOutcome | None,
    ) -> Steps[PutOutcome]:
        """Put it the long way, after the short one has given this outcome."""
        if timeout_s is not None:
            timeout_s -= time.monotonic() - started_s
        (found,) = yield from self.operations.put([key], [parts], options, timeout_s)
        again = outcome is PutOutcome.FAILED
        return self.quick_writes.learn(nbytes_of(parts), options, found, again=again)

    def put_batch(
        self,
        names: Sequence[Name],
        values: Sequence[Value],
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> tuple[PutOutcome, ...]:
        """Store values, each whole or not at all.

        A value is anything with contiguous bytes, a `RegionPiece`, or a list of those, whose
        bytes are then one value. It must not change until the call returns. Values are
        write-once: a name that is taken says `EXISTS` if the bytes are equal, else `CONFLICT`,
        and keeps what it has.

        Returns:
            What became of each, in order; see `PutOutcome`.
        """
        self.client.posts.generation()  # a box is opened here, where it may be waited for
        steps = self.operations.put(names, values, options, timeout_s)
        return self.client.driver.run(steps)

    def put_tensor(
        self,
        name: Name,
        tensor: torch.Tensor,
        *,
        options: PutOptions = DEFAULT,
        timeout_s: float | None = None,
    ) -> PutOutcome:
        """Store a tensor with its type and shape. A part of what the value is: see `put_batch`."""
        steps = self.operations.put_tensor(name, tensor, options, timeout_s)
        return self.client.driver.run(steps)

    def remove(self, name: Name, *, timeout_s: float | None = None) -> bool:
        """Forget one value, a pinned one too; False if it was not there."""
        return self.remove_batch([name], timeout_s=timeout_s) > 0

    def remove_batch(
        self, names: Sequence[Name], *, group: str = "", timeout_s: float | None = None
    ) -> int:
        """Forget values, by name and by group; return how many were there.

        Who holds a lease on one can still read it until that ends.
        """
        return self.client.driver.run(self.operations.remove(names, group, timeout_s))

    def set_pin(
        self,
        names: Sequence[Name],
        pin: Pin,
        *,
        pin_s: float = 0.0,
        group: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Pin values, or let them go (`Pin.NONE`), by name and by group; see `PutOptions`."""
        keys = self.operations.keys(names)
        return self.client.set_pin(keys, pin, pin_s=pin_s, group=group, timeout_s=timeout_s)

    # -- reading ------------------------------------------------------------------------------

    def get(self, name: Name, *, timeout_s: float | None = None) -> bytes | None:
        """Return a value's bytes, verified; None if it is not there.

        A value that is read again within the time of a lease is read without the master, and
        thus found for so long even if somebody else removes it.

        Raises:
            BlockCorrupt: No copy had the right bytes; it is gone now.
            BlockUnreachable: It is there, but not within reach (retryable).
            LeaseExpired: Copying takes longer than a lease (retryable).
        """
        if timeout_s is not None:  # a hot value takes 3 us: no call for nothing
            check_timeout(timeout_s)
        key = key_of(name, self.namespace)
        found = self.quick_reads.get(key, timeout_s)
        if not isinstance(found, Hit):
            return found
        steps = self.operations.get([key], timeout_s, hit=found)
        (result,) = self.client.driver.run(steps)
        return got(key, result).value

    def view(
        self, name: Name, *, max_s: float = VIEW_S_MAX, timeout_s: float | None = None
    ) -> Viewing[ValueView]:
        """Read a value where it lies, without a copy of it; for a `with` block.

            with store.view("name") as value:  # None if it is not there
                gpu.copy_from(value.memory)    # a read-only memoryview, verified

        Its place is leased until the block ends, and longer if something that was made of
        `value.memory` lives on. What is not in memory that is mapped here (of another host, on a
        disk, over tcp) is copied into memory of its own, as `value.in_place` says. A client holds
        at most `kvstore.view_bytes` in place: nobody else can have that space meanwhile.

        Args:
            name: Of the value.
            max_s: After this its place is not kept any more, even if it is still viewed.
            timeout_s: To find and verify it.

        Raises:
            LeaseLost: At the end of the block: the bytes may have become others (retryable).
            TooManyViews, TooManyHolds: Others must be closed first.
            As `get`: At its beginning.
        """
        key = self._viewed(name, max_s, timeout_s)

        def begin() -> ValueView | None:
            view = self.views.open_hot(key, VALUE, max_s)
            if view is not None:
                return view
            return self.client.driver.run(self.views.value_steps(key, max_s, timeout_s))

        return Viewing(begin)

    def view_tensor(
        self, name: Name, *, max_s: float = VIEW_S_MAX, timeout_s: float | None = None
    ) -> Viewing[TensorView]:
        """As `view`, of a tensor that `put_tensor` stored: `value.tensor`. See `TensorView`.

        Raises InvalidValue, too, if it is no tensor.
        """
        key = self._viewed(name, max_s, timeout_s)

        def begin() -> TensorView | None:
            view = self.views.open_hot(key, TENSOR, max_s)
            if view is not None:
                return view
            return self.client.driver.run(self.views.tensor_steps(key, max_s, timeout_s))

        return Viewing(begin)

    def _viewed(self, name: Name, max_s: float, timeout_s: float | None) -> bytes:
        if timeout_s is not None or max_s != VIEW_S_MAX:  # as in `get`
            check_timeout(timeout_s)
            check_timeout(max_s, "max_s")
        return key_of(name, self.namespace)

    def get_batch(
        self, names: Sequence[Name], *, timeout_s: float | None = None
    ) -> list[GetResult]:
        """Return what became of each name, in order, with the bytes of those that are there."""
        return self.client.driver.run(self.operations.get(names, timeout_s))

    def get_into(self, name: Name, target: Value, *, timeout_s: float | None = None) -> int | None:
        """Read a value into writable memory; return its size, None if it is not there.

        The target may be larger than the value. What it holds after an error or a miss is not
        defined. Raises as `get`.
        """
        if timeout_s is not None:
            check_timeout(timeout_s)
        key, part = key_of(name, self.namespace), target_of(target)
        found = self.quick_reads.get_into(key, part, self.registered(part), timeout_s)
        if found is None or isinstance(found, int):
            return found
        hit = found
        steps = self.operations.get_into([key], [target], timeout_s, hit=hit)
        (result,) = self.client.driver.run(steps)
        return got(key, result).nbytes if result.outcome is not GetOutcome.MISS else None

    def get_batch_into(
        self, names: Sequence[Name], targets: Sequence[Value], *, timeout_s: float | None = None
    ) -> list[GetResult]:
        """Read values into one target each; return what became of each name, in order."""
        return self.client.driver.run(self.operations.get_into(names, targets, timeout_s))

    def get_tensor(self, name: Name, *, timeout_s: float | None = None) -> torch.Tensor | None:
        """Return a tensor that `put_tensor` stored; None if it is not there. Raises as `get`."""
        return self.client.driver.run(self.operations.get_tensor(name, None, timeout_s))

    def get_tensor_into(
        self, name: Name, target: torch.Tensor, *, timeout_s: float | None = None
    ) -> bool:
        """Read a tensor into one of the same type and shape; False if it is not there.

        Raises as `get`, and InvalidValue if it is another kind of tensor; the target's contents
        are not defined then.
        """
        steps = self.operations.get_tensor(name, target, timeout_s)
        return self.client.driver.run(steps) is not None

    def exists(self, name: Name, *, timeout_s: float | None = None) -> bool:
        """Tell whether a value is there now; nothing keeps it there."""
        return self.exists_batch([name], timeout_s=timeout_s)[0]

    def exists_batch(self, names: Sequence[Name], *, timeout_s: float | None = None) -> list[bool]:
        """Tell which values are there now."""
        return self.client.driver.run(self.operations.exists(names, timeout_s))
