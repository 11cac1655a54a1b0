"""Continuous batching with chunked prefill on one rank: a state machine without I/O or tensors.

    submit -> WAITING -> (FETCHING: pool blocks are copied in) -> RUNNING -> finished | cancelled
                 ^                                                  |
                 +------------------ preempted ---------------------+

A pass takes every decodable request first (one token each), then prefill chunks in order of
arrival, up to the token budget. A request that finds no page for its next token preempts the
latest arrival; a preempted request starts over from whatever prefix is still cached. That
changes no token: what is computed again has the same bits.

The scheduler owns the `Request` objects and the page pool; the rank loop performs the returned
instructions and reports back. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from moe_runtime.request import Chunk, PassPlan, Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moe_runtime.pages import PagePool


class BlockKeyChain(Protocol):
    """Names a full block of tokens by its content and everything before it."""

    def __call__(self, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        """Key of the block `token_ids` that follows the block named `parent`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBlocks:
    """Copy the pool's blocks `keys` into `pages`, as many from the start as there are.

    Answer with `Scheduler.fetched`; the pages stay the request's until then.
    """

    request_id: str
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlock:
    """Write the full block in `page` through to the pool as `key`.

    The page has a holder of its own for this; release it when the bytes were read. `parent` is the
    key of the block before it, `tokens` are its own: for subscribers of the pool's events.
    """

    key: bytes
    page: int
    parent: bytes | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """A token was generated; `finish_reason` is set on the last one."""

    request_id: str
    index: int
    token_id: int
    finish_reason: Literal["stop", "length"] | None
    num_cached: int


Instruction = FetchBlocks | StoreBlock | Emit


