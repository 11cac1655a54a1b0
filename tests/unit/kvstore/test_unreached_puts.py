"""Puts that a node did not get, or did not confirm: tried again elsewhere."""

from __future__ import annotations

import asyncio
import secrets

import numpy as np
import pytest

from configs.schema import TransferBackend, TransferConfig
from kvstore import AsyncStore, NodeUnreachable, PutOptions, PutOutcome
from kvstore.client.writing import ELSEWHERE_MAX
from tests.support.store_pool import Pool
from transfer import PeerLost, allocate

BLOCK = 1024
NUMBER = 6


class Writer:
    """The pool's client with memory of its own; `is_cut` says which nodes it does not reach."""

    def __init__(self, stack, pool, monkeypatch, is_cut):
        self.client = pool.store.client
        self.refused = []
        memory = allocate(NUMBER * BLOCK)
        stack.callback(memory.close)
        self.engine = self.client.core.engine
        self.region = self.engine.register(memory)
        stack.callback(self.engine.release, self.region)
        self.array = memory.tensor.numpy()
        get = self.client.segments.get

        def reach(where, *, deadline_s):
            if is_cut(where.node):
                self.refused.append(where.node)
                raise NodeUnreachable(node=where.node, address=where.address, problem="cut off")
            return get(where, deadline_s=deadline_s)

        monkeypatch.setattr(self.client.segments, "known", lambda where: None)
        monkeypatch.setattr(self.client.segments, "get", reach)

    def put(self, keys, **options):
        self.array[:] = np.frombuffer(secrets.token_bytes(NUMBER * BLOCK), dtype=np.uint8)
        offsets = np.arange(len(keys)) * BLOCK
        outcomes = self.client.put(keys, self.region, offsets, BLOCK, **options)
        return list(outcomes), self.array[: len(keys) * BLOCK].copy()

    def get(self, keys):
        self.array[:] = 0
        hit = self.client.lookup_prefix(keys)
        good = self.client.get_into(hit, self.region, np.arange(hit.num_blocks) * BLOCK)
        nodes = {hit.nodes[i].node for i in hit.node_idx}
        self.client.release(hit)
        return good, self.array[: len(keys) * BLOCK].copy(), nodes


def fresh_keys():
    return [secrets.token_bytes(16) for _ in range(NUMBER)]


def is_tidy(pool):
    pool.master.check_invariants()
    figures = pool.master.statistics()
    return (figures.open_puts, figures.open_bytes, figures.quarantined_bytes) == (0, 0, 0)


def test_what_a_node_did_not_get_another_one_gets(stack, monkeypatch):
    pool = Pool(stack, nodes=2)
    cut = set()

    def is_cut(node):  # whichever is named first
        if not cut:
            cut.add(node)
        return node in cut

    writer, keys = Writer(stack, pool, monkeypatch, is_cut), fresh_keys()
    outcomes, content = writer.put(keys)
    assert outcomes == [PutOutcome.STORED] * NUMBER
    assert writer.refused == list(cut), "the fault fired, once"
    good, found, nodes = writer.get(keys)
    assert (good, nodes) == (NUMBER, {node.name for node in pool.nodes} - cut)
    assert np.array_equal(found, content)
    assert is_tidy(pool)
    statistics = writer.client.statistics()
    assert (statistics.stored_blocks, statistics.failed_blocks) == (NUMBER, 0)


def test_where_no_node_is_reached_a_put_fails_and_leaves_nothing(stack, monkeypatch):
    pool = Pool(stack, nodes=2 + ELSEWHERE_MAX)
    writer, keys = Writer(stack, pool, monkeypatch, lambda node: True), fresh_keys()
    outcomes, _ = writer.put(keys)
    assert outcomes == [PutOutcome.FAILED] * NUMBER
    assert 1 <= len(writer.refused) <= len(pool.nodes)
    assert len(set(writer.refused)) == len(writer.refused), "none of them is asked twice"
    assert is_tidy(pool)
    assert writer.client.statistics().failed_blocks == NUMBER


def test_the_only_node_is_not_reached(stack, monkeypatch):
    """Without another one there is no space, but that is not what was wrong."""
    pool = Pool(stack, nodes=1)
    writer = Writer(stack, pool, monkeypatch, lambda node: True)
    outcomes, _ = writer.put(fresh_keys())
    assert outcomes == [PutOutcome.FAILED] * NUMBER
    assert writer.refused == [pool.nodes[0].name]
    assert is_tidy(pool)


def test_one_of_two_copies_is_enough(stack, monkeypatch):
    pool = Pool(stack, nodes=2)
    away = pool.nodes[0].name
    writer, keys = Writer(stack, pool, monkeypatch, lambda node: node == away), fresh_keys()
    outcomes, content = writer.put(keys, options=PutOptions(replicas=2))
    assert outcomes == [PutOutcome.STORED] * NUMBER
    assert writer.refused == [away], "nothing is tried again for the sake of the other copy"
    good, found, nodes = writer.get(keys)
    assert (good, nodes) == (NUMBER, {pool.nodes[1].name})
    assert np.array_equal(found, content)
    assert is_tidy(pool)


