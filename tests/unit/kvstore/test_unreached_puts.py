"""Puts of which not a byte was written as a node was not reached: tried again elsewhere."""

from __future__ import annotations

import secrets

import numpy as np

from kvstore import NodeUnreachable, PutOptions, PutOutcome
from kvstore.client.writing import UNREACHED_MAX
from tests.support.store_pool import Pool
from transfer import allocate

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
    pool = Pool(stack, nodes=2 + UNREACHED_MAX)
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
