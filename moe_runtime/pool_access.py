"""A worker's ends of the KV pool: the segment it lends, its client, and the traffic of both.

With `kvstore.enabled: false` there is none of it: blocks are reused only on the rank that
computed them, and experts without a living copy come from disk.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from kvstore import (
    StoreClient,
    StoreNode,
    Tenant,
    WriteThrough,
    block_namespace,
    prefix_keys,
)
from kvstore.discovery.finding import directory_of, followed
from moe_runtime.block_fetcher import BlockFetcher
from moe_runtime.expert_backup import ExpertBackup
from moe_runtime.integrations.deepnvme import slab_for
from moe_runtime.pool_load import pool_counters
from moe_runtime.pooled_blocks import PooledBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from configs.schema import RuntimeConfig
    from elastic import ExpertSource
    from elastic.expert_server import Slabs
    from kvstore.discovery.directory import MasterDirectory
    from moe_runtime.incarnation import Surroundings, Weights
    from transfer import TransferEngine

logger = logging.getLogger(__name__)


class PoolAccess:
    """Segment, client and block traffic of one incarnation.

    Construct it before the engine is opened (node and client listen to notifies), `open` it after.
    """

    def __init__(
        self, config: RuntimeConfig, weights: Weights, engine: TransferEngine, around: Surroundings
    ) -> None:
        self._config = config
        self._weights = weights
        self._engine = engine
        self._around = around
        self._stack = ExitStack()
        self._page_tokens = config.scheduler.page_tokens
        self._namespace = _namespace(config, weights)
        self._masters: MasterDirectory | None = None
        self._node: StoreNode | None = None
        self._client: StoreClient | None = None
        self._backup: ExpertBackup | None = None
        self.blocks: PooledBlocks | None = None
        if config.kvstore.enabled:
            self._listen()

    def block_key(self, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        """Name a full block (`scheduler.BlockKeyChain`)."""
        (key,) = prefix_keys(
            token_ids, block_tokens=self._page_tokens, namespace=self._namespace, parent=parent
        )
        return key

    def expert_sources(self, slabs: Slabs) -> list[ExpertSource]:
        """The pool as a source of expert weights, if there is a backup in it."""
        if self._client is None or not self._config.kvstore.expert_backup:
            return []
        self._backup = ExpertBackup(
            self._engine, self._client, self._weights.bank, slabs, namespace=self._namespace
        )
        return [self._backup]

    def open(self) -> None:
        """Lend the segment and start the traffic; the engine is open."""
        if self._node is None or self._client is None or self._masters is None:
            return
        config, weights, stack = self._config, self._weights, self._stack
        stack.enter_context(followed(self._masters))
        stack.callback(self._node.close)
        self._node.open()
        stack.callback(self._client.close)
        region = self._engine.register(weights.kv_memory)
        stack.callback(self._engine.release, region)
        writer = WriteThrough(
            self._client,
            region,
            block_bytes=weights.kv.page_bytes,
            queue_blocks=config.kvstore.put_queue_blocks,
        )
        stack.callback(writer.close)
        writer.open()
        fetcher = BlockFetcher(
            self._client,
            region,
            page_bytes=weights.kv.page_bytes,
            timeout_s=config.kvstore.request_timeout_s,
            on_fetched=self._engine.wake,
        )
        stack.callback(fetcher.close)
        fetcher.open()
        self.blocks = PooledBlocks(
            writer,
            fetcher,
            page_bytes=weights.kv.page_bytes,
            on_stored=self._engine.wake,
            pool_counters=partial(pool_counters, self._client, self._node),
        )

    def back_up_experts(self) -> None:
        """Start copying this rank's experts into the pool, in the background."""
        if self._backup is not None:
            self._stack.callback(self._backup.close)
            self._backup.open()

    def close(self) -> None:
        """End the traffic, then take the segment back."""
        self._stack.close()

    def _listen(self) -> None:
        engine, around = self._engine, self._around
        config = self._config.kvstore.for_slot(around.rank)
        masters = self._masters = directory_of(config.masters, embedded=around.master_address)
        node = StoreNode(
            engine,
            masters,
            config,
            secret=around.secret,
            make_slab=slab_for(config.lent),
        )
        chosen = config.tenant_of_workers()
        client = StoreClient(
            engine,
            masters,
            config,
            secret=around.secret,
            local_node=node,
            tenant=Tenant() if chosen is None else Tenant(chosen.name, chosen.token()),
        )
        engine.on_notify(node.on_notify)
        engine.on_notify(client.on_notify)
        self._node, self._client = node, client


def _namespace(config: RuntimeConfig, weights: Weights) -> bytes:
    """Seed of all block keys: only KV of equal weights, layout and exactness may match."""
    spec = weights.checkpoint.spec
    layout = (
        f"page-major L{spec.num_layers} P{config.scheduler.page_tokens} H{spec.num_kv_heads} "
        f"D{spec.head_dim} {config.model.exactness}"
    )
    return block_namespace(weights.fingerprint, str(weights.dtype), layout)
