"""What the store keeps in etcd, and how a process follows it.

    {prefix}/shards              how many masters share the keys: "4"
    {prefix}/masters/0000        {"address": "10.0.0.1:7000"}, with the lease of who leads shard 0

The revision at which a record was created is the term of its master: etcd never gives one twice,
and a later one is larger. While etcd cannot be reached, everybody goes on with what they know.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.discovery.directory import KnownMasters
from kvstore.discovery.etcd import EtcdEntry, EtcdGateway
from kvstore.errors import EtcdUnavailable
from kvstore.wire.standing import MasterRecord

if TYPE_CHECKING:
    from configs.kvstore_masters import EtcdConfig

logger = logging.getLogger(__name__)

RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 2.0


class LeaderRecord(msgspec.Struct, frozen=True):
    """The value of a master's key."""

    address: str


def shards_key(prefix: str) -> str:
    """Return the key of the number of shards."""
    return f"{prefix}/shards"


def masters_prefix(prefix: str) -> str:
    """Return what the keys of all masters start with."""
    return f"{prefix}/masters/"


def master_key(prefix: str, shard: int) -> str:
    """Return the key of one shard's master."""
    return f"{masters_prefix(prefix)}{shard:04d}"


class EtcdWatch:
    """A thread that follows all keys under a prefix. Thread-safe.

    Args:
        config: Where etcd is.
        prefix: Of the keys.
        on_entry: Called on the thread with every key, first as it is and then at each change;
            after a break, with all that are there again. Must not wait for anything.
        on_listed: Called on the thread with all keys that are there, each time they were listed.
    """

    def __init__(
        self,
        config: EtcdConfig,
        prefix: str,
        on_entry: Callable[[EtcdEntry], None],
        *,
        on_listed: Callable[[set[str]], None] = lambda keys: None,
    ) -> None:
        self._gateway = EtcdGateway(config)
        self._prefix = prefix
        self._on_entry = on_entry
        self._on_listed = on_listed
        self._closing = threading.Event()
        self._listed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)

    def open(self) -> None:
        """Start to follow."""
        self._thread.start()

    def close(self) -> None:
        """Stop; idempotent."""
        self._closing.set()
        self._gateway.interrupt()
        if self._thread.is_alive():
            self._thread.join()
        self._gateway.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all keys were listed once; False at the deadline."""
        return self._listed.wait(timeout_s)

    def _run(self) -> None:
        pause_s, reachable = RETRY_S_MIN, True
        while not self._closing.is_set():
            try:
                self._follow()
                pause_s = RETRY_S_MIN
                if not reachable:
                    logger.info("etcd is back")
                reachable = True
            except EtcdUnavailable as error:
                if reachable and not self._closing.is_set():
                    logger.warning("%s; going on with what is known", error)
                reachable = False
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)

    def _follow(self) -> None:
        revision, entries = self._gateway.range(self._prefix)
        for entry in entries:
            self._on_entry(entry)
        self._on_listed({entry.key for entry in entries})
        self._listed.set()
        for entry in self._gateway.watch(self._prefix, after=revision):
            self._on_entry(entry)
            if self._closing.is_set():
                return


class EtcdMasters(KnownMasters):
    """The masters as etcd names them: a directory. Thread-safe.

    Args:
        config: Where etcd is.
        num_shards: How many masters share the keys.
    """

    def __init__(self, config: EtcdConfig, num_shards: int) -> None:
        super().__init__(num_shards)
        self._prefix = masters_prefix(config.prefix)
        self._timeout_s = config.timeout_s
        self._watch = EtcdWatch(config, self._prefix, self._take)

    def open(self) -> None:
        """Start to follow the records; an etcd that cannot be reached is no error."""
        self._watch.open()

    def wait(self) -> bool:
        """Wait until it knows who leads now; False if etcd did not tell within its `timeout_s`."""
        return self._watch.wait(self._timeout_s)

    def close(self) -> None:
        """Stop following."""
        self._watch.close()

    def __enter__(self) -> EtcdMasters:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _take(self, entry: EtcdEntry) -> None:
        if entry.value is None:
            return  # nobody leads now; the last who did is asked until another does
        try:
            shard = int(entry.key.removeprefix(self._prefix))
            address = msgspec.json.decode(entry.value, type=LeaderRecord).address
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("etcd: %s is no record of a master: %s", entry.key, error)
            return
        if not 0 <= shard < self.num_shards:
            logger.warning("etcd: shard %s of %s", shard, self.num_shards)
            return
        if self._enter(MasterRecord(shard=shard, address=address, term=entry.revision)):
            logger.info("shard %s is led from %s, term %s", shard, address, entry.revision)
