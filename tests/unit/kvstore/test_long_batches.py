"""A batch longer than a run is spread over the nodes by their free space, each byte once."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from itertools import groupby

import pytest

from kvstore.master.books.candidates import RUN_BYTES
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

MIB = 1 << 20


class Books:
    """A master of segments that are no memory, and one writer."""

    def __init__(self, capacities, *, media=(), domains=()):
        self.master, self.batch = StoreMaster(MasterTiming()), 0
        for i, nbytes in enumerate(capacities):
            medium = media[i] if media else m.Medium.DRAM
            domain = domains[i] if domains else ""
            node = f"n{i}"
            self.step(
                m.Register(
                    node, f"{node}:1", nbytes, True, m.HeldBlocks(), medium=medium, domain=domain
                )
            )

    def step(self, request):
        reply = self.master.step(request, 0.0)
        self.master.check_invariants()
        return reply

    def put(self, lengths, **more):
        """Return the name of the node of each block, -1 of one without a place."""
        self.batch += 1
        keys = [secrets.token_bytes(16) for _ in lengths]
        reply = self.step(m.Allocate("writer", self.batch, keys, lengths, [7] * len(keys), **more))
        assert isinstance(reply, m.Allocated), reply
        granted = [i for i, o in enumerate(reply.outcomes) if o is m.PutOutcome.GRANTED]
        assert all(self.step(m.Finish("writer", self.batch, granted)).stored)
        return [reply.nodes[i].node if i >= 0 else -1 for i in reply.node_idx]


def test_two_empty_nodes_get_half_each_in_runs():
    names = Books([256 * MIB, 256 * MIB]).put([MIB] * 60)
    runs = [len(list(run)) for _, run in groupby(names)]
    assert runs == [RUN_BYTES // MIB] * 14 + [RUN_BYTES // MIB]
    assert sorted(Counter(names).values()) == [28, 32]


def test_a_batch_of_one_run_stays_on_one_node():
    books = Books([256 * MIB] * 3)
    for _ in range(6):
        assert len(set(books.put([16384] * (RUN_BYTES // 16384)))) == 1
    assert len(set(books.put([16384] * (RUN_BYTES // 16384 + 1)))) == 2


def test_shares_go_by_free_space():
    names = Books([300 * MIB, 100 * MIB]).put([MIB] * 80)
    assert Counter(names) == {"n0": 60, "n1": 20}


def test_preferred_nodes_and_fast_media_come_first():
    books = Books([256 * MIB] * 4)
    assert set(books.put([MIB] * 64, prefer=["n2", "n3"])) == {"n2", "n3"}
    assert set(books.put([MIB] * 64, prefer=["n1"])) == {"n1"}
    assert set(books.put([MIB] * 64, avoid=["n0", "n1"])) == {"n2", "n3"}
    media = [m.Medium.DRAM, m.Medium.CXL, m.Medium.DRAM, m.Medium.SSD]
    assert set(Books([256 * MIB] * 4, media=media).put([MIB] * 64)) == {"n0", "n2"}


def test_the_writers_domain_is_spared():
    books = Books([256 * MIB] * 4, domains=["a", "a", "b", "b"])
    books.batch += 1
    keys = [secrets.token_bytes(16) for _ in range(64)]
    reply = books.step(m.Allocate("n0", books.batch, keys, [MIB] * 64, [7] * 64))
    assert {reply.nodes[i].node for i in reply.node_idx} == {"n2", "n3"}


@pytest.mark.parametrize("turn", range(8))
def test_what_has_a_place_somewhere_gets_one(turn):
    """Full, in pieces, of unequal nodes: as many blocks as before find a place, no byte twice."""
    seed = secrets.randbits(64)
    print(f"seed {seed}")
    rng = random.Random(seed)
    capacities = [rng.randrange(1, 40) * MIB for _ in range(rng.randrange(1, 6))]
    books = Books(capacities)
    room = sum(nbytes // MIB for nbytes in capacities)
    while room:
        count = min(room, rng.randrange(1, 40))
        assert -1 not in books.put([MIB] * count)
        room -= count
    names = books.put([MIB] * 30)  # for which the oldest go
    assert -1 not in names[: sum(nbytes // MIB for nbytes in capacities)]