class LostAnswer:
    """A transfer whose bytes arrive and whose end nobody hears of."""

    def __init__(self, transfer, node):
        self._transfer, self._node = transfer, node

    def wait(self):
        self._transfer.wait()
        raise PeerLost(self._node, "the answer was lost")

    def __await__(self):
        yield from self._transfer.__await__()
        raise PeerLost(self._node, "the answer was lost")


class Deaf:
    """Loses the answers to a store's writes to the first node that it writes to, or to all."""

    def __init__(self, store, monkeypatch, *, every=False):
        self.nodes, self.writes = set(), []
        engine = store.client.core.engine
        write = engine.write

        def lose(node, region, key, *columns, **options):
            transfer = write(node, region, key, *columns, **options)
            if every or not self.nodes:
                self.nodes.add(node)
            self.writes.append(node)
            return LostAnswer(transfer, node) if node in self.nodes else transfer

        monkeypatch.setattr(engine, "write", lose)


def far_pool(stack, nodes):
    pool = Pool(stack, nodes=nodes)
    return pool, pool.connect(transfer=TransferConfig(backend=TransferBackend.TCP))


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_node_did_not_confirm_another_one_gets(stack, monkeypatch, is_async):
    pool, store = far_pool(stack, 2)
    deaf = Deaf(store, monkeypatch)
    values = {f"name {i}": secrets.token_bytes(5000) for i in range(NUMBER)}
    if is_async:

        async def put():
            async with AsyncStore(store) as aio:
                return await aio.put_batch(list(values), list(values.values()))

        outcomes = asyncio.run(put())
    else:
        outcomes = store.put_batch(list(values), list(values.values()))
    assert set(outcomes) == {PutOutcome.STORED}
    assert len(deaf.nodes) == 1, "the fault fired"
    found = pool.store.get_batch(list(values))
    assert [result.value for result in found] == list(values.values())
    pool.master.check_invariants()
    figures = pool.master.statistics()
    assert figures.open_puts == 0
    assert figures.quarantined_bytes >= NUMBER * 5000, "bytes may still be under way"
    assert figures.blocks == NUMBER
    pool.master.confirm_dead([store.client.core.engine.name])
    assert pool.master.statistics().quarantined_bytes == 0
    pool.master.check_invariants()


def test_what_no_node_confirms_fails_and_stays_closed(stack, monkeypatch):
    pool, store = far_pool(stack, 3)
    deaf = Deaf(store, monkeypatch, every=True)
    data = secrets.token_bytes(5000)
    assert store.put("name", data, timeout_s=20.0) is PutOutcome.FAILED
    assert len(deaf.writes) == len(deaf.nodes) == 1 + ELSEWHERE_MAX, "no node is asked twice"
    assert not store.exists("name")
    assert pool.master.statistics().quarantined_bytes >= 3 * 5000
    pool.master.check_invariants()
    # Whoever is heard may store it.
    assert pool.store.put("name", data) is PutOutcome.STORED
    assert pool.store.get("name") == data


def test_places_that_are_in_doubt_are_given_to_nobody_else(stack, monkeypatch):
    """Bytes that a stopped writer still sends must not land in somebody's block."""
    pool, store = far_pool(stack, 2)
    Deaf(store, monkeypatch)
    landed = []
    write = store.client.core.engine.write

    def note(node, region, key, source, targets, lengths, **options):
        spans = zip(np.atleast_1d(targets).tolist(), np.atleast_1d(lengths).tolist(), strict=True)
        landed.extend((node, at, at + nbytes) for at, nbytes in spans)
        return write(node, region, key, source, targets, lengths, **options)

    monkeypatch.setattr(store.client.core.engine, "write", note)
    assert store.put("doubtful", secrets.token_bytes(100_000)) is PutOutcome.STORED
    assert len(landed) == 2
    node, start, end = landed[0]
    # Others fill the pool, all that is given out.
    number = 0
    while pool.store.put(f"{number}", secrets.token_bytes(200_000)) is PutOutcome.STORED:
        number += 1
        if number == 100:
            break
    names = [f"{i}" for i in range(number)]
    hit = pool.store.client.lookup(pool.store.operations.keys(names))
    for idx, offset, nbytes in zip(hit.node_idx, hit.offsets, hit.lengths, strict=True):
        if hit.nodes[idx].node == node:
            assert offset + nbytes <= start or offset >= end
    pool.store.client.release(hit)
    pool.master.check_invariants()


def test_why_a_put_failed_is_in_the_log(stack, monkeypatch, caplog):
    pool = Pool(stack, nodes=1)
    writer = Writer(stack, pool, monkeypatch, lambda node: True)
    outcomes, _ = writer.put(fresh_keys(), timeout_s=1.0)
    assert set(outcomes) == {PutOutcome.FAILED}
    assert writer.refused
    (told, *_) = [record for record in caplog.records if "not written" in record.getMessage()]
    assert told.levelname == "WARNING"
    assert "cut off" in told.getMessage()
