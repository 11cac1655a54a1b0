"""Who leads which shard, as far as this process knows, and who wants to hear of changes.

Every directory keeps what it knows while it cannot learn more: masters that were reachable a
moment ago most likely still are, and one that is not shows it by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from configs.addresses import check_address
from kvstore.wire.standing import MasterRecord

Listener = Callable[[MasterRecord], None]


class MasterDirectory(Protocol):
    """The masters of one pool. Thread-safe."""

    @property
    def num_shards(self) -> int:
        """How many masters share the keys; never changes."""

    def masters(self) -> tuple[MasterRecord, ...]:
        """Who leads each shard, in their order."""

    def subscribe(self, listener: Listener) -> None:
        """Tell this listener who leads each shard now, and then each change, in order.

        It must not wait for anything.
        """

    def unsubscribe(self, listener: Listener) -> None:
        """Tell it nothing more."""


class KnownMasters:
    """A directory of what it was told last. Thread-safe."""

    def __init__(self, num_shards: int) -> None:
        self._lock: Final = threading.RLock()  # held while listeners are told: changes in order
        self._records = [MasterRecord(shard=shard) for shard in range(num_shards)]
        self._listeners: list[Listener] = []

    @property
    def num_shards(self) -> int:
        """How many masters share the keys."""
        return len(self._records)

    def masters(self) -> tuple[MasterRecord, ...]:
        """Who leads each shard, as far as is known."""
        with self._lock:
            return tuple(self._records)

    def subscribe(self, listener: Listener) -> None:
        """Tell this listener who leads each shard now, and then each change, in order."""
        with self._lock:
            self._listeners.append(listener)
            for record in self._records:
                listener(record)

    def unsubscribe(self, listener: Listener) -> None:
        """Tell it nothing more."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def _enter(self, record: MasterRecord) -> bool:
        """Enter a record unless one of a later term is there; tell if that changed anything."""
        with self._lock:
            known = self._records[record.shard]
            if record == known or record.term < known.term:
                return False
            self._records[record.shard] = record
            for listener in tuple(self._listeners):
                listener(record)
            return True


class StaticMasters(KnownMasters):
    """Masters at addresses that are known. Thread-safe.

    Args:
        addresses: "host:port" of each shard's master, in order.

    Raises:
        ValueError: There is none, or one of them is not of that form.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError("no master: at least one address is needed")
        super().__init__(len(addresses))
        self.move(addresses)

    def move(self, addresses: Sequence[str]) -> None:
        """The masters are there from now on.

        Raises:
            ValueError: Another number of them, or one is no "host:port".
        """
        for address in addresses:
            check_address(address)
        if len(addresses) != self.num_shards:
            raise ValueError(f"{self.num_shards} shards, but {len(addresses)} addresses")
        for shard, address in enumerate(addresses):
            self._enter(MasterRecord(shard=shard, address=address))


def as_directory(masters: str | Sequence[str] | MasterDirectory) -> MasterDirectory:
    """Return a directory of what may be one address, several, or a directory already.

    Raises:
        TypeError: It is none of these.
        ValueError: No address, or something that is none.
    """
    if isinstance(masters, str):
        return StaticMasters([masters])
    if isinstance(masters, Sequence):
        return StaticMasters(masters)
    if not hasattr(masters, "num_shards"):
        raise TypeError(f"masters are addresses or a directory, not {masters!r:.40}")
    return masters
