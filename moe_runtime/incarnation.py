"""One life of a worker in the group: everything that ends when it is fenced.

A worker that was taken for dead (stopped too long, cut off) finds itself outside the view. It
keeps its process, model and expert weights, and starts a new life under a new name: new transfer
engine, new receive windows, new pool segment, an empty scheduler. Its requests belong to others
already; what its old name still says is ignored.

    Weights (worker.py)         kept from life to life
    Incarnation (here)          engine -> pool client -> coordinator -> rank loop, closed in reverse
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatch import DispatchLayout, TransferDispatcher
from elastic import Coordinator, ElasticError, ExpertLoader, Member, Role, Stopped
from elastic.expert_server import ExpertServer, Slabs
from elastic.expert_source import EachExpert
from elastic.peer_experts import PeerExpertSource
from kvstore import KVStoreError
from moe_runtime.dispatch_load import DispatchLoad
from moe_runtime.front_link import FrontLink
from moe_runtime.group_member import WorkerMember
from moe_runtime.messages import Goodbye, Hello
from moe_runtime.pages import PagePool
from moe_runtime.pool_access import PoolAccess
from moe_runtime.rank_loop import RankLoop
from moe_runtime.scheduler import Scheduler
from transfer import TransferEngine, TransferError

if TYPE_CHECKING:
    import torch

    from configs.schema import RuntimeConfig
    from elastic import MembershipStore
    from moe_runtime.models.checkpoint import Checkpoint
    from moe_runtime.models.experts import ExpertBank
    from moe_runtime.models.paged_kv import PagedKV
    from moe_runtime.models.qwen3_moe import Qwen3MoeModel
    from transfer import Memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a worker process keeps from life to life; the worker frees it.

    Attributes:
        checkpoint: Open; read when an expert is nowhere else.
        kv_memory: The memory under `kv`.
        fingerprint: Names the weights: equal on workers that serve the same checkpoint.
    """

    checkpoint: Checkpoint
    bank: ExpertBank
    model: Qwen3MoeModel
    kv: PagedKV
    kv_memory: Memory
    dtype: torch.dtype
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a worker finds the rest of the cluster.

    Attributes:
        front_address: "host:port" of the front's worker link.
        master_address: "host:port" of the front's store master; "" if the configuration says
            where the masters are.
    """

    secret: bytes
    membership: MembershipStore
    front_address: str
    master_address: str
    rank: int
    node: str


class Incarnation:
    """One life: construct, `run`, and it is over. Only `stop` and `leave` may come from outside."""

    def __init__(
        self, config: RuntimeConfig, weights: Weights, around: Surroundings, *, name: str
    ) -> None:
        self.name = name
        self._config = config
        self._weights = weights
        self._around = around
        self._loop: RankLoop | None = None
        self._stop_wanted = False
        self._coordinator: Coordinator | None = None

    def stop(self) -> None:
        """End after the pass in progress (safe in a signal handler)."""
        self._stop_wanted = True
        if self._coordinator is not None:
            self._coordinator.stop()
        if self._loop is not None:
            self._loop.request_stop()

    def leave(self) -> None:
        """Leave the group in a planned way, then end (safe in a signal handler)."""
        if self._loop is None:
            self.stop()  # not a member yet, so there is nothing to hand over
        else:
            self._loop.request_leave()

    def run(self) -> None:
        """Join the group and serve until told to end.

        Raises:
            Evicted: The group goes on without this incarnation.
        """
        with ExitStack() as stack, suppress(Stopped):
            loop = self._build(stack)
            # Forgotten before the engine closes: a late signal must not wake what is gone.
            stack.callback(self._forget)
            self._loop = loop
            if not self._stop_wanted:
                loop.run()

    def _forget(self) -> None:
        self._loop = self._coordinator = None

    def _build(self, stack: ExitStack) -> RankLoop:
        """Put the life together; everything that listens exists before the engine opens."""
        config, weights, around = self._config, self._weights, self._around
        engine = TransferEngine(config.transfer, name=self.name, secret=around.secret)
        link = FrontLink(
            around.front_address,
            around.secret,
            incarnation=self.name,
            on_arrival=engine.wake,
            on_stop=self.stop,
        )
        access = PoolAccess(config, weights, engine, around)
        slabs = Slabs(engine, weights.bank)
        server = ExpertServer(engine, weights.bank, slabs)
        dispatcher = TransferDispatcher(engine, config.dispatch, layout=self._layout())
        loader = self._loader(engine, slabs, access)
        coordinator = self._new_coordinator(engine, self._member(dispatcher, loader, link))
        self._coordinator = coordinator
        for part in (engine, link, access):
            stack.callback(part.close)
            part.open()
        # Closed after the server, whose thread hands them out.
        stack.callback(slabs.close)
        stack.callback(server.close)
        server.open()
        stack.callback(coordinator.close)
        view = coordinator.join()
        access.back_up_experts()
        stack.callback(lambda: link.send(Goodbye(incarnation=self.name)))
        link.send(self._hello(view.epoch))
        pool = PagePool(weights.kv.num_pages)
        return RankLoop(
            incarnation=self.name,
            view=view,
            engine=engine,
            coordinator=coordinator,
            dispatcher=dispatcher,
            model=weights.model,
            kv=weights.kv,
            pool=pool,
            scheduler=self._scheduler(pool, access),
            blocks=access.blocks,
            link=link,
            eos_token_ids=weights.checkpoint.spec.eos_token_ids,
            idle_interval_s=config.elastic.watch_interval_s,
            dispatch_load=DispatchLoad(dispatcher, self._around.rank),
        )

    def _layout(self) -> DispatchLayout:
        spec = self._weights.checkpoint.spec
        return DispatchLayout(
            hidden=spec.hidden_size,
            topk=spec.topk,
            num_logical=spec.num_experts,
            num_layers=spec.num_moe_layers,
            dtype=self._weights.dtype,
            max_tokens=self._config.scheduler.token_budget,
            microbatches=self._config.dispatch.microbatches,
            combine=self._config.dispatch.combine,
            dispatch_wire=self._config.dispatch.dispatch_wire,
            combine_wire=self._config.dispatch.combine_wire,
        )

    def _loader(self, engine: TransferEngine, slabs: Slabs, access: PoolAccess) -> ExpertLoader:
        bank = self._weights.bank
        sources = [
            PeerExpertSource(
                engine, bank, slabs, peers=lambda: [p.name for p in engine.peers() if p.alive]
            ),
            *access.expert_sources(slabs),
            EachExpert("disk", bank, self._read_from_disk),
        ]
        recoverable = (TransferError, ElasticError, KVStoreError, OSError)
        return ExpertLoader(bank, sources, recoverable=recoverable)

    def _member(
        self, dispatcher: TransferDispatcher, loader: ExpertLoader, link: FrontLink
    ) -> WorkerMember:
        return WorkerMember(
            rank=self._around.rank,
            incarnation=self.name,
            dispatcher=dispatcher,
            bank=self._weights.bank,
            loader=loader,
            missing_experts=self._config.elastic.missing_experts,
            warm_up=self._warm_up,
            link=link,
        )

    def _warm_up(self) -> None:
        weights = self._weights
        weights.model.warm_up(
            page_tokens=weights.kv.page_tokens,
            context_len_max=max_context_tokens(self._config, weights.checkpoint),
        )

    def _new_coordinator(self, engine: TransferEngine, member: WorkerMember) -> Coordinator:
        around, spec = self._around, self._weights.checkpoint.spec
        identity = Member(
            rank=around.rank,
            incarnation=self.name,
            role=Role.BOTH,
            node=around.node,
            address="",
            pid=os.getpid(),
        )
        return Coordinator(
            self._config.elastic,
            store=around.membership,
            engine=engine,
            member=member,
            identity=identity,
            num_layers=spec.num_moe_layers,
            num_logical=spec.num_experts,
            expected_workers=self._config.cluster.workers,
        )

    def _read_from_disk(self, layer: int, expert: int, place: torch.Tensor) -> bool:
        weights = self._weights
        weights.checkpoint.read_expert(layer, expert, weights.bank.as_matrices(place))
        return True

    def _scheduler(self, pool: PagePool, access: PoolAccess) -> Scheduler:
        knobs = self._config.scheduler
        return Scheduler(
            pool,
            page_tokens=knobs.page_tokens,
            token_budget=knobs.token_budget,
            max_running=knobs.max_running,
            block_key=access.block_key,
            fetch_from_pool=access.blocks is not None,
        )

    def _hello(self, epoch: int) -> Hello:
        return Hello(
            incarnation=self.name,
            rank=self._around.rank,
            epoch=epoch,
            max_context_tokens=max_context_tokens(self._config, self._weights.checkpoint),
            kv_pages=self._weights.kv.num_pages,
        )


def max_context_tokens(config: RuntimeConfig, checkpoint: Checkpoint) -> int:
    """Prompt plus output that one request may have: the model's limit, the pages', the user's."""
    knobs = config.scheduler
    limits = [checkpoint.spec.max_position_embeddings, knobs.num_pages * knobs.page_tokens]
    if knobs.max_context_tokens is not None:
        limits.append(knobs.max_context_tokens)
    return min(limits)
