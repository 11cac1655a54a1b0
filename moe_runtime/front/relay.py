"""Between HTTP and the workers: feeds journal and router, and performs what they say.

    generations <-- Deliver, Closed -- Journal <-- events -- worker messages, clients, clock
    workers     <-- Send ------------- Journal <-- Assigned -- Router.choose

Everything runs in one event loop and nothing in here awaits, so each event is handled whole.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from moe_runtime.front.errors import InvalidRequest, TooManyRequests, Unavailable
from moe_runtime.front.journal import Journal, expected_tokens
from moe_runtime.front.journal_records import (
    Accepted,
    Assigned,
    Closed,
    Deliver,
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
from moe_runtime.front.router import Router
from moe_runtime.messages import Goodbye, Hello, Load, Submit, Tokens, ViewCommitted

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.front.generation import Generation
    from moe_runtime.front.journal_records import Event, Sampling
    from moe_runtime.front.metrics import Metrics
    from moe_runtime.messages import FrontMessage, WorkerMessage

logger = logging.getLogger(__name__)

#: no word from any worker for this long, though they report every half second
SILENCE_S_MAX = 15.0
#: requests are open, but none has got a token for this long: generation does not work
STALL_S_MAX = 60.0


class Relay:
    """Owns journal, router and the open generations.

    Args:
        max_open_requests: More are refused.
        request_timeout_s: Longest time between two tokens of a request.
        send: Sends a message to a worker without blocking.
        on_view: Called with each newly adopted view.
        metrics: Told of everything that happens.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_open_requests: int,
        request_timeout_s: float,
        send: Callable[[str, FrontMessage], None],
        on_view: Callable[[ViewCommitted], None],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.journal = Journal(request_timeout_s=request_timeout_s)
        self.router = Router()
        self.draining = False
        self._max_open_requests = max_open_requests
        self._send = send
        self._on_view = on_view
        self._metrics = metrics
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def check_admission(self, num_wanted: int) -> None:
        """Raise if that many more requests cannot be opened now.

        Raises:
            Unavailable: The server drains.
            InvalidRequest: That many can never be open at once.
            TooManyRequests: Not at present.
        """
        if self.draining:
            raise Unavailable(reason="the server is shutting down")
        if num_wanted > self._max_open_requests:
            problem = f"{num_wanted} choices in one request, at most {self._max_open_requests}"
            raise InvalidRequest(problem=problem, param="n")
        if len(self.journal) + num_wanted > self._max_open_requests:
            self._metrics.refused.inc()
            raise TooManyRequests(
                num_open=len(self.journal), num_wanted=num_wanted, limit=self._max_open_requests
            )

    def open(self, generation: Generation, prompt_ids: list[int], sampling: Sampling) -> None:
        """Accept a request; its tokens go to `generation` until it is closed."""
        self._generations[generation.request_id] = generation
        self._empty.clear()
        self._step(
            Accepted(
                request_id=generation.request_id,
                prompt_ids=tuple(prompt_ids),
                sampling=sampling,
            )
        )

    def close(self, generation: Generation) -> None:
        """Nobody reads the generation any more; does nothing if it is over."""
        self._step(StreamClosed(request_id=generation.request_id))

    def receive(self, message: WorkerMessage) -> None:
        """Take a message of a worker."""
        now = self._clock()
        self.router.heard(message.incarnation, now)
        match message:
            case Tokens():
                items = tuple(message.items)
                self._step(TokensReceived(incarnation=message.incarnation, items=items))
            case Load():
                if self.router.load(message, now):
                    self._metrics.add_worker_counters(message.incarnation, message.counters)
                if not message.running and not message.waiting:
                    self._step(OwnerIdle(incarnation=message.incarnation))
            case Hello():
                known = self.router.hello(message, now)
                logger.info(
                    "worker %s: hello of rank %d%s",
                    message.incarnation,
                    message.rank,
                    "" if known else " (no longer a member, ignored)",
                )
                self._assign_queued()
            case ViewCommitted():
                self.adopt(message)
            case Goodbye():
                logger.info("worker %s: goodbye", message.incarnation)
                self._lose(self.router.goodbye(message))

    def adopt(self, message: ViewCommitted) -> None:
        """Take a committed view, from whoever saw it; older ones are ignored."""
        if message.epoch <= self.router.epoch:
            return
        lost = self.router.view(message)
        logger.info(
            "view %d: %d members, lost %s", message.epoch, len(message.members), sorted(lost)
        )
        self._lose(lost)
        self._on_view(message)

    def undelivered(self, incarnation: str, message: FrontMessage) -> None:
        """A message could not be sent to a worker."""
        logger.warning("worker %s cannot be reached", incarnation)
        self.router.unreachable(incarnation)
        if isinstance(message, Submit):
            self._step(SubmitUndelivered(wire_id=message.request_id))

    def tick(self) -> None:
        """Look at the deadlines; call it about every second."""
        self._step(Tick())

    def unhealthy_reason(self) -> str | None:
        """Why generation does not work at present; None if it does."""
        if self.draining:
            return "the server is shutting down"
        if not self.router.epoch:
            return "no view has been committed yet"
        routable = self.router.routable()
        if not routable:
            return f"view {self.router.epoch} has no worker that takes requests"
        now = self._clock()
        silence_s = now - max(self.router.workers[name].heard_at for name in routable)
        if silence_s > SILENCE_S_MAX:
            return f"no worker has reported for {silence_s:.0f} s"
        stalled_s = self.journal.stalled_s(now)
        if stalled_s > STALL_S_MAX:
            return f"requests are open, but no token has come for {stalled_s:.0f} s"
        return None

    def fail_open(self, reason: str) -> None:
        """End every open generation with an error; their readers close them."""
        for generation in self._generations.values():
            generation.fail(Unavailable(reason=reason))

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no request is open; False if the time ran out before."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _lose(self, incarnations: frozenset[str]) -> None:
        for incarnation in incarnations:
            self._metrics.forget_worker(incarnation)
        # Assigns what is queued even if nobody was lost: a view may have brought a worker.
        self._step(OwnersLost(incarnations=incarnations))

    def _step(self, event: Event) -> None:
        self._perform(event)
        self._assign_queued()

    def _perform(self, event: Event) -> None:
        now = self._clock()
        for instruction in self.journal.step(event, now):
            match instruction:
                case Send():
                    self._send(instruction.incarnation, instruction.message)
                case Deliver():
                    self._deliver(instruction, now)
                case Requeued():
                    self._metrics.resubmitted.inc()
                    cause = instruction.cause or "its worker was lost"
                    logger.warning(
                        "request %s is submitted again: %s", instruction.request_id, cause
                    )
                case Closed():
                    self._closed(instruction)

    def _deliver(self, instruction: Deliver, now: float) -> None:
        generation = self._generations.get(instruction.request_id)
        if generation is None:
            return  # a stop string in an earlier item of the same message has ended it
        if instruction.token_ids:
            self._metrics.observe_tokens(
                len(instruction.token_ids), now=now, previous=generation.last_token_at
            )
            generation.last_token_at = now
        entry = self.journal.get(instruction.request_id)
        if entry is not None:
            generation.cached_tokens = entry.cached_tokens or 0
        if generation.deliver(instruction.token_ids, instruction.finish_reason):
            self._perform(
                StreamClosed(request_id=instruction.request_id, state=RequestState.FINISHED)
            )

    def _closed(self, instruction: Closed) -> None:
        entry = instruction.entry
        generation = self._generations.pop(entry.request_id)
        generation.cached_tokens = entry.cached_tokens or 0
        if instruction.error is not None:
            logger.warning("request %s failed: %s", entry.request_id, instruction.error)
            generation.fail(instruction.error)
        self._metrics.observe_closed(entry)
        if not self._generations:
            self._empty.set()

    def _assign_queued(self) -> None:
        queued = self.journal.queued()
        if not queued:
            return
        outstanding = self.journal.outstanding_tokens()
        for entry in queued:
            incarnation = self.router.choose(entry.prompt_ids, outstanding)
            if incarnation is None:
                return  # it waits for a worker, up to its deadline
            self._perform(Assigned(request_id=entry.request_id, incarnation=incarnation))
            outstanding[incarnation] += expected_tokens(entry)
