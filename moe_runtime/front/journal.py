"""The request journal: what every open request is, has and waits for. A state machine without I/O.

                  assigned                    last token
    -> QUEUED ---------------> ASSIGNED ---------------------> FINISHED
         ^                        |  client gone -> CANCELLED, error or deadline -> FAILED
         +--- owner lost, gap ----+

A request whose worker is lost goes to another one as prompt + tokens so far. Sampling is a
function of (seed, position), so the tokens that follow are those that would have been.

Each attempt has its own id on the wire (`request.attempt`), so what an earlier owner, or an earlier
attempt at the same owner, still sends cannot be taken for the current one's. Within an attempt
an item at index i extends the journal only if i == len(generated):

    generated   [0 .............. n)
    item            [i ....... j)       i <= n: [i, n) must be equal, [n, j) is new
                                        i >  n: a gap; the request is submitted again

Closed entries are removed at once: accepted == finished + cancelled + failed + open, always.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from moe_runtime.front.errors import (
    ApiError,
    GenerationFailed,
    GenerationTimeout,
    JournalError,
    TokenGap,
    TokenMismatch,
)
from moe_runtime.front.journal_records import (
    Accepted,
    Assigned,
    Closed,
    Deliver,
    Entry,
    Event,
    Instruction,
    OwnerIdle,
    OwnersLost,
    RequestState,
    Requeued,
    Send,
    StreamClosed,
    SubmitUndelivered,
    Tick,
    TokensReceived,
)
from moe_runtime.messages import Cancel, TokenItem

if TYPE_CHECKING:
    from collections.abc import Iterable

#: A request that outlives this many owners in a row without one new token is likely the reason.
FRUITLESS_ATTEMPTS_MAX = 10
#: A worker may report itself idle while a `Submit` is on its way; older ones were lost.
IDLE_GRACE_S = 3.0
# What a request will cost is not known: its budget is an upper bound that few use up.
EXPECTED_OUTPUT_TOKENS = 256


class Journal:
    """All open requests. Not thread-safe; `now` is a monotonic time in seconds."""

    def __init__(self, *, request_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s
        self._entries: dict[str, Entry] = {}
        self._last_progress_at = float("-inf")
        #: accepted, finished, cancelled, failed; requeued, stray_items, token_gaps, _mismatches
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str) -> Entry | None:
        """Return an open request."""
        return self._entries.get(request_id)

    def queued(self) -> list[Entry]:
        """Requests that need a worker, in the order they were accepted."""
        # Insertion order of the dict is the order of acceptance: entries are never put back.
        return [e for e in self._entries.values() if e.state is RequestState.QUEUED]

    def owned(self) -> Counter[str]:
        """Number of assigned requests per incarnation."""
        return Counter(e.owner for e in self._entries.values() if e.owner is not None)

    def outstanding_tokens(self) -> Counter[str]:
        """Tokens that each incarnation is expected to compute still."""
        total: Counter[str] = Counter()
        for entry in self._entries.values():
            if entry.owner is not None:
                total[entry.owner] += expected_tokens(entry)
        return total

    def stalled_s(self, now: float) -> float:
        """How long there has been assigned work, but no new token of any request."""
        since = min(
            (
                e.first_assigned_at
                for e in self._entries.values()
                if e.first_assigned_at is not None
            ),
            default=now,
        )
        return max(0.0, now - max(since, self._last_progress_at))

    def step(self, event: Event, now: float) -> list[Instruction]:
        """Take one event.

        Returns:
            What to do, in this order.
        """
        match event:
            case Accepted():
                return self._accept(event, now)
            case Assigned():
                return self._assign(event, now)
            case TokensReceived():
                return [
                    instruction
                    for item in event.items
                    for instruction in self._take_item(event.incarnation, item, now)
                ]
            case OwnersLost():
                lost = [e for e in self._entries.values() if e.owner in event.incarnations]
                return self._requeue_all(lost, now)
            case OwnerIdle():
                forgotten = [
                    e
                    for e in self._entries.values()
                    if e.owner == event.incarnation and now - e.last_contact_at > IDLE_GRACE_S
                ]
                return self._requeue_all(forgotten, now)
            case SubmitUndelivered():
                undelivered = self._addressed(event.wire_id)
                return self._requeue_all([undelivered] if undelivered else [], now)
            case StreamClosed():
                entry = self._entries.get(event.request_id)
                return [] if entry is None else self._close(entry, event.state, now)
            case Tick():
                return self._expire(now)

    def check_invariants(self) -> None:
        """Assert what holds between any two events."""
        closed = sum(self.counts[state] for state in ("finished", "cancelled", "failed"))
        assert self.counts["accepted"] == closed + len(self._entries)
        for request_id, entry in self._entries.items():
            assert entry.request_id == request_id
            assert entry.state in (RequestState.QUEUED, RequestState.ASSIGNED)
            assert (entry.owner is None) == (entry.state is RequestState.QUEUED)
            assert len(entry.generated) < entry.sampling.max_tokens

    def _accept(self, event: Accepted, now: float) -> list[Instruction]:
        assert event.request_id not in self._entries, f"request {event.request_id} exists"
        assert event.prompt_ids, f"request {event.request_id} has no prompt"
        assert event.sampling.max_tokens > 0, f"request {event.request_id} has no budget"
        self.counts["accepted"] += 1
        self._entries[event.request_id] = Entry(
            request_id=event.request_id,
            prompt_ids=event.prompt_ids,
            sampling=event.sampling,
            accepted_at=now,
            last_progress_at=now,
            last_contact_at=now,
        )
        return []

    def _assign(self, event: Assigned, now: float) -> list[Instruction]:
        entry = self._entries[event.request_id]
        assert entry.state is RequestState.QUEUED, f"{event.request_id} is {entry.state}"
        entry.become_assigned(event.incarnation, now)
        return [Send(incarnation=event.incarnation, message=entry.submission())]

    def _addressed(self, wire_id: str) -> Entry | None:
        """The entry whose current attempt has this id."""
        entry = self._entries.get(wire_id.rpartition(".")[0])
        return entry if entry is not None and entry.wire_id == wire_id else None

    def _take_item(self, incarnation: str, item: TokenItem, now: float) -> list[Instruction]:
        entry = self._addressed(item.request_id)
        if entry is None or entry.owner != incarnation:
            self.counts["stray_items"] += 1
            return []
        if item.finish_reason == "error" or item.error is not None:
            reason = item.error or "the worker gave no reason"
            entry.owner = None  # it has forgotten the request already
            return self._close(
                entry, RequestState.FAILED, now, error=GenerationFailed(reason=reason)
            )
        problem = _problem(entry, item)
        if problem is not None:
            self.counts["token_gaps" if isinstance(problem, TokenGap) else "token_mismatches"] += 1
            return self._resubmit(entry, problem, now)
        return self._extend(entry, item, now)

    def _extend(self, entry: Entry, item: TokenItem, now: float) -> list[Instruction]:
        room = entry.sampling.max_tokens - len(entry.generated)
        fresh = item.token_ids[len(entry.generated) - item.index :][:room]
        entry.extend(fresh, cached_tokens=item.cached_tokens, now=now)
        if fresh:
            self._last_progress_at = now
        finish_reason = item.finish_reason
        if finish_reason is None and len(entry.generated) >= entry.sampling.max_tokens:
            # Its owner was lost between the last token and saying so, or cannot count.
            finish_reason = "length"
        instructions: list[Instruction] = []
        if fresh or finish_reason is not None:
            instructions.append(
                Deliver(
                    request_id=entry.request_id,
                    token_ids=tuple(fresh),
                    finish_reason=finish_reason,
                )
            )
        if finish_reason is not None:
            if item.finish_reason is not None:
                entry.owner = None  # nothing to cancel
            instructions.extend(self._close(entry, RequestState.FINISHED, now))
        return instructions

    def _resubmit(self, entry: Entry, cause: JournalError, now: float) -> list[Instruction]:
        assert entry.owner is not None
        cancel = Send(incarnation=entry.owner, message=Cancel(request_id=entry.wire_id))
        return [cancel, *self._requeue(entry, cause, now)]

    def _requeue_all(self, entries: Iterable[Entry], now: float) -> list[Instruction]:
        return [i for entry in entries for i in self._requeue(entry, None, now)]

    def _requeue(self, entry: Entry, cause: JournalError | None, now: float) -> list[Instruction]:
        entry.become_queued()
        self.counts["requeued"] += 1
        if entry.fruitless_attempts >= FRUITLESS_ATTEMPTS_MAX:
            tried = f"{entry.fruitless_attempts} attempts in a row ended without a new token"
            error = GenerationFailed(reason=tried if cause is None else f"{tried}: {cause}")
            return self._close(entry, RequestState.FAILED, now, error=error)
        return [Requeued(request_id=entry.request_id, cause=cause)]

    def _expire(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for entry in list(self._entries.values()):
            waited_s = now - entry.last_progress_at
            if waited_s > self._request_timeout_s:
                error = GenerationTimeout(waited_s=waited_s, num_generated=len(entry.generated))
                instructions.extend(self._close(entry, RequestState.FAILED, now, error=error))
        return instructions

    def _close(
        self, entry: Entry, state: RequestState, now: float, *, error: ApiError | None = None
    ) -> list[Instruction]:
        """Remove the entry; an owner that still works on it is told to stop."""
        assert state not in (RequestState.QUEUED, RequestState.ASSIGNED)
        instructions: list[Instruction] = []
        if entry.owner is not None:
            message = Cancel(request_id=entry.wire_id)
            instructions.append(Send(incarnation=entry.owner, message=message))
        del self._entries[entry.request_id]
        entry.become_closed(state, now)
        self.counts[state.value] += 1
        instructions.append(Closed(entry=entry, error=error))
        return instructions


def expected_tokens(entry: Entry) -> int:
    """Tokens that a request is expected to cost still: its prefill, if due, and its output."""
    prefill = 0 if entry.made_progress else len(entry.prompt_ids) + len(entry.generated)
    remaining = entry.sampling.max_tokens - len(entry.generated)
    return prefill + min(remaining, EXPECTED_OUTPUT_TOKENS)


def _problem(entry: Entry, item: TokenItem) -> JournalError | None:
    """Why the item does not continue the entry, or None if it does."""
    count = len(entry.generated)
    if item.index > count:
        return TokenGap(request_id=entry.request_id, expected_index=count, index=item.index)
    known = entry.generated[item.index :]
    for offset, (expected, found) in enumerate(zip(known, item.token_ids, strict=False)):
        if expected != found:
            return TokenMismatch(
                request_id=entry.request_id,
                index=item.index + offset,
                expected=expected,
                found=found,
            )
    if item.finish_reason is not None and item.index + len(item.token_ids) < count:
        # The end of a request that went on: its owner has lost count.
        place = item.index + len(item.token_ids)
        return TokenMismatch(
            request_id=entry.request_id, index=place, expected=entry.generated[place], found=-1
        )
    return None
