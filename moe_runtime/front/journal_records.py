"""What the journal holds, takes and returns: entries, events, instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from moe_runtime.front.errors import ApiError, JournalError
from moe_runtime.messages import FinishReason, FrontMessage, Submit, TokenItem


class RequestState(StrEnum):
    """Where a request is in its life."""

    QUEUED = "queued"
    ASSIGNED = "assigned"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen and when they end; the fields are those of `Submit`.

    The seed is always fixed, so that another worker goes on with the same tokens.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Entry:
    """One open request.

    Attributes:
        owner: Incarnation that works on it; None while queued.
        attempt: Assignments so far.
        fruitless_attempts: Assignments since the last new token.
        made_progress: Whether the current attempt brought a token.
        cached_tokens: Prompt tokens that the first attempt did not have to compute.
        last_progress_at: Of acceptance or the last new token; the deadline counts from it.
        last_contact_at: Of acceptance, assignment or the last item.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    accepted_at: float
    last_progress_at: float
    last_contact_at: float
    state: RequestState = RequestState.QUEUED
    owner: str | None = None
    attempt: int = 0
    fruitless_attempts: int = 0
    made_progress: bool = False
    generated: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    first_assigned_at: float | None = None
    first_token_at: float | None = None
    closed_at: float | None = None

    @property
    def wire_id(self) -> str:
        """Name of the current attempt."""
        return f"{self.request_id}.{self.attempt}"

    def become_assigned(self, incarnation: str, now: float) -> None:
        """Give it to a worker."""
        self.state = RequestState.ASSIGNED
        self.owner = incarnation
        self.attempt += 1
        self.fruitless_attempts += 1
        self.made_progress = False
        self.last_contact_at = now
        if self.first_assigned_at is None:
            self.first_assigned_at = now

    def become_queued(self) -> None:
        """Take it from its worker."""
        assert self.state is RequestState.ASSIGNED, f"{self.request_id} is {self.state}"
        self.state = RequestState.QUEUED
        self.owner = None
        self.made_progress = False

    def become_closed(self, state: RequestState, now: float) -> None:
        """End it."""
        self.state = state
        self.owner = None
        self.closed_at = now

    def extend(self, token_ids: list[int], *, cached_tokens: int, now: float) -> None:
        """Append new tokens."""
        self.last_contact_at = now
        if self.cached_tokens is None:
            self.cached_tokens = min(cached_tokens, len(self.prompt_ids))
        if not token_ids:
            return
        self.generated.extend(token_ids)
        self.last_progress_at = now
        self.fruitless_attempts = 0
        self.made_progress = True
        if self.first_token_at is None:
            self.first_token_at = now

    def submission(self) -> Submit:
        """The current attempt as a worker is told it."""
        sampling = self.sampling
        return Submit(
            request_id=self.wire_id,
            prompt_ids=list(self.prompt_ids),
            output_ids=list(self.generated),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A client's request passed all checks."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The router chose a worker for a queued request."""

    request_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensReceived:
    """A worker sent tokens."""

    incarnation: str
    items: tuple[TokenItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersLost:
    """Workers left: the view no longer names them, or they said goodbye."""

    incarnations: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerIdle:
    """A worker says that it has no request: what it was given long ago never arrived."""

    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitUndelivered:
    """A `Submit` could not be sent."""

    wire_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """Nobody reads on: CANCELLED (the client is gone) or FINISHED (a stop string was found)."""

    request_id: str
    state: RequestState = RequestState.CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Event: TypeAlias = (
    Accepted
    | Assigned
    | TokensReceived
    | OwnersLost
    | OwnerIdle
    | SubmitUndelivered
    | StreamClosed
    | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message to a worker."""

    incarnation: str
    message: FrontMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Hand new tokens to the reader of a request; `finish_reason` is set on the last."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """A request needs another worker."""

    request_id: str
    cause: JournalError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A request is over and no longer in the journal; `error` is for its reader."""

    entry: Entry
    error: ApiError | None


Instruction: TypeAlias = Send | Deliver | Requeued | Closed
