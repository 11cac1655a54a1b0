"""A master's way to lead its shard: it campaigns, leads while etcd knows that it lives, and stops.

    CAMPAIGNING ── creates the shard's record ──▶ LEADING ── its lease is over ──▶ CAMPAIGNING
         │                                            │
         └── somebody else has it: waits for its end  └── keeps the lease alive, every third of it

The master answers only until the end of the lease that etcd confirmed last. If etcd cannot be
reached, that end is put off as long as this thread runs on time: then nobody was stopped, and who
leads goes on. A process that was stopped does not know what happened meanwhile; it answers again
only when etcd has said that its lease still runs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvstore.discovery.etcd import EtcdEntry, EtcdGateway
from kvstore.discovery.etcd_records import (
    RETRY_S_MIN,
    EtcdWatch,
    LeaderRecord,
    master_key,
    shards_key,
)
from kvstore.errors import EtcdUnavailable
from transfer.errors import ControlError

if TYPE_CHECKING:
    from configs.kvstore_masters import EtcdConfig

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # a candidate looks again after this, should it have missed the leader's end
COMPLAIN_S: Final = 600.0  # whoever may not stand says so again after this, if nothing changes


class Leader(Protocol):
    """What is elected: a `MasterServer`."""

    @property
    def address(self) -> str:
        """Where it listens."""

    def lead(self, *, term: int, until_s: float) -> None:
        """Begin to answer. Raises ControlError if that is not possible here now."""

    def confirm(self, until_s: float) -> None:
        """Go on answering."""

    def stand_down(self) -> None:
        """Answer no more."""


class Candidacy:
    """One master's candidacy for one shard. Thread-safe.

    Args:
        config: Where etcd is.
        shard: For which shard.
        num_shards: How many there are; all masters of a pool must agree.
        leader: Open, and standing by.
        clock: The leader's.
    """

    def __init__(
        self,
        config: EtcdConfig,
        shard: int,
        num_shards: int,
        leader: Leader,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert 0 <= shard < num_shards, (shard, num_shards)
        self._config = config
        self._num_shards = num_shards
        self._leader = leader
        self._clock = clock
        self._key = master_key(config.prefix, shard)
        # All tries of one request together stay within a third of the lease, or a leader without
        # etcd would look to itself as if it had been stopped.
        patience_s = config.lease_s / 3 / (len(config.endpoints) + 1)
        self._gateway = EtcdGateway(config, timeout_s=min(config.timeout_s, patience_s))
        self._watch = EtcdWatch(
            config, self._key, self._take, on_listed=lambda keys: self._see(self._key in keys)
        )
        self._lease: int | None = None
        self._term = 0
        self._ticked_s = 0.0
        self._agreed = False
        self._complaint: tuple[bytes | None, float] | None = None  # what was found, and when told
        self._barred_until_s = -math.inf
        self._barred_for = ""  # so that the log says it once
        self._closing = False
        self._awake = threading.Event()
        self._leads = threading.Event()
        self._thread = threading.Thread(target=self._run, name="candidacy", daemon=True)

    @property
    def term(self) -> int:
        """The term that it leads, or led last; 0 if it never did."""
        return self._term

    def open(self) -> None:
        """Campaign from now on."""
        self._watch.open()
        self._thread.start()

    def close(self) -> None:
        """Stop leading, and let another lead at once; idempotent."""
        self._closing = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._watch.close()
        self._gateway.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it leads; False at the deadline."""
        return self._leads.wait(timeout_s)

    def _run(self) -> None:
        while not self._closing:
            try:
                pause_s = self._keep() if self._leads.is_set() else self._campaign()
            except EtcdUnavailable as error:
                logger.debug("%s", error)
                self._put_off()
                pause_s = RETRY_S_MIN
            self._awake.wait(pause_s)
            self._awake.clear()
        self._stop("closing")
        self._give_up_lease()

    def _campaign(self) -> float:
        """Try to lead; return how long to wait before the next try."""
        asked_s = self._clock()
        if asked_s < self._barred_until_s:  # our own record's end woke us
            return self._barred_until_s - asked_s
        if not self._agree():
            return LOOK_S
        lease = self._gateway.grant(self._config.lease_s)
        self._lease = lease
        value = msgspec.json.encode(LeaderRecord(self._leader.address))
        term = self._gateway.create(self._key, value, lease=lease)
        if term is None:
            self._give_up_lease()
            return LOOK_S
        self._term, self._ticked_s = term, asked_s
        try:
            self._leader.lead(term=term, until_s=asked_s + self._config.lease_s)
        except ControlError as error:
            # Its events' port is still that of another, say. Others may lead meanwhile.
            self._bar(f"{self._leader.address} cannot lead {self._key}: {error}")
            return LOOK_S
        self._leads.set()
        logger.info("%s leads %s, term %s", self._leader.address, self._key, term)
        return self._config.lease_s / 3

    def _bar(self, problem: str) -> None:
        """Give up what was won, and do not stand again before others could."""
        level = logging.ERROR if problem != self._barred_for else logging.DEBUG
        self._barred_for, self._barred_until_s = problem, self._clock() + LOOK_S
        logger.log(level, "%s", problem)
        self._give_up_lease()

    def _keep(self) -> float:
        asked_s = self._clock()
        assert self._lease is not None
        if not self._gateway.keep_alive(self._lease):
            self._lease = None
            self._stop("its lease is over")
            return 0.0
        self._ticked_s = asked_s
        self._leader.confirm(asked_s + self._config.lease_s)
        return self._config.lease_s / 3

    def _put_off(self) -> None:
        """Go on without etcd, unless this process was stopped since it last looked."""
        now = self._clock()
        if self._leads.is_set() and now - self._ticked_s < self._config.lease_s:
            self._ticked_s = now
            self._leader.confirm(now + self._config.lease_s)

    def _agree(self) -> bool:
        """Make sure that all masters mean the same number of shards."""
        if self._agreed:
            return True
        key, ours = shards_key(self._config.prefix), str(self._num_shards).encode()
        self._gateway.create(key, ours)
        _, entries = self._gateway.range(key)
        found = next((entry.value for entry in entries if entry.key == key), None)
        self._agreed = found == ours
        if not self._agreed:
            self._complain(found)
        return self._agreed

    def _complain(self, found: bytes | None) -> None:
        """Say once in a while, and when it changes, that masters mean other numbers of shards."""
        now = self._clock()
        if self._complaint is not None:
            said, said_s = self._complaint
            if said == found and now - said_s < COMPLAIN_S:
                return
        self._complaint = found, now
        key, ours = shards_key(self._config.prefix), str(self._num_shards).encode()
        logger.error("etcd says %r shards at %s, the configuration %r", found, key, ours)

    def _stop(self, reason: str) -> None:
        if self._leads.is_set():
            self._leads.clear()
            self._leader.stand_down()
            logger.warning("%s leads %s no more: %s", self._leader.address, self._key, reason)

    def _give_up_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._gateway.revoke(lease)
            except EtcdUnavailable as error:
                logger.info("%s; the lease ends by itself", error)

    # -- the watch's thread -----------------------------------------------------------------------

    def _take(self, entry: EtcdEntry) -> None:
        if entry.value is None:
            self._see(False)

    def _see(self, taken: bool) -> None:
        if not taken or self._leads.is_set():
            self._awake.set()
