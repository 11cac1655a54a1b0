"""The loop of one rank: take messages, agree on the view, run a pass, report the tokens.

    +-> messages from the front -> scheduler
    |   view changes (coordinator): a pass that was cut short has had no effect and runs again
    |   plan -> forward (attention here, experts everywhere) -> sample -> scheduler -> tokens out
    +-- idle: sleep until a peer begins a pass, a message arrives, or a view changes

Every active rank takes part in every pass. A rank without tokens of its own computes only its
experts; it is woken by the first message of a pass and never polls.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from dispatch import PassFailed
from moe_runtime.messages import Cancel, Drain, Load, Stop, Submit, TokenItem, Tokens
from moe_runtime.models.batch import SequenceInput, build_batch
from moe_runtime.request import PassPlan, Request
from moe_runtime.sampling import LogitsInvalid, SamplingParams, sample
from moe_runtime.scheduler import Emit, FetchBlocks, Instruction, StoreBlock
from transfer import Interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dispatch import TransferDispatcher
    from elastic import Coordinator, View
    from moe_runtime.dispatch_load import DispatchLoad
    from moe_runtime.front_link import FrontLink
    from moe_runtime.messages import FrontMessage
    from moe_runtime.models.paged_kv import PagedKV
    from moe_runtime.models.qwen3_moe import Qwen3MoeModel
    from moe_runtime.pages import PagePool
    from moe_runtime.pooled_blocks import PooledBlocks
    from moe_runtime.scheduler import Scheduler
    from transfer import TransferEngine

logger = logging.getLogger(__name__)
LOAD_INTERVAL_S = 0.5


class RankLoop:
    """Drives one life of one rank. Everything here runs on one thread, that of `run`."""

    def __init__(
        self,
        *,
        incarnation: str,
        view: View,
        engine: TransferEngine,
        coordinator: Coordinator,
        dispatcher: TransferDispatcher,
        model: Qwen3MoeModel,
        kv: PagedKV,
        pool: PagePool,
        scheduler: Scheduler,
        blocks: PooledBlocks | None,
        link: FrontLink,
        eos_token_ids: tuple[int, ...],
        idle_interval_s: float,
        dispatch_load: DispatchLoad | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._engine = engine
        self._coordinator = coordinator
        self._dispatcher = dispatcher
        self._model = model
        self._kv = kv
        self._pool = pool
        self._scheduler = scheduler
        self._blocks = blocks
        self._link = link
        self._eos_token_ids = eos_token_ids
        self._idle_interval_s = idle_interval_s
        self._dispatch_load = dispatch_load
        self._epoch = view.epoch
        self._members = view.incarnations
        self._next_load = 0.0
        self._leaving = False
        self._stopping = False
        self._counters: defaultdict[str, float] = defaultdict(float)

    def request_stop(self) -> None:
        """End the loop after the pass in progress (safe in a signal handler and in any thread)."""
        self._stopping = True
        self._engine.wake()

    def request_leave(self) -> None:
        """Leave the group in a planned way, then end the loop (safe in a signal handler)."""
        self._leaving = True
        self._engine.wake()

    def run(self) -> None:
        """Serve until told to stop or leave.

        Raises:
            Evicted: The committed view does not contain this incarnation.
        """
        while not self._stopping:
            try:
                self._adopt(self._coordinator.poll())
                if self._leaving:
                    self._coordinator.leave()
                    return
                self._take_messages()
                self._settle_blocks()
                self._report_load()
                self._step()
            except Interrupted:
                continue  # a view change is waiting in the coordinator: `poll` performs it
            except PassFailed as failure:
                self._counters["passes_aborted"] += 1
                view = self._coordinator.report(failure.suspects, failure.evidence)
                # Others of a planned change may go on first, and end a pass that nobody failed in.
                is_planned = self._members <= view.incarnations
                level = logging.INFO if is_planned else logging.WARNING
                logger.log(level, "pass given up, epoch %d follows: %s", view.epoch, failure)
                self._adopt(view)

    def _adopt(self, view: View | None) -> None:
        if view is None:
            return
        self._epoch, self._members = view.epoch, view.incarnations
        self._next_load = 0.0
        change = self._coordinator.last_change
        if change is not None:
            self._counters["view_noticed_s"] = change.noticed_s
            self._counters["view_committed_s"] = change.committed_s
            self._counters["view_installed_s"] = change.installed_s

    def _step(self) -> None:
        plan, instructions = self._scheduler.plan()
        self._perform(instructions)
        if not plan.chunks:
            keys = self._dispatcher.pass_started_by_peer()
            if not keys:
                self._engine.wait_any([], timeout_s=self._idle_interval_s)
                return
            if not self._engine.wait_any(keys, timeout_s=self._idle_interval_s):
                return
        self._run_pass(plan)

    def _run_pass(self, plan: PassPlan) -> None:
        """Compute one pass. It has no effect, here or elsewhere, unless it completes."""
        batch = build_batch(
            [
                SequenceInput(
                    token_ids=chunk.request.token_ids[chunk.start : chunk.start + chunk.count],
                    first_position=chunk.start,
                    block_table=tuple(chunk.request.pages),
                    logits=int(chunk.samples),
                )
                for chunk in plan.chunks
            ],
            page_tokens=self._kv.page_tokens,
        )
        self._dispatcher.begin_pass()
        logits = self._model.forward(batch, self._kv, self._dispatcher)
        self._dispatcher.end_pass()
        self._counters["passes"] += 1
        self._counters["tokens_computed"] += plan.num_tokens
        sampled, failed = sample_each(
            logits, [chunk.request for chunk in plan.chunks if chunk.samples]
        )
        for request, error in failed:
            self._give_up(request, error)
        if failed:
            without = [request.request_id for request, _ in failed]
            kept = [c for c in plan.chunks if c.request.request_id not in without]
            plan = PassPlan(chunks=tuple(kept))
        self._perform(self._scheduler.complete(plan, sampled))

    def _give_up(self, request: Request, error: LogitsInvalid) -> None:
        """End one request by an error; the others of its pass go on."""
        logger.error("request %s: %s", request.request_id, error)
        self._scheduler.cancel(request.request_id)
        item = TokenItem(
            request_id=request.request_id,
            index=request.num_output,
            token_ids=[],
            finish_reason="error",
            error=str(error),
        )
        self._link.send(Tokens(incarnation=self._incarnation, items=[item]))

    def _perform(self, instructions: list[Instruction]) -> None:
        items: list[TokenItem] = []
        stores: list[StoreBlock] = []
        for instruction in instructions:
            match instruction:
                case Emit():
                    items.append(_token_item(instruction))
                case StoreBlock():
                    stores.append(instruction)
                case FetchBlocks():
                    assert self._blocks is not None
                    self._blocks.fetch(instruction)
        if stores:
            self._store(stores)
        if items:
            self._counters["tokens_generated"] += len(items)
            self._link.send(Tokens(incarnation=self._incarnation, items=items))

    def _store(self, stores: list[StoreBlock]) -> None:
        if self._blocks is None:
            self._pool.release(store.page for store in stores)
        else:
            self._blocks.store(stores)

    def _settle_blocks(self) -> None:
        if self._blocks is None:
            return
        self._pool.release(self._blocks.stored_pages())
        for fetched in self._blocks.fetched():
            self._scheduler.fetched(fetched.request_id, fetched.num_blocks)

    def _take_messages(self) -> None:
        for message in self._link.received():
            self._take(message)

    def _take(self, message: FrontMessage) -> None:
        match message:
            case Submit():
                self._scheduler.submit(_request(message, self._eos_token_ids))
            case Cancel():
                self._scheduler.cancel(message.request_id)
            case Drain():
                self.request_leave()
            case Stop():
                self.request_stop()  # the link has told us already

    def _report_load(self) -> None:
        now = time.monotonic()
        if now < self._next_load:
            return
        self._next_load = now + LOAD_INTERVAL_S
        gauges: dict[str, float] = {}
        if self._dispatch_load is not None:
            gauges = self._dispatch_load.gauges(self._dispatch_load.update(now))
        self._link.send(
            Load(
                incarnation=self._incarnation,
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                free_pages=self._pool.num_available,
                num_pages=self._pool.num_pages,
                epoch=self._epoch,
                counters=self._all_counters(),
                gauges=gauges,
            )
        )

    def _all_counters(self) -> dict[str, float]:
        counters = self._counters | {"preemptions": float(self._scheduler.num_preemptions)}
        if self._dispatch_load is not None:
            counters |= self._dispatch_load.counters()
        return counters if self._blocks is None else counters | self._blocks.counters()


def sample_each(
    logits: torch.Tensor, requests: Sequence[Request]
) -> tuple[list[int], list[tuple[Request, LogitsInvalid]]]:
    """Sample the next token of each request.

    Args:
        logits: [S, V] float32, one row for each request.
        requests: S requests.

    Returns:
        The tokens of those that have one, in order; and the others, whose logits are no
        distribution. Such a request would fail on every worker, and must not end them.
    """
    failed: list[tuple[Request, LogitsInvalid]] = []
    while True:
        try:
            tokens = sample(
                logits,
                [request.sampling for request in requests],
                [len(request.token_ids) for request in requests],
                outputs=[request.num_output for request in requests],
            )
        except LogitsInvalid as error:
            failed.append((requests[error.row], error))
            kept = [row for row in range(len(requests)) if row != error.row]
            logits, requests = logits[kept], [requests[row] for row in kept]
        else:
            return tokens, failed


def _token_item(emit: Emit) -> TokenItem:
    return TokenItem(
        request_id=emit.request_id,
        index=emit.index,
        token_ids=[emit.token_id],
        finish_reason=emit.finish_reason,
        cached_tokens=emit.num_cached,
        error=None,
    )


def _request(message: Submit, eos_token_ids: tuple[int, ...]) -> Request:
    return Request(
        request_id=message.request_id,
        token_ids=[*message.prompt_ids, *message.output_ids],
        num_prompt=len(message.prompt_ids),
        sampling=SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            seed=message.seed,
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            eos_token_ids=eos_token_ids,
        ),
    )
