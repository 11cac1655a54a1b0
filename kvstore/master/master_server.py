"""The store master as a process's service: receive, step, reply."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvstore.events.event_log import EventLog
from kvstore.events.publisher import EventPublisher
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m
from transfer.control import RpcServer
from transfer.errors import ControlError

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig

logger = logging.getLogger(__name__)


class MasterServer:
    """Serves one `StoreMaster` on the control channel. Thread-safe.

    Args:
        config: The store's knobs.
        secret: The cluster secret; who does not hold it gets no answer.
        host: Address to listen on.
        port: 0 picks a free one.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        config: KVStoreConfig,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        timing = MasterTiming(
            lease_s=config.lease_s, silence_s=config.node_silence_s, put_s=config.open_put_s
        )
        self.events: EventPublisher | None = None
        log: EventLog | None = None
        if config.events.enabled:
            self.events = EventPublisher(config.events, secret=secret)
            # Microseconds since the epoch: more than any number that an earlier master reached.
            log = EventLog(first_sequence=time.time_ns() // 1000)
        self._master = StoreMaster(timing, events=log, eviction=config.eviction)
        self._lock = threading.Lock()  # the server's thread, and whoever calls the methods below
        self._clock = clock
        self._server = RpcServer(secret, self._handle, host=host, port=port)

    @property
    def address(self) -> str:
        """What clients and nodes connect to, once open."""
        return self._server.address

    def open(self) -> None:
        """Listen, and publish events if configured.

        Raises:
            ControlError: An address can't be bound.
        """
        if self.events is not None:
            self.events.open()
            self._publish(self.events)
        try:
            self._server.open()
        except ControlError:
            self._close_events()
            raise
        logger.info("store master listens on %s", self.address)

    def close(self) -> None:
        """Stop; what the pool holds stays with the nodes."""
        self._server.close()
        self._close_events()

    def __enter__(self) -> MasterServer:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def fence(self, incarnations: Sequence[str]) -> None:
        """Shut incarnations out that a view no longer holds: they may still run, and write."""
        self._step(m.Fence(list(incarnations), dead=False))

    def confirm_dead(self, incarnations: Sequence[str]) -> None:
        """Shut incarnations out that certainly run no more, and reuse what they were writing."""
        self._step(m.Fence(list(incarnations), dead=True))

    def statistics(self) -> m.MasterStatistics:
        """Return the pool's figures."""
        reply = self._step(m.Observe())
        assert isinstance(reply, m.MasterStatistics), reply
        return reply

    def check_invariants(self) -> None:
        """Raise InvariantViolated if the master's bookkeeping is wrong. Slow; for tests."""
        with self._lock:
            self._master.check_invariants()

    def _handle(self, identity: str, payload: bytes) -> bytes:
        try:
            request = m.decode_request(payload)
        except msgspec.MsgspecError as error:
            logger.warning("malformed request from %s: %s", identity, error)
            return m.encode(m.Refused(m.RefusalReason.MALFORMED, str(error)))
        return m.encode(self._step(request))

    def _step(self, request: m.Request) -> m.Reply:
        with self._lock:
            reply = self._master.step(request, self._clock())
            if self.events is not None:
                self._publish(self.events)
            return reply

    def _publish(self, events: EventPublisher) -> None:
        if events.wants_state:
            self._master.restate_events()
        events.offer(self._master.take_events())

    def _close_events(self) -> None:
        if self.events is not None:
            self.events.close()
