"""The store master as a process's service: receive, step, reply.

    opened ──▶ LEADING (at a fixed address)
    opened ──▶ STANDING BY ── lead(term) ──▶ LEADING ── stand_down() ──▶ STANDING BY

Who stands by refuses all requests (`NOT_LEADING`), and each time it leads it starts with an empty
index, which the nodes fill. So does a leader whose time is over that was not confirmed again: a
process that was stopped does not go on as if nothing had happened.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.events.event_log import EventLog
from kvstore.events.publisher import EventPublisher
from kvstore.master.books.tenants import TenantRule
from kvstore.master.posts import Posts
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.shards.plan import shard_of
from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer, seal, seal_reply
from transfer.control import RpcServer
from transfer.errors import ControlError

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig

logger = logging.getLogger(__name__)

_WHAT_IS_HELD: Final = (m.Register, m.Hold)
_OF_KEYS: Final = (m.Lookup, m.Allocate, m.Store, m.Exists)
_WHO_MAY_WRITE: Final = (m.Register, m.Settled, m.Leave, m.Fence)
_OF_NODES: Final = frozenset((*_WHAT_IS_HELD, *_WHO_MAY_WRITE))


class MasterServer:
    """Serves one `StoreMaster` on the control channel. Thread-safe.

    Args:
        config: The store's knobs.
        secret: The cluster secret; who does not hold it gets no answer.
        host: Address to listen on.
        port: 0 picks a free one.
        clock: Seconds, monotonic.
        standby: Wait for `lead`.
        rebuild_s: How long after its start nodes may be telling it still what they hold; 0 where
            the pool starts with it.
        shard: Its number among the masters of the configuration, to refuse who takes it for
            another, and in the endpoints of its events; None: it does not look, and is the first.
    """

    def __init__(
        self,
        config: KVStoreConfig,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
        standby: bool = False,
        rebuild_s: float = 0.0,
        shard: int | None = None,
    ) -> None:
        self._config = config
        self._secret = secret
        self._standby = standby
        self._rebuild_s = rebuild_s
        self._shard = shard
        self._is_one_of_several = shard is not None and config.masters.num_shards > 1
        self._clock = clock
        # Who posts compares times with ours, so they must be of the host's clock.
        self._takes_posts = (
            clock is time.monotonic and Posts.possible() and not self._is_one_of_several
        )
        self._lock = threading.Lock()  # the server's thread, and whoever calls the methods below
        self._term = 0
        self._leads_until_s = -math.inf
        self._rebuilt_s = -math.inf
        self._settled_s = -math.inf
        self._telling: dict[tuple[str, int], float] = {}  # segment -> its last piece, of several
        self._sealed: tuple[m.Reply | None, int, bytes] = None, 0, b""  # the last reply, its term
        self.events: EventPublisher | None = None
        self._master = self._new_master()
        self._posts: Posts | None = None  # of clients of this host, once one asks to post
        self._server = RpcServer(
            secret, self._handle, host=host, port=port, afterwards=self._afterwards,
            lend=self._lend, ended=self._ended,
        )  # fmt: skip

    @property
    def address(self) -> str:
        """What clients and nodes connect to, once open."""
        return self._server.address

    def open(self) -> None:
        """Listen, and publish events if configured.

        Raises:
            ControlError: An address can't be bound.
        """
        if not self._standby:
            self.lead(term=0, until_s=math.inf)
        try:
            self._server.open()
        except ControlError:
            self.stand_down()
            raise
        logger.info("store master listens on %s", self.address)

    def lead(self, *, term: int, until_s: float) -> None:
        """Answer requests from now on, with an empty index.

        Args:
            term: Larger than that of any master that led this shard before.
            until_s: Of the clock; see `confirm`.

        Raises:
            ControlError: The events' addresses can't be bound.
        """
        with self._lock:
            self._close_posts()
            self._close_events()
            self._master = self._new_master()
            if self.events is not None:
                self.events.open()
                self._publish(self.events)
            self._term = term
            self._leads_until_s = until_s
            self._rebuilt_s = self._clock() + self._rebuild_s
            self._settled_s = -math.inf
            self._telling.clear()

    def confirm(self, until_s: float) -> None:
        """It leads on, for now until then; without this it answers nothing after its time."""
        with self._lock:
            self._leads_until_s = until_s
            self._say_to_posters(self._clock())

    def stand_down(self) -> None:
        """Answer nothing until it leads again."""
        with self._lock:
            self._close_posts()
            self._leads_until_s = -math.inf
            self._close_events()

    def close(self) -> None:
        """Stop; what the pool holds stays with the nodes."""
        with self._lock:  # before the address is another's, who knows of no posts here
            self._takes_posts = False
            self._close_posts()
        self._server.close()
        self.stand_down()

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
            return seal(Answer(reply=m.Refused(m.RefusalReason.MALFORMED, str(error))))
        with self._lock:
            now = self._clock()
            if now >= self._leads_until_s:
                refused = m.Refused(m.RefusalReason.NOT_LEADING, f"{self.address} stands by")
                return seal(Answer(reply=refused, term=self._term))
            problem = self._misdirected(request) if self._is_one_of_several else None
            if problem is not None:
                refused = m.Refused(m.RefusalReason.WRONG_SHARD, problem)
                return seal(Answer(reply=refused, term=self._term))
            reply = self._stepped(request, now)
            if self._knows_all(now):
                return self._seal(reply)
            answer = Answer(
                reply=reply,
                term=self._term,
                rebuilding=self._rebuilding(now),
                settling=now < self._settled_s,
            )
            return seal(answer)

    def _seal(self, reply: m.Reply) -> bytes:
        """Return the bytes of a plain answer; of the same object again they are the same."""
        last, term, sealed = self._sealed
        if reply is not last or term != self._term:
            sealed = seal_reply(reply, self._term)
            self._sealed = reply, self._term, sealed
        return sealed

    def _afterwards(self) -> float | None:
        if not self._master.has_wishes and self._posts is None:
            return None  # whoever has some then is served by the next request
        with self._lock:
            now, soon_s = self._clock(), None
            if self._posts is not None and now < self._leads_until_s:
                soon_s = self._posts.doze(now)
            if self._master.has_wishes:
                self._master.grant_wishes(now)
            if self._posts is not None:
                self._posts.tell()
            if self.events is not None:
                self._publish(self.events)
            self._say_to_posters(now)
            return soon_s

    # -- posted puts: see `kvstore/master/posts.py` -------------------------------------------

    def _lend(self, identity: str, number: int) -> list[int]:
        with self._lock:
            if self._clock() >= self._leads_until_s or not self._takes_posts:
                return []
            if self._posts is None:
                try:
                    self._posts = Posts(self._master, self._server.wakeup)
                except OSError as error:  # no memory to share, or no descriptors of processes
                    logger.warning("no puts are posted here: %s", error)
                    self._takes_posts = False
                    return []
            return self._posts.lend(identity, number)

    def _ended(self, number: int) -> None:
        with self._lock:
            if self._posts is not None:
                self._posts.end(number)

    def _say_to_posters(self, now: float) -> None:
        if self._posts is None:
            return
        if self._posts.is_crowded:  # its clients ask for another, which has more room
            self._close_posts()
            return
        self._posts.say(may_post=self._knows_all(now), leads_until_s=self._leads_until_s)

    def _close_posts(self) -> None:
        if self._posts is not None:
            self._posts.close()
            self._posts = None
            if self.events is not None:
                self._publish(self.events)

    def _misdirected(self, request: m.Request) -> str | None:
        """Say what is wrong if the first key of a request is another master's.

        What is stored with the wrong master is found by nobody who knows them all. One key of each
        request is enough to tell a list of masters that is too short, or in another order.
        """
        num_shards = self._config.masters.num_shards
        if not isinstance(request, _OF_KEYS):
            return None
        keys = [request.key] if isinstance(request, m.Store) else request.keys
        if not keys or (shard := shard_of(keys[0], num_shards)) == self._shard:
            return None
        return (
            f"key {keys[0].hex()} is of master {shard} of {num_shards}, this is master"
            f" {self._shard}: who asks must know all of them, in their order"
        )

    def _step(self, request: m.Request) -> m.Reply:
        with self._lock:
            return self._stepped(request, self._clock())

    def _knows_all(self, now: float) -> bool:
        """Whether every block of the pool is in the index, and all who may write are known."""
        return not self._telling and now >= self._rebuilt_s and now >= self._settled_s

    def _stepped(self, request: m.Request, now: float) -> m.Reply:
        posts = self._posts
        if posts is None:
            return self._stepped_plainly(request, now)
        try:
            posts.before(request, now)
            return self._stepped_plainly(request, now)
        finally:
            posts.after()
            self._say_to_posters(now)

    def _stepped_plainly(self, request: m.Request, now: float) -> m.Reply:
        reply = self._master.step(request, now)
        if type(request) in _OF_NODES:
            if isinstance(request, _WHAT_IS_HELD):
                where = request.node, request.segment
                self._telling.pop(where, None)
                if request.more:
                    self._telling[where] = now
            if isinstance(request, _WHO_MAY_WRITE):
                self._settled_s = self._master.settled_s()
        if self.events is not None:
            self._publish(self.events)
        return reply

    def _rebuilding(self, now: float) -> bool:
        if not self._telling:
            return now < self._rebuilt_s
        late_s = now - self._config.node_silence_s
        while self._telling and (oldest := next(iter(self._telling.items())))[1] <= late_s:
            del self._telling[oldest[0]]
        return bool(self._telling) or now < self._rebuilt_s

    def _new_master(self) -> StoreMaster:
        config, log = self._config, None
        if config.events.enabled:
            own = config.events.for_shard(self._shard or 0)
            self.events = EventPublisher(own, secret=self._secret)
            # Microseconds since the epoch: more than any number that an earlier master reached.
            log = EventLog(first_sequence=time.time_ns() // 1000)
        timing = MasterTiming(
            lease_s=config.lease_s,
            silence_s=config.node_silence_s,
            put_s=config.open_put_s,
            heartbeat_s=config.heartbeat_s,
        )
        return StoreMaster(
            timing,
            events=log,
            eviction=config.eviction,
            tenants=[
                TenantRule(
                    name=tenant.name,
                    token=tenant.token(),
                    quota_bytes=tenant.quota_of_shard(config.masters.num_shards),
                )
                for tenant in config.tenants
            ],
            policies=config.policies,
            last_copy_id=time.time_ns() // 1000,  # as above
            # Whatever the clocks of two masters show, a lease of one is none of the other's.
            last_lease_id=secrets.randbits(60),
        )

    def _publish(self, events: EventPublisher) -> None:
        if events.wants_state:
            self._master.restate_events()
        events.offer(self._master.take_events())

    def _close_events(self) -> None:
        if self.events is not None:
            self.events.close()
