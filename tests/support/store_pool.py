"""A pool in one process for tests: a real master, nodes on engines of their own, and a store."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import Any

from configs.kvstore_policies import FillingPolicy, PolicyConfig
from configs.schema import KVStoreConfig, TransferConfig
from kvstore import MasterServer, Store, StoreNode
from transfer import TransferEngine

WAIT_S = 30.0
SEGMENT = 8 << 20


class Pool:
    """Everything is closed with the stack; `connect` makes further stores.

    Args:
        stack: Of the test.
        nodes: How many.
        masters: How many.
        posts: Stores post puts where they can; else they ask for each.
        knobs: Of the configuration.
    """

    def __init__(
        self,
        stack: ExitStack,
        *,
        nodes: int = 1,
        masters: int = 1,
        posts: bool = True,
        **knobs: Any,
    ) -> None:
        self._posts = posts
        self.secret = secrets.token_bytes(16)
        # Blocks stay where they are put, unless a test wants the master to move them. Nor does a
        # scrubber look at them, whose first pass begins late on a busy machine: what a test has
        # damaged or made up is found by those whom it asks.
        still = PolicyConfig(filling=FillingPolicy(bytes_per_s=0))
        defaults = {
            "segment_bytes": SEGMENT,
            "request_timeout_s": WAIT_S,
            "policies": still,
            "scrub": {"enabled": False},
        }
        self.config = KVStoreConfig(**{**defaults, **knobs})
        self.stack = stack
        self.masters = [
            stack.enter_context(MasterServer(self.config, secret=self.secret))
            for _ in range(masters)
        ]
        self.master = self.masters[0]
        self.addresses = [master.address for master in self.masters]
        self.nodes = [self._node() for _ in range(nodes)]
        self.store = self.connect()

    def connect(self, **options: Any) -> Store:
        options = {"config": self.config, "secret": self.secret, **options}
        store = self.stack.enter_context(Store.connect(self.addresses, **options))
        if not self._posts:
            store.client.posts.close()
        return store

    def _node(self) -> StoreNode:
        engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=self.secret)
        node = StoreNode(engine, self.addresses, self.config, secret=self.secret)
        engine.on_notify(node.on_notify)
        self.stack.enter_context(engine)
        self.stack.enter_context(node)
        assert node.wait_registered(WAIT_S)
        return node
