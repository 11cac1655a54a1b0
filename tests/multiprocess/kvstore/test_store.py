"""The pool between real processes: bytes survive, the dead take only their own, lies are found."""

from __future__ import annotations

import secrets
import time

import pytest

from configs.schema import TransferBackend
from kvstore import MasterServer, MasterUnavailable
from tests.support.store_worker import StorePool
from tests.support.waits import eventually


def fresh_keys(number):
    return [secrets.token_bytes(16) for _ in range(number)]


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def test_blocks_travel(backend):
    keys = fresh_keys(12)
    with StorePool(3, backend=backend) as pool:
        writer, *others = pool.workers
        assert writer.ask("put", keys) == ["stored"] * 12
        for reader in (*others, writer):
            found, good, equal, nodes = reader.ask("get", keys)
            assert (found, good, equal) == (12, 12, True)
            assert writer.name not in nodes
        # A run ends at the first missing key, whatever comes after it.
        assert others[0].ask("get", [keys[0], *fresh_keys(1), keys[1]])[:3] == (1, 1, True)
        # The same bytes again, other bytes under the same name, and some of each length.
        assert others[1].ask("put", keys[:2]) == ["exists"] * 2
        assert others[1].ask("put", keys[:2], salt=1) == ["conflict"] * 2
        assert others[0].ask("get", keys[:2])[:3] == (2, 2, True)
        blobs = fresh_keys(3)
        for blob, nbytes in zip(blobs, (1, 100, 4000), strict=True):
            assert writer.ask("put", [blob], nbytes=nbytes, pin=True) == ["stored"]
        assert others[0].ask("get", blobs)[:3] == (3, 3, True)
        assert pool.statistics().leases == 0


def test_one_key_by_all_at_once():
    with StorePool(3) as pool:
        for _ in range(5):
            keys = fresh_keys(4)
            for worker in pool.workers:
                worker.begin("put", keys)
            results = [worker.result() for worker in pool.workers]
            for outcomes in zip(*results, strict=True):
                assert outcomes.count("stored") == 1
                assert set(outcomes) <= {"stored", "exists", "in_progress"}
            assert pool.workers[0].ask("get", keys)[:3] == (4, 4, True)
        assert pool.statistics().blocks == 20


def test_killed_node_takes_only_its_own_blocks():
    with StorePool(3) as pool:
        writer, victim, other = pool.workers
        by_node = {victim.name: [], other.name: []}
        for _ in range(8):
            (key,) = fresh_keys(1)
            assert writer.ask("put", [key], nbytes=3000) == ["stored"]
            by_node[writer.ask("get", [key])[3][0]].append(key)
        assert all(by_node.values()), "both nodes should hold some"
        victim.kill()
        run = [by_node[other.name][0], by_node[victim.name][0], by_node[other.name][1]]

        def run_ends_at_its_block() -> bool:
            found, good, equal, _ = writer.ask("get", run)
            assert found == 3
            assert equal
            assert good in (1, 3), "all of it while the dead node's memory is mapped, or up to it"
            return good == 1

        # Before the master knows, whoever finds out leaves that node alone.
        eventually(run_ends_at_its_block, "the reader finds out that the node is dead")
        assert writer.ask("get", run)[:2] == (1, 1)
        pool.master.fence([victim.name])
        pool.master.confirm_dead([victim.name])
        figures = pool.statistics()
        assert figures.blocks == len(by_node[other.name])
        assert figures.lost_blocks == len(by_node[victim.name])
        assert figures.capacity_bytes == 2 * pool.config.segment_bytes
        assert other.ask("get", by_node[other.name])[1:3] == (len(by_node[other.name]), True)
        lost = by_node[victim.name]
        assert writer.ask("put", lost, nbytes=3000) == ["stored"] * len(lost)
        assert other.ask("get", lost)[1:3] == (len(lost), True)


def test_killed_writer_leaves_quarantine_until_certainly_dead():
    keys = fresh_keys(5)
    with StorePool(3) as pool:
        victim, *others = pool.workers
        victim.begin("put_and_stall", keys)
        assert victim.result() == "stalled"
        assert pool.statistics().open_bytes == 5 * 4096
        assert others[0].ask("put", keys) == ["in_progress"] * 5
        victim.kill()
        pool.master.fence([victim.name])
        figures = pool.statistics()
        assert (figures.open_bytes, figures.quarantined_bytes) == (0, 5 * 4096)
        assert figures.nodes == 2
        assert others[0].ask("put", keys) == ["stored"] * 5, "the keys are free, the bytes are not"
        pool.master.confirm_dead([victim.name])
        figures = pool.statistics()
        assert (figures.quarantined_bytes, figures.committed_bytes) == (0, 5 * 4096)
        assert others[1].ask("get", keys)[:3] == (5, 5, True)


def test_corrupted_block_is_found_dropped_and_counted():
    keys = fresh_keys(6)
    with StorePool(2) as pool:
        writer, holder = pool.workers
        assert writer.ask("put", keys) == ["stored"] * 6
        damaged = keys.index(holder.ask("flip"))
        found, good, equal, _ = writer.ask("get", keys)
        assert (found, good, equal) == (6, damaged, True)
        figures = pool.statistics()
        assert (figures.corrupt_blocks, figures.blocks) == (1, 5)
        assert writer.ask("statistics").corrupt_blocks == 1
        assert writer.ask("put", keys).count("stored") == 1
        assert holder.ask("get", keys)[:3] == (6, 6, True)


def test_reading_while_the_pool_overflows():
    """Segments of 16 blocks, 60 keys: everything read must be right, whatever is evicted."""
    keys = fresh_keys(60)
    with StorePool(3, segment_bytes=1 << 16) as pool:
        writer, *readers = pool.workers
        writer.begin("churn", keys, 3.0)
        for reader in readers:
            reader.begin("browse", keys, 3.0)
        for reader in readers:
            got, equal = reader.result()
            assert equal
            assert got > 0
        assert writer.result() > 60
        figures = pool.statistics()
        assert figures.evicted_blocks > 0
        assert figures.corrupt_blocks == 0


def test_new_master_learns_from_the_nodes():
    keys = fresh_keys(8)
    with StorePool(3, open_put_s=6.0, request_timeout_s=8.0) as pool:
        writer, *others = pool.workers
        assert writer.ask("put", keys) == ["stored"] * 8
        assert writer.ask("put", keys[:1], pin=True) == ["exists"]
        pool.master.close()
        with pytest.raises(MasterUnavailable):
            others[0].ask("get", keys)
        pool.master = MasterServer(pool.config, secret=pool.secret)
        pool.master.open()
        assert all(worker.ask("use_master", pool.master.address) for worker in pool.workers)
        assert pool.statistics().blocks == 8
        for reader in pool.workers:
            assert reader.ask("get", keys)[:3] == (8, 8, True)
        more = fresh_keys(2)
        deadline = time.monotonic() + 60.0  # until writers of the old master are surely done
        while (outcomes := writer.ask("put", more)) != ["stored"] * 2:
            assert outcomes == ["no_space"] * 2
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert others[0].ask("get", more)[:3] == (2, 2, True)
