"""Prepared transfers, pages, classes of traffic, and explanations."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch

from tests.support.engines import BACKENDS, BOTH, TLS, engine_pair, offer
from transfer import (
    Access,
    AccessRefused,
    Pages,
    PeerUnknown,
    Priority,
    RegionUnknown,
    TransferError,
    allocate,
)

SOON_S = 60.0
both_backends = pytest.mark.parametrize("backend", [*BACKENDS, TLS])


def random_memory(nbytes: int) -> torch.Tensor:
    return allocate(nbytes).tensor.random_()


@both_backends
@pytest.mark.parametrize("shareable", [True, False], ids=["memory", "tensor"])
def test_a_prepared_transfer_moves_what_is_there_at_each_post(
    backend: str, shareable: bool
) -> None:
    with engine_pair(backend) as (a, b):
        mine = a.register(random_memory(8192))
        target = allocate(8192) if shareable else torch.zeros(8192, dtype=torch.uint8)
        theirs = b.register(target)
        key = offer(b, theirs, a)
        one = a.prepare_write(b.name, mine, key, 100, 200, 4096)
        many = a.prepare_write(b.name, mine, key, [0, 5000], [6000, 0], [50, 60])
        back = a.prepare_read(b.name, mine, key, 100, 200, 4096)
        for i in range(3):
            mine.tensor.random_()
            one.post(immediate=i).wait(SOON_S)
            b.expect({(a.name, i): 1}, timeout_s=SOON_S)
            assert torch.equal(theirs.tensor[200:4296], mine.tensor[100:4196])
            many.post(timeout_s=SOON_S).wait(SOON_S)
            assert torch.equal(theirs.tensor[6000:6050], mine.tensor[0:50])
            assert torch.equal(theirs.tensor[0:60], mine.tensor[5000:5060])
            theirs.tensor.random_()
            assert back.post().bytes_moved in (0, 4096)
            back.post().wait(SOON_S)
            assert torch.equal(theirs.tensor[200:4296], mine.tensor[100:4196])
        with pytest.raises(ValueError, match="no immediate"):
            back.post(immediate=1)


@both_backends
def test_preparing_checks_and_posting_notices_what_has_changed(backend: str) -> None:
    with engine_pair(backend) as (a, b):
        mine, theirs = a.register(random_memory(64)), b.register(allocate(64))
        key, reading = offer(b, theirs, a), offer(b, theirs, a, Access.READ)
        with pytest.raises(AccessRefused, match="not inside"):
            a.prepare_write(b.name, mine, key, 0, 1, 64)
        with pytest.raises(ValueError, match="own region"):
            a.prepare_write(b.name, mine, key, 1, 0, 64)
        with pytest.raises(AccessRefused, match="right to WRITE"):
            a.prepare_write(b.name, mine, reading, 0, 0, 1)
        prepared = a.prepare_write(b.name, mine, key, 0, 0, 64)
        prepared.post().wait(SOON_S)
        a.disconnect(b.name, reason="of this test")
        with pytest.raises(TransferError):
            prepared.post().wait(SOON_S)


def test_a_withdrawn_key_ends_a_prepared_write() -> None:
    with engine_pair("tcp") as (a, b):
        mine, theirs = a.register(random_memory(64)), b.register(allocate(64))
        key = offer(b, theirs, a)
        prepared = a.prepare_write(b.name, mine, key, 0, 0, 64)
        b.withdraw(key)
        with pytest.raises(RegionUnknown):
            prepared.post().wait(SOON_S)


@both_backends
def test_pages_go_where_their_numbers_say(backend: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    count, page, ours, theirs_stride = 40, 96, 128, 100
    with engine_pair(backend) as (a, b):
        mine, theirs = a.register(random_memory(64 * ours)), b.register(allocate(9000))
        key = offer(b, theirs, a)
        sources, targets = rng.integers(0, 64, count), rng.permutation(80)[:count]
        expected = torch.zeros(9000, dtype=torch.uint8)
        for s, t in zip(sources.tolist(), targets.tolist(), strict=True):
            start = 7 + t * theirs_stride
            expected[start : start + page] = mine.tensor[s * ours : s * ours + page]
        a.write_pages(
            b.name, mine, key, Pages(numbers=sources, stride=ours),
            Pages(numbers=targets, stride=theirs_stride, offset=7), page, immediate=1,
        ).wait(SOON_S)  # fmt: skip
        b.expect({(a.name, 1): 1}, timeout_s=SOON_S)
        assert torch.equal(theirs.tensor, expected), seed
        back = a.register(torch.zeros(count * page, dtype=torch.uint8))
        a.read_pages(
            b.name, back, key, Pages(numbers=np.arange(count), stride=page),
            Pages(numbers=targets, stride=theirs_stride, offset=7), page,
        ).wait(SOON_S)  # fmt: skip
        rows = back.tensor.reshape(count, page)
        for i, s in enumerate(sources.tolist()):
            assert torch.equal(rows[i], mine.tensor[s * ours : s * ours + page]), seed


def test_pages_out_of_any_range_are_refused() -> None:
    with engine_pair() as (a, b):
        mine, key = a.register(random_memory(256)), offer(b, b.register(allocate(256)), a)

        def write(source: Pages, target: Pages, nbytes: int = 16) -> None:
            a.write_pages(b.name, mine, key, source, target, nbytes).wait(SOON_S)

        good = Pages(numbers=[0, 1], stride=16)
        write(good, good)
        for bad in (
            Pages(numbers=[0, -1], stride=16),
            Pages(numbers=[0, 1 << 61], stride=16),
            Pages(numbers=[0.0, 1.0], stride=16),
            Pages(numbers=[0, 1], stride=0),
            Pages(numbers=[0, 1], stride=8),
            Pages(numbers=[0], stride=16),
            Pages(numbers=[0, 16], stride=16),
        ):
            with pytest.raises((ValueError, AccessRefused)):
                write(bad, good)
            with pytest.raises((ValueError, AccessRefused)):
                write(good, bad)


@both_backends
def test_every_operation_belongs_to_a_class(backend: str) -> None:
    nbytes = 256 << 10
    with engine_pair(backend) as (a, b):
        mine, key = a.register(random_memory(nbytes)), offer(b, b.register(allocate(nbytes)), a)
        a.write(b.name, mine, key, 0, 0, nbytes).wait(SOON_S)
        a.write(b.name, mine, key, 0, 0, nbytes, immediate=1).wait(SOON_S)
        a.read(b.name, mine, key, 0, 0, nbytes).wait(SOON_S)
        a.write(b.name, mine, key, 0, 0, 1000).wait(SOON_S)
        a.write(b.name, mine, key, 0, 0, 1000, priority=Priority.MIGRATION).wait(SOON_S)
        counted = a.statistics().priorities
        assert {p: (s.operations, s.bytes) for p, s in counted.items()} == {
            Priority.ACTIVATIONS: (2, nbytes + 1000),
            Priority.KV_GET: (1, nbytes),
            Priority.KV_PUT: (1, nbytes),
            Priority.WEIGHTS: (0, 0),
            Priority.MIGRATION: (1, 1000),
        }
        rails = a.statistics().rails
        if backend == "tcp":
            assert sum(r.bytes for r in rails) == 3 * nbytes + 2000
            assert all(r.state == "healthy" and r.bytes_in_flight == 0 for r in rails)


def test_two_rails_of_one_host_are_both_used_and_explained() -> None:
    rails = ("127.0.0.1", "127.0.0.2")
    nbytes = 32 << 20
    with engine_pair("tcp", rails=rails) as (a, b):
        mine, theirs = a.register(random_memory(nbytes)), b.register(allocate(nbytes))
        key = offer(b, theirs, a, BOTH)
        for _ in range(3):
            a.write(b.name, mine, key, 0, 0, nbytes).wait(SOON_S)
        assert torch.equal(mine.tensor, theirs.tensor)
        known = a.statistics().rails
        assert [r.rail.split("->")[0] for r in known] == [f"tcp {local}" for local in rails]
        assert all(r.bytes > 0 for r in known), known
        explained = a.explain(b.name, mine)
        assert explained.backend == "tcp"
        assert len(explained.rails) == 2
        assert "not shared_memory: this engine's configuration excludes it" in str(explained)
        assert "127.0.0.2" in str(explained)
        assert a.explain(a.name).backend == "local"
        with pytest.raises(PeerUnknown):
            a.explain("nobody")


def test_same_host_peers_are_explained() -> None:
    with engine_pair() as (a, b):
        mapped = offer(b, b.register(allocate(64)), a)
        plain = offer(b, b.register(torch.zeros(64, dtype=torch.uint8)), a)
        assert a.explain(b.name).backend == "shared_memory"
        assert a.explain(b.name, mapped).backend == "shared_memory"
        told = a.explain(b.name, plain)
        assert told.backend == "process_memory"
        assert "not shared_memory: the memory was not made by `allocate`" in str(told)
