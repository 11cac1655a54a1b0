"""Tensors read where they lie, and that the pool keeps what it has, whoever writes into them."""

from __future__ import annotations

import asyncio
import secrets

import pytest
import torch

from configs.schema import TransferBackend, TransferConfig
from kvstore import AsyncStore, InvalidValue, PutOptions, PutOutcome, StoreClosed
from tests.support.store_pool import Pool
from tests.support.waits import eventually

DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)


def some_tensor(dtype, *shape):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def equal(one, other):
    """Bit by bit: there are NaNs."""
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def all_given_back(pool):
    pool.store.quick_reads.hot.close()
    eventually(lambda: pool.master.statistics().leases == 0, "the leases are given back")


@pytest.mark.parametrize("backend", [TransferBackend.AUTO, TransferBackend.TCP])
def test_a_tensor_has_its_shape_type_and_bits(stack, backend):
    pool = Pool(stack)
    store = pool.connect(transfer=TransferConfig(backend=backend))
    for number, dtype in enumerate(DTYPES):
        shape = (3, 1 + secrets.randbelow(200), 7)
        tensor, name = some_tensor(dtype, *shape), f"tensor {number}"
        options = PutOptions(chunk_bytes=1000 * (number % 2))
        assert store.put_tensor(name, tensor, options=options) is PutOutcome.STORED
        for _ in range(4):
            with store.view_tensor(name) as view:
                assert view.in_place is (backend is TransferBackend.AUTO)
                assert equal(view.tensor, tensor)
                assert view.held()
                assert view.lies_right()
        with pytest.raises(StoreClosed):
            _ = view.tensor
    with store.view_tensor("nobody") as view:
        assert view is None
    store.quick_reads.hot.close()
    all_given_back(pool)


def test_what_is_written_into_it_reaches_nobody_and_is_undone(stack):
    pool = Pool(stack)
    tensor, neighbour = torch.rand(50, 40), secrets.token_bytes(3000)
    pool.store.put_tensor("tensor", tensor)
    pool.store.put("neighbour", neighbour)
    for _ in range(4):  # looked up, then hot
        with pool.store.view_tensor("tensor") as view:
            view.tensor.mul_(2)
            assert torch.equal(view.tensor, 2 * tensor)
            assert not view.lies_right()
            for store in (pool.store, pool.connect()):
                assert torch.equal(store.get_tensor("tensor"), tensor)
                assert store.get("neighbour") == neighbour
        with pool.store.view_tensor("tensor") as view:
            assert view.in_place
            assert torch.equal(view.tensor, tensor)
    pool.master.check_invariants()
    assert pool.master.statistics().corrupt_blocks == 0


def test_what_outlives_it_keeps_the_lease(stack):
    pool = Pool(stack, segment_bytes=1 << 16, lease_s=3.0)
    tensor = torch.rand(30, 40)
    pool.store.put_tensor("tensor", tensor)
    with pool.store.view_tensor("tensor") as view:
        row = view.tensor[7]
        first_s = view._lease.deadline_s
    eventually(lambda: view._lease.deadline_s > first_s, "its lease is renewed")
    for _ in range(60):
        pool.store.put(secrets.token_hex(8), secrets.token_bytes(5000))
    view.check()
    assert torch.equal(row, tensor[7])
    del row
    all_given_back(pool)


def test_what_is_no_tensor_is_refused_and_not_held(stack):
    pool = Pool(stack)
    pool.store.put("short", b"x" * 256)
    pool.store.put("bytes", secrets.token_bytes(5000))
    for name in ("short", "bytes"):
        for _ in range(3):
            with pytest.raises(InvalidValue), pool.store.view_tensor(name):
                pass
            assert pool.store.get(name) is not None
    all_given_back(pool)


def test_places_that_others_fill_anew_are_seen_anew(stack):
    """Pages that were written to here do not hide what comes later."""
    pool = Pool(stack, segment_bytes=1 << 16)
    options = PutOptions(wait_for_space=True)  # leases end a moment after the views
    for number in range(20):
        tensor, name = torch.rand(64, 64), f"tensor {number}"
        assert pool.store.put_tensor(name, tensor, options=options) is PutOutcome.STORED
        with pool.store.view_tensor(name) as view:
            assert view.in_place
            assert torch.equal(view.tensor, tensor)
            view.tensor.zero_()
        assert torch.equal(pool.store.get_tensor(name), tensor)
    all_given_back(pool)


def test_in_an_event_loop(stack):
    pool = Pool(stack)
    tensor = torch.rand(500, 700)
    pool.store.put_tensor("tensor", tensor)

    async def run():
        async with AsyncStore(pool.store) as store:
            for _ in range(4):
                async with store.view_tensor("tensor") as view:
                    assert view.in_place
                    assert torch.equal(view.tensor, tensor)
            async with store.view_tensor("nobody") as view:
                assert view is None

    asyncio.run(run())
    all_given_back(pool)
