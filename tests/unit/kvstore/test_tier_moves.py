"""A node with little DRAM and an SSD, and a real master: what leaves DRAM, what comes back."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

from configs.schema import Eviction
from kvstore import PutOutcome
from kvstore.wire import messages as m
from tests.support.pool_member import start_pool
from tests.support.waits import eventually

DRAM, SSD = 1 << 20, 8 << 20
BLOCK = 10_000
BLOCKS = 160  # half as many again as DRAM holds
BATCH = 16
HOT = 6
LOW, HIGH = 0.2, 0.4  # free shares of DRAM


def keys_in(master, medium):
    """Return the blocks that are in this medium only, as the master says."""
    told = master._step(m.ListBlocks(after=b"", limit=BLOCKS))
    media = [{told.nodes[copy].medium for copy in copies} for copies in told.copies]
    return {key for key, where in zip(told.keys, media, strict=True) if where == {medium}}


def read(member, keys, at):
    """Read blocks one by one; return their bytes."""
    for position, key in enumerate(keys):
        hit = member.client.lookup_prefix([key])
        offset = np.array([at + position * BLOCK])
        assert member.client.get_into(hit, member.region, offset) == 1
        member.client.release(hit)
    return member.bytes[at : at + len(keys) * BLOCK].numpy().tobytes()


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.PREFIX_AWARE])
def test_blocks_under_pressure_are_demoted_and_hot_ones_come_back(tmp_path, stack, eviction):
    master, (member,) = start_pool(
        stack,
        members=1,
        nbytes=2 * BLOCKS * BLOCK,
        eviction=eviction,
        heartbeat_s=0.05,
        segments=[{"bytes": DRAM}, {"medium": "ssd", "bytes": SSD, "path": tmp_path / "slab"}],
        policies={"tiers": {"demotion_low": LOW, "demotion_high": HIGH, "promotion_hits": 2}},
    )
    content, target = member.bytes[: BLOCKS * BLOCK].numpy().tobytes(), BLOCKS * BLOCK
    keys = [secrets.token_bytes(16) for _ in range(BLOCKS)]
    for first in range(0, BLOCKS, BATCH):
        offsets = np.arange(first, first + BATCH) * BLOCK
        outcomes = member.client.put(keys[first : first + BATCH], member.region, offsets, BLOCK)
        assert set(outcomes) == {PutOutcome.STORED}
        eventually(lambda: master.statistics().dram_free_bytes >= LOW * DRAM)
    figures = master.statistics()
    assert figures.demoted_blocks >= BLOCKS - (1 - LOW) * DRAM / BLOCK > 0
    assert (figures.blocks, figures.evicted_blocks, figures.lost_blocks) == (BLOCKS, 0, 0)

    def counted():  # some may still be on their way
        moved = master.statistics().demoted_blocks
        sizes = len(keys_in(master, m.Medium.SSD)), len(keys_in(master, m.Medium.DRAM))
        return sizes == (moved, BLOCKS - moved)

    eventually(counted, "counted are those that moved")
    cold = keys_in(master, m.Medium.SSD)

    hot = [key for key in keys if key in cold][:HOT]
    expected = b"".join(
        content[keys.index(key) * BLOCK : (keys.index(key) + 1) * BLOCK] for key in hot
    )
    assert read(member, hot, target) == expected, "from the SSD"
    assert master.statistics().promoted_blocks == 0
    assert set(hot) <= keys_in(master, m.Medium.SSD)
    assert read(member, hot, target) == expected, "a second time"
    eventually(lambda: master.statistics().promoted_blocks == HOT)
    assert set(hot) <= keys_in(master, m.Medium.DRAM)
    member.bytes[target:].zero_()
    assert read(member, hot, target) == expected, "from DRAM"

    member.bytes[target:].zero_()
    assert read(member, keys, target) == content, "all, wherever they are"
    assert master.statistics().evicted_blocks == 0
    master.check_invariants()
