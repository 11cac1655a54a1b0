"""A small KV pool in this process: a real master, and members with engine, node and client."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import Any

import torch

from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, StoreClient, StoreNode
from transfer import TransferEngine, allocate

WAIT_S = 30.0


class PoolMember:
    """What a worker has of the pool, with `nbytes` of registered memory of random content."""

    def __init__(
        self, stack: ExitStack, address: str, secret: bytes, config: KVStoreConfig, nbytes: int
    ) -> None:
        self.name = secrets.token_hex(8)
        self.engine = TransferEngine(TransferConfig(), name=self.name, secret=secret)
        self.node = StoreNode(self.engine, address, config, secret=secret)
        self.client = StoreClient(self.engine, address, config, secret=secret, local_node=self.node)
        for part in (self.node, self.client):
            self.engine.on_notify(part.on_notify)
        stack.enter_context(self.engine)
        stack.enter_context(self.node)
        stack.enter_context(self.client)
        memory = allocate(nbytes)
        stack.callback(memory.close)
        self.bytes = memory.tensor
        self.bytes.random_(generator=torch.Generator().manual_seed(secrets.randbits(60)))
        self.region = self.engine.register(memory)


def start_pool(
    stack: ExitStack, *, members: int = 2, nbytes: int = 1 << 16, **knobs: Any
) -> tuple[MasterServer, list[PoolMember]]:
    """Start a pool; `stack` ends it."""
    secret = secrets.token_bytes(16)
    # Nobody looks at blocks but those whom a test asks; see `store_pool.Pool`.
    defaults = {"request_timeout_s": WAIT_S, "scrub": {"enabled": False}}
    config = KVStoreConfig(segment_bytes=1 << 18, **{**defaults, **knobs})
    master = stack.enter_context(MasterServer(config, secret=secret))
    found = [PoolMember(stack, master.address, secret, config, nbytes) for _ in range(members)]
    assert all(member.node.wait_registered(WAIT_S) for member in found)
    return master, found
