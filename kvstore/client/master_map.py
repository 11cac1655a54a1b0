"""The way to all masters of a pool, as if they were one.

    one master      ask ──▶ MasterLink, in the caller's thread
    several         ask ──▶ Plan: one part per shard ──▶ RpcFanOut ──▶ merged reply
                                 └── again, for those that did not answer and may ──┘
                    masters of this host are asked in the caller's thread too, all at once

Who leads a shard comes from the directory. Changes of the pool are patient: within their deadline
they are asked again when a master does not answer or another takes its place, which is safe since
every one of them may be repeated. A lookup is not: without a master it fails at once, as a miss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec.structs import replace

from kvstore.client.near_question import NearQuestion
from kvstore.errors import MasterUnavailable, StoreClosed
from kvstore.shards.everyone import plan_for_everyone
from kvstore.shards.plan import Merged, Outcome, Plan
from kvstore.shards.reads import plan_exists, plan_lookup, plan_release, plan_renew
from kvstore.shards.writes import (
    PutPlans,
    plan_change,
    plan_description,
    plan_report,
    plan_store,
)
from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer
from kvstore.wire.master_link import ATTEMPT_S, PAUSE_S, MasterLink, expect
from kvstore.wire.standing import MasterRecord, MasterStanding
from transfer.control import ClientClosed
from transfer.errors import TransferError
from transfer.fan_out import RpcFanOut
from transfer.local_rpc import Line, find_line

if TYPE_CHECKING:
    from configs.schema import KVStoreConfig
    from kvstore.discovery.directory import MasterDirectory

ReplyT = TypeVar("ReplyT", bound=m.Reply)
PATIENT: Final = (m.Allocate, m.Finish, m.Store, m.Remove, m.SetPin, m.Fence)


class MasterMap:
    """Requests of one client to the masters of a pool. Thread-safe.

    Args:
        directory: Who leads which shard; belongs to the caller.
        config: The store's knobs.
        secret: The cluster secret.
        identity: Name of this end, unique among all ends of the pool.
    """

    def __init__(
        self,
        directory: MasterDirectory,
        config: KVStoreConfig,
        *,
        secret: bytes,
        identity: str,
    ) -> None:
        self._directory = directory
        self.timeout_s = config.request_timeout_s
        self._secret = secret
        self._identity = identity
        self._closed = False
        self._link: MasterLink | None = None
        self._shards: _Shards | None = None
        if directory.num_shards == 1:
            self._link = MasterLink(
                "", secret=secret, identity=identity, timeout_s=config.request_timeout_s
            )
        else:
            self._shards = _Shards(directory.num_shards, secret=secret, identity=identity)
        directory.subscribe(self.meet)

    @property
    def num_shards(self) -> int:
        """How many masters share the keys."""
        return self._directory.num_shards

    def close(self) -> None:
        """Stop asking."""
        self._closed = True
        self._directory.unsubscribe(self.meet)
        if self._link is not None:
            self._link.close()
        if self._shards is not None:
            self._shards.close()

    def ask(
        self,
        request: m.Request,
        expected: type[ReplyT],
        *,
        timeout_s: float | None = None,
        first: Answer | None = None,
    ) -> ReplyT:
        """Send a request to whom it concerns, and return the reply.

        While a master is learning what nodes hold, a lookup that finds too little waits for it
        within its deadline. A put that finds no space does not, so that it can be told apart from
        those that an earlier master gave places to: it is told that this is `provisional`.

        Args:
            request: For any masters.
            expected: Type of the reply.
            timeout_s: Deadline; default: the configured one.
            first: What has been said to it already.

        Raises:
            MasterUnavailable: No answer in time; the request may or may not have been handled.
            Fenced: The sender's incarnation is out of the cluster.
            MasterRefused: The request is not legal.
        """
        left_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + left_s
        while True:
            answer, first = first or self._answer(request, left_s), None
            reply = expect(request, answer.reply, expected)
            if not (answer.settling or answer.rebuilding):
                return reply
            if isinstance(reply, m.Allocated):
                return replace(reply, provisional=True)
            left_s = deadline_s - time.monotonic() - PAUSE_S
            if left_s <= 0 or not _may_find_more(request, answer):
                return reply
            self._give_back(request, reply)
            time.sleep(PAUSE_S)

    def ask_encoded(self, payload: bytes, *, timeout_s: float | None = None) -> m.Stored:
        """As `ask`, of a `Store` that is encoded already."""
        left_s = self.timeout_s if timeout_s is None else timeout_s
        if self._link is not None:
            begun_s = time.monotonic()
            answer = self._link.try_encoded(payload, "Store", min(ATTEMPT_S, left_s))
            if answer is not None and type(answer.reply) is m.Stored:
                return answer.reply
            left_s = max(0.001, left_s - (time.monotonic() - begun_s))
        return self.ask(m.decode_request(payload), m.Stored, timeout_s=left_s)

    def borrow(self, timeout_s: float) -> list[int]:
        """Return descriptors that the only master lends; none if there are several.

        Raises:
            TransferError: There is no answer.
        """
        return [] if self._link is None else self._link.borrow(timeout_s)

    def _answer(self, request: m.Request, timeout_s: float) -> Answer:
        patient = isinstance(request, PATIENT)
        if self._link is not None:
            return self._link.answer(request, timeout_s=timeout_s, patient=patient)
        assert self._shards is not None
        return self._shards.answer(request, timeout_s, patient=patient)

    def _give_back(self, request: m.Request, reply: m.Reply) -> None:
        if isinstance(request, m.Lookup) and isinstance(reply, m.Located) and reply.lease_id:
            self._answer(m.Release(request.client, [reply.lease_id]), self.timeout_s)

    def near_question(self, request: m.Request) -> NearQuestion | None:
        """Return what to ask one master, without waiting, where one alone is concerned now.

        Its answer is that of `ask` unless it is `rebuilding` or `settling`: `ask` judges that.
        """
        standing = None
        if self._link is not None:
            standing, part, merge = self._link.standing, request, None
        elif self._shards is not None and not isinstance(request, (m.Allocate, m.Finish)):
            plan = self._shards.plan(request)
            if len(plan.parts) == 1:
                ((shard, part),) = plan.parts
                standing, merge = self._shards.standing(shard), plan.merge
        if standing is None or self._closed:
            return None
        return NearQuestion.ask(part, standing, merge, patient=isinstance(request, PATIENT))

    def find_line(self, address: str, timeout_s: float) -> Line | None:
        """Connect to a master of this host; None if it is elsewhere, or too busy to answer."""
        try:
            return find_line(address, self._secret, self._identity, time.monotonic() + timeout_s)
        except TimeoutError:
            return None

    def tell(self, merged: Merged) -> None:
        """Tell masters what is left over of a merged reply; nobody waits for that."""
        if self._shards is not None:
            self._shards.tell(merged)

    def meet(self, record: MasterRecord) -> None:
        """Ask this master from now on, unless a later one is known. Never waits."""
        if record.shard >= self.num_shards:
            return  # heard of from a node of another pool
        if self._link is not None:
            self._link.redirect(record.address, term=record.term)
        if self._shards is not None:
            self._shards.meet(record)


class _Shards:
    """Requests to several masters at once. Thread-safe."""

    def __init__(self, num_shards: int, *, secret: bytes, identity: str) -> None:
        self._num_shards = num_shards
        self._puts = PutPlans(num_shards)
        self._rpc = RpcFanOut(secret, identity=identity)
        self._standings = [
            MasterStanding(MasterRecord(shard=shard), identity=identity)
            for shard in range(num_shards)
        ]

    def close(self) -> None:
        self._rpc.close()

    def meet(self, record: MasterRecord) -> None:
        previous = self._standings[record.shard].record
        if self._standings[record.shard].meet(record) and previous.address != record.address:
            self._rpc.forget(previous.address)

    def answer(self, request: m.Request, timeout_s: float, *, patient: bool) -> Answer:
        plan = self.plan(request)
        rebuilding = settling = False
        outcomes: dict[int, Outcome] = {}
        deadline_s, attempt_s = time.monotonic() + timeout_s, ATTEMPT_S
        left = list(range(len(plan.parts)))
        while left:
            again = patient and attempt_s < timeout_s
            patience_s = attempt_s if again else timeout_s
            parts = [plan.parts[idx] for idx in left]
            found = self._attempt(parts, patience_s, patient=patient, again=again)
            for idx, outcome in zip(left, found, strict=True):
                if isinstance(outcome, Answer):
                    rebuilding |= outcome.rebuilding
                    settling |= outcome.settling
                    outcomes[idx] = outcome.reply
                else:
                    outcomes[idx] = outcome
            timeout_s = deadline_s - time.monotonic()
            if not patient or timeout_s <= PAUSE_S:
                break
            left = [idx for idx in left if isinstance(outcomes[idx], MasterUnavailable)]
            if left:
                time.sleep(PAUSE_S)
                attempt_s, timeout_s = 2 * attempt_s, timeout_s - PAUSE_S
        merged = plan.merge([outcomes[idx] for idx in range(len(plan.parts))])
        self.tell(merged)
        return Answer(reply=merged.reply, rebuilding=rebuilding, settling=settling)

    def standing(self, shard: int) -> MasterStanding:
        """Return what is known of the master of a shard."""
        return self._standings[shard]

    def plan(self, request: m.Request) -> Plan:
        """Return its parts."""
        match request:
            case m.Lookup():
                return plan_lookup(request, self._num_shards)
            case m.Allocate():
                return self._puts.allocate(request)
            case m.Finish():
                return self._puts.finish(request)
            case m.Store() | m.Reserve():
                return plan_store(request, self._num_shards)
            case m.Renew():
                return plan_renew(request)
            case m.Release():
                return plan_release(request)
            case m.Exists():
                return plan_exists(request, self._num_shards)
            case m.Remove() | m.SetPin():
                return plan_change(request, self._num_shards)
            case m.Describe():
                return plan_description(request, self._num_shards)
            case m.ReportBad():
                return plan_report(request, self._num_shards)
        plan = plan_for_everyone(request, self._num_shards)
        assert plan is not None, f"{type(request).__name__} concerns one master"
        return plan

    def _attempt(
        self,
        parts: Sequence[tuple[int, m.Request]],
        timeout_s: float,
        *,
        patient: bool,
        again: bool,
    ) -> list[Answer | MasterUnavailable]:
        """Return for each part what is said, or why nothing is."""
        results: list[Answer | MasterUnavailable] = []
        asked: list[tuple[int, MasterRecord, bytes]] = []
        for idx, (shard, part) in enumerate(parts):
            try:
                record = self._standings[shard].admit(type(part).__name__, patient=patient)
            except MasterUnavailable as error:
                results.append(error)
                continue
            results.append(_unanswered(part, record))
            asked.append((idx, record, m.encode(part)))
        calls = [(record.address, payload) for _, record, payload in asked]
        try:
            replies = self._rpc.request(calls, timeout_s=timeout_s)
        except ClientClosed as error:
            raise StoreClosed(what="way to the store's masters") from error
        for (idx, record, _), reply in zip(asked, replies, strict=True):
            results[idx] = self._read(parts[idx], record, reply, again=again)
        return results

    def _read(
        self,
        part: tuple[int, m.Request],
        record: MasterRecord,
        reply: bytes | TransferError,
        *,
        again: bool,
    ) -> Answer | MasterUnavailable:
        shard, request = part
        standing = self._standings[shard]
        try:
            return standing.read(type(request).__name__, record, reply, again=again)
        except MasterUnavailable as error:
            return error

    def tell(self, merged: Merged) -> None:
        """See `MasterMap.tell`."""
        calls = []
        for shard, part in merged.leftovers:
            address = self._standings[shard].record.address
            if address:
                calls.append((address, m.encode(part)))
        self._rpc.tell(calls)


def _unanswered(part: m.Request, record: MasterRecord) -> MasterUnavailable:
    return MasterUnavailable(
        operation=type(part).__name__, address=record.address, problem="not asked"
    )


def _may_find_more(request: m.Request, answer: Answer) -> bool:
    """Tell whether the same request may get more a moment later, as far as its master knows."""
    reply = answer.reply
    if isinstance(request, m.Lookup) and isinstance(reply, m.Located):
        complete = len(reply.node_idx) == len(request.keys) and -1 not in reply.node_idx
        return answer.rebuilding and not complete
    return isinstance(reply, m.Present) and answer.rebuilding and not all(reply.flags)