class Scheduler:
    """Decides what one rank computes in each pass."""

    def __init__(
        self,
        pool: PagePool,
        *,
        page_tokens: int,
        token_budget: int,
        max_running: int,
        block_key: BlockKeyChain,
        fetch_from_pool: bool,
    ) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._token_budget = token_budget
        self._max_running = max_running
        self._block_key = block_key
        self._fetch_from_pool = fetch_from_pool
        self._waiting: deque[Request] = deque()
        self._fetching: dict[str, tuple[Request, tuple[int, ...]]] = {}
        #: cancelled while the pool still copies into their pages
        self._abandoned: set[str] = set()
        self._running: list[Request] = []
        self._arrivals = 0
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        """Requests with pages, those being fetched included."""
        return len(self._running) + len(self._fetching)

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no request needs this rank."""
        return not (self._waiting or self._fetching or self._running)

    def request_ids(self) -> Iterator[str]:
        """Every request that is neither finished nor cancelled."""
        for request in (*self._waiting, *self._running):
            yield request.request_id
        yield from self._fetching.keys() - self._abandoned

    def submit(self, request: Request) -> None:
        """Queue a request (a continuation carries the output so far in `token_ids`)."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._waiting.append(request)

    def cancel(self, request_id: str) -> bool:
        """Forget a request and give its pages back; False if it is not here."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return True
        for request in self._running:
            if request.request_id == request_id:
                self._running.remove(request)
                self._drop_pages(request)
                return True
        if request_id in self._fetching and request_id not in self._abandoned:
            self._abandoned.add(request_id)
            return True
        return False

    def fetched(self, request_id: str, num_blocks: int) -> None:
        """The pool's copy is over: the first `num_blocks` of the pages asked for are good."""
        request, pages = self._fetching.pop(request_id)
        self._pool.release(pages[num_blocks:])
        request.pages.extend(pages[:num_blocks])
        if request_id in self._abandoned:
            self._abandoned.remove(request_id)
            self._drop_pages(request)
            return
        request.num_computed = len(request.pages) * self._page_tokens
        request.num_cached = request.num_computed
        self._publish_full_blocks(request)
        self._running.append(request)

    def plan(self) -> tuple[PassPlan, list[Instruction]]:
        """Choose the chunks of the next pass, and admit what fits."""
        instructions = self._admit()
        chunks: list[Chunk] = []
        budget = self._token_budget
        # Fewest remaining first: decodes (one token) go before prefill chunks. The sort is stable,
        # so that within each kind the order of arrival holds.
        for request in sorted(self._running, key=lambda r: (r.num_remaining > 1, r.arrival)):
            count = min(request.num_remaining, budget)
            if count == 0 or request not in self._running:
                continue
            if not self._reserve(request, request.num_computed + count, chunks):
                continue
            chunks.append(Chunk(request=request, start=request.num_computed, count=count))
            budget -= count
        return PassPlan(chunks=tuple(chunks)), instructions

    def complete(self, plan: PassPlan, sampled: Sequence[int]) -> list[Instruction]:
        """Take the results of a pass: one sampled token for each chunk that `samples`, in order.

        A pass that was aborted is never completed: planning it again gives the same chunks.
        """
        instructions: list[Instruction] = []
        tokens = iter(sampled)
        for chunk in plan.chunks:
            request = chunk.request
            samples = chunk.samples
            request.num_computed = chunk.start + chunk.count
            instructions.extend(self._publish_full_blocks(request))
            if samples:
                instructions.append(self._append(request, next(tokens)))
        return instructions

    def drop_all(self) -> None:
        """Forget every request (they belong to somebody else now); fetches end as abandoned."""
        self._waiting.clear()
        for request in self._running:
            self._drop_pages(request)
        self._running.clear()
        self._abandoned.update(self._fetching)

    def _admit(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._waiting and self.num_running < self._max_running:
            request = self._waiting[0]
            self._extend_keys(request)
            # The last token is computed in any case: its logits are what the request waits for.
            usable = (len(request.token_ids) - 1) // self._page_tokens
            pages = self._pool.share_prefix(request.block_keys[:usable])
            missing = usable - len(pages) if self._fetch_from_pool else 0
            if self._pool.num_available < max(1, missing):
                self._pool.release(pages)
                break
            self._waiting.popleft()
            request.pages = pages
            request.num_computed = len(pages) * self._page_tokens
            request.num_cached = request.num_computed
            request.num_published = len(pages)
            if not missing:
                self._running.append(request)
                continue
            reserved = self._pool.allocate(missing)
            assert reserved is not None
            self._fetching[request.request_id] = (request, tuple(reserved))
            keys = tuple(request.block_keys[len(pages) : usable])
            instructions.append(
                FetchBlocks(request_id=request.request_id, keys=keys, pages=tuple(reserved))
            )
        return instructions

    def _reserve(self, request: Request, num_tokens: int, planned: list[Chunk]) -> bool:
        """Give `request` pages for its first `num_tokens`; later arrivals may be preempted."""
        needed = -(-num_tokens // self._page_tokens) - len(request.pages)
        while needed > 0:
            pages = self._pool.allocate(needed)
            if pages is not None:
                request.pages.extend(pages)
                return True
            in_pass = {id(chunk.request) for chunk in planned}
            victims = [
                r for r in self._running if r.arrival > request.arrival and id(r) not in in_pass
            ]
            if not victims:
                return False
            self._preempt(max(victims, key=lambda r: r.arrival))
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._running.remove(request)
        self._drop_pages(request)
        self._waiting.appendleft(request)

    def _drop_pages(self, request: Request) -> None:
        self._pool.release(request.pages)
        request.pages = []
        request.num_computed = request.num_published = 0

    def _extend_keys(self, request: Request) -> None:
        keys, size = request.block_keys, self._page_tokens
        for start in range(len(keys) * size, len(request.token_ids) - size + 1, size):
            parent = keys[-1] if keys else None
            keys.append(self._block_key(parent, request.token_ids[start : start + size]))

    def _store_block(self, request: Request, block: int, key: bytes, page: int) -> StoreBlock:
        start = block * self._page_tokens
        return StoreBlock(
            key=key,
            page=page,
            parent=request.block_keys[block - 1] if block else None,
            tokens=tuple(request.token_ids[start : start + self._page_tokens]),
        )

    def _publish_full_blocks(self, request: Request) -> list[Instruction]:
        """Publish the blocks that `num_computed` has completed, and write new ones through."""
        full = request.num_computed // self._page_tokens
        if full <= request.num_published:
            return []
        self._extend_keys(request)
        instructions: list[Instruction] = []
        for block in range(request.num_published, full):
            key, page = request.block_keys[block], request.pages[block]
            if self._pool.publish(page, key) and block * self._page_tokens >= request.num_cached:
                self._pool.hold(page)
                instructions.append(self._store_block(request, block, key, page))
        request.num_published = full
        return instructions

    def _append(self, request: Request, token_id: int) -> Emit:
        index = request.num_output
        request.token_ids.append(token_id)
        finish_reason = request.sampling.finish_reason(token_id, num_output=index + 1)
        if finish_reason is not None:
            self._running.remove(request)
            self._drop_pages(request)
        return Emit(
            request_id=request.request_id,
            index=index,
            token_id=token_id,
            finish_reason=finish_reason,
            num_cached=request.num_cached,
        )
