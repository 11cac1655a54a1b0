"""A real master has real nodes copy their blocks away, and nothing is lost."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from configs.schema import KVStoreConfig
from kvstore import MasterServer, PutOutcome
from kvstore.client.put_options import PutOptions
from kvstore.wire import messages as m
from tests.support.pool_member import PoolMember

BLOCK = 20_000
COUNT = 24
WAIT_S = 60.0


@pytest.mark.parametrize("chunk_bytes", [0, 3000])
def test_blocks_outlive_their_node(tmp_path, chunk_bytes):
    """From DRAM and from SSD, into the memory of another node; read where they are now."""
    slab = {"medium": "ssd", "bytes": 1 << 20, "path": tmp_path / "slab", "threads": 2}
    secret, knobs = secrets.token_bytes(16), {"heartbeat_s": 0.1, "request_timeout_s": WAIT_S}
    both = KVStoreConfig(segments=[{"bytes": 1 << 20}, slab], **knobs)
    memory = KVStoreConfig(segment_bytes=1 << 20, **knobs)
    keys = [secrets.token_bytes(16) for _ in range(COUNT)]
    with ExitStack() as stack:
        master = stack.enter_context(MasterServer(both, secret=secret))
        leaving = PoolMember(stack, master.address, secret, both, COUNT * BLOCK)
        assert leaving.node.wait_registered(WAIT_S)
        half = COUNT // 2
        for medium, chosen in ((m.Medium.DRAM, slice(0, half)), (m.Medium.SSD, slice(half, COUNT))):
            options = PutOptions(media=(medium,), chunk_bytes=chunk_bytes)
            offsets = np.arange(COUNT)[chosen] * BLOCK
            outcomes = leaving.client.put(
                keys[chosen], leaving.region, offsets, BLOCK, options=options
            )
            assert set(outcomes) == {PutOutcome.STORED}
        staying = PoolMember(stack, master.address, secret, memory, COUNT * BLOCK)
        assert staying.node.wait_registered(WAIT_S)
        link = leaving.node._registration.links[0]
        deadline = time.monotonic() + WAIT_S
        while (progress := link.ask(m.Drain(leaving.name), m.Draining)).left_blocks:
            assert time.monotonic() < deadline, progress
            time.sleep(0.05)
        copies = leaving.node.statistics().copies
        assert (copies.done, copies.failed, copies.corrupt) == (COUNT, 0, 0)
        leaving.node.close()
        hit = staying.client.lookup_prefix(keys)
        assert {node.node for node in hit.nodes} == {staying.name}
        good = staying.client.get_into(hit, staying.region, np.arange(COUNT) * BLOCK)
        staying.client.release(hit)
        assert good == COUNT
        assert torch.equal(staying.bytes, leaving.bytes)
        master.check_invariants()
