"""The expert bank against a plain dictionary, and the cache's write."""

from __future__ import annotations

import random
import time

import pytest
import torch

from configs.schema import Exactness
from moe_runtime.errors import ExpertNotResident
from moe_runtime.models import tiles
from moe_runtime.models.expert_mlp import ExpertMLP
from moe_runtime.models.experts import ExpertBank, ExpertKey
from moe_runtime.models.paged_kv import PagedKV
from moe_runtime.models.spec import ModelSpec
from tests.support.checkpoints import make_tiny_checkpoint
from tests.support.generation import allocate


@pytest.fixture
def spec(tmp_path):
    return ModelSpec.from_directory(make_tiny_checkpoint(tmp_path / "model", num_hidden_layers=2))


@pytest.fixture
def rng():
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    return random.Random(seed)


def fill(bank, key, byte):
    bank.reserve(*key).fill_(byte)
    bank.ready(*key)


def test_random_histories(spec, rng):
    bank = ExpertBank(
        spec, torch.bfloat16, allocate, slab_bytes=3 * spec.expert_bytes(torch.bfloat16)
    )
    keys = [ExpertKey(layer, expert) for layer in range(2) for expert in range(8)]
    content = {}
    for _ in range(300):
        wanted = rng.sample(keys, rng.randint(0, 9))
        missing = bank.retain(wanted)
        assert set(missing) == {key for key in wanted if not bank.has(*key)}
        for key in missing:
            content[key] = rng.randrange(256)
            fill(bank, key, content[key])
        assert bank.resident() == tuple(sorted(wanted))
        for key in keys:
            if bank.has(*key):
                assert (bank.blob(*key) == content[key]).all(), key
        places = [bank.location(*key) for key in keys if bank.has(*key)]
        assert len({(place.slab, place.offset) for place in places}) == len(places)
    assert len(bank.memories()) <= 3, "nine experts fit into three slabs"
    for key in wanted:
        slab, offset, nbytes = bank.location(*key)
        memory = bank.memories()[slab].tensor
        assert memory[offset].data_ptr() == bank.blob(*key).data_ptr()
        assert nbytes == bank.blob_bytes


def test_only_complete_experts_are_used(spec):
    bank = ExpertBank(spec, torch.float32, allocate)
    for read in (bank.blob, bank.weights, bank.location):
        with pytest.raises(ExpertNotResident, match="expert 5 of layer 1"):
            read(1, 5)
    bank.reserve(1, 5)
    assert not bank.has(1, 5)
    with pytest.raises(ExpertNotResident):
        bank.weights(1, 5)
    bank.ready(1, 5)
    assert bank.has(1, 5)
    bank.reserve(1, 5)
    assert not bank.has(1, 5), "being filled again"


def test_prepared_weights_follow_the_weights(spec):
    bank = ExpertBank(spec, torch.float32, allocate)
    mlp = ExpertMLP(bank, exactness=Exactness.BITWISE)
    rows = torch.ones(2, spec.hidden_size)
    with pytest.raises(ExpertNotResident):
        mlp(rows, (2,), (0,), moe_layer=0)
    assert mlp(rows[:0], (0,), (0,), moe_layer=0).shape == (0, spec.hidden_size)
    results = []
    for value in (0.01, 0.02):
        bank.reserve(0, 0).view(torch.float32).fill_(value)
        bank.ready(0, 0)
        results.append(mlp(rows, (2,), (0,), moe_layer=0))
    assert not torch.equal(*results)


def test_experts_with_and_without_compiled_products(spec, rng, monkeypatch):
    """Each way gives a row its own bits whatever stands beside it, and both the same function."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    bank = ExpertBank(spec, torch.bfloat16, allocate)
    for expert in range(3):
        weights = bank.as_matrices(bank.reserve(0, expert))
        weights.copy_(torch.randn(weights.shape, generator=generator) * 0.1)
        bank.ready(0, expert)
    counts = (5, 0, 19)
    rows = torch.randn(sum(counts), spec.hidden_size, generator=generator).to(torch.bfloat16)
    found = []
    for turned_off in (False, True):
        if turned_off:
            monkeypatch.setattr(tiles, "compiled", None)
            for expert in range(3):
                bank.reserve(0, expert)  # forget what was prepared; the bytes stay
                bank.ready(0, expert)
        mlp = ExpertMLP(bank, exactness=Exactness.BITWISE)
        mlp.warm_up()
        found.append(mlp(rows, counts, (0, 1, 2), moe_layer=0))
        alone = [
            mlp(row[None], (1,), (0 if i < 5 else 2,), moe_layer=0) for i, row in enumerate(rows)
        ]
        assert torch.equal(torch.cat(alone), found[-1])
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cache_write_and_layout(spec, rng, dtype):
    page_tokens, num_pages = 8, 5
    memory = allocate(PagedKV.nbytes(num_pages, spec, page_tokens, dtype))
    kv = PagedKV(memory, num_pages, spec, page_tokens, dtype)
    expected = torch.zeros(num_pages, spec.num_layers, 2, page_tokens, 2, 32, dtype=dtype)
    for _ in range(20):
        slots = rng.sample(range(num_pages * page_tokens), rng.randint(0, 12))
        layer = rng.randrange(spec.num_layers)
        both = torch.randn(len(slots), 4, 32).to(dtype)
        kv.write(layer, both[:, :2], both[:, 2:], torch.tensor(slots, dtype=torch.int64))
        for row, slot in zip(both, slots, strict=True):
            page, offset = divmod(slot, page_tokens)
            expected[page, layer, 0, offset] = row[:2]
            expected[page, layer, 1, offset] = row[2:]
    assert torch.equal(kv.pages, expected)
    flat = memory.tensor.view(num_pages, kv.page_bytes)
    assert torch.equal(flat, expected.view(num_pages, -1).view(torch.uint8))
    assert torch.equal(kv.keys(1), expected[:, 1, 0])
    assert torch.equal(kv.values(0), expected[:, 0, 1])
