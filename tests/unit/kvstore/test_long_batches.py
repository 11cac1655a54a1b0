"""A batch longer than a run is spread over the nodes by their free space, each byte once."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from itertools import groupby

import pytest

from kvstore.master.books.batch_placement import BatchPlacement
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
        self.keys = keys = [secrets.token_bytes(16) for _ in lengths]
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
def test_what_has_a_place_somewhere_gets_one(seed, turn):
    """Full, in pieces, of unequal nodes: as many blocks as before find a place, no byte twice."""
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


def filled(lengths):
    """Books of one segment that these blocks fill, and their keys, the oldest first."""
    books, found = Books([sum(lengths)]), []
    for first in range(0, len(lengths), 100):
        assert -1 not in books.put(lengths[first : first + 100])
        found += reversed(books.keys)  # of a chain the end goes first
    assert books.master.statistics().evicted_blocks == 0
    return books, found


@pytest.mark.parametrize("old", [1, 2, 3, 32, 100])
@pytest.mark.parametrize("new", [1, 2, 5, 16, 100])
def test_the_oldest_of_another_size_go(seed, monkeypatch, old, new):
    """Hardly more of them than if room were made block by block."""
    rng, gone = random.Random(seed), []
    unit, count = 64 * rng.randrange(1, 50), 100 * rng.randrange(2, 5)
    fresh = rng.randint(1, count * old // new // 2)
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr(BatchPlacement, "_where_others_go", lambda *_: [])
        books, keys = filled([unit * old] * count)
        assert -1 not in books.put([unit * new] * fresh)
        there = books.step(m.Exists(keys)).flags
        assert there == sorted(there), "the oldest"
        gone.append(there.count(False))
    assert fresh * new <= gone[0] * old
    assert gone[0] <= gone[1] + max(1, new // old)


@pytest.mark.parametrize("turn", range(8))
def test_what_is_read_or_of_another_size_stands_in_the_way(seed, turn):
    rng = random.Random(seed)
    books, keys = filled([64 * rng.choice([1, 1, 1, 2, 3]) for _ in range(400)])
    read = set(rng.sample(keys, 3))
    reply = books.step(m.Lookup("reader", list(read), every=True))
    assert len(reply.node_idx) == len(read)
    assert -1 not in books.put([64 * 8] * rng.randrange(1, 20))
    found = dict(zip(keys, books.step(m.Exists(keys)).flags, strict=True))
    assert all(found[key] for key in read)
    others = [there for key, there in found.items() if key not in read]
    assert False in others
    assert others == sorted(others), "the oldest went, and only they"
