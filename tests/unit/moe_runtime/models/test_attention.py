"""Paged attention: values against a dense float64 reference, and bits against other batches."""

from __future__ import annotations

import itertools
import pickle
import random
import secrets
from dataclasses import dataclass

import pytest
import torch

from configs.schema import Exactness
from moe_runtime.models import attention as attention_module
from moe_runtime.models.attention import AttentionNotInvariant, PagedAttention
from moe_runtime.models.batch import ForwardBatch, SequenceInput, build_batch
from moe_runtime.models.paged_kv import PagedKV
from moe_runtime.models.spec import ModelSpec

DTYPES = [torch.bfloat16, torch.float32]
#: (query heads, key heads, head size, tokens per page)
SHAPES = [(8, 4, 64, 16), (4, 4, 32, 8), (6, 1, 80, 24), (16, 2, 128, 16), (3, 3, 16, 5)]
LAYERS = 2


@pytest.fixture(params=[secrets.randbits(32)], ids=lambda seed: f"seed={seed}")
def rng(request) -> random.Random:
    """A fresh seed, which is part of the test's name; torch gets it too."""
    torch.manual_seed(request.param)
    return random.Random(request.param)


def model_spec(heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=8,
        hidden_size=heads * head_dim,
        intermediate_size=8,
        moe_intermediate_size=8,
        num_layers=LAYERS,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_experts=2,
        topk=1,
        norm_topk_prob=False,
        attention_bias=False,
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=4096,
        moe_layers=(0, 1),
    )


@dataclass
class Tokens:
    """Queries, keys and values of one sequence's tokens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, spec: ModelSpec, length: int, dtype: torch.dtype) -> Tokens:
        def values(heads: int, scale: float) -> torch.Tensor:
            return (torch.randn(length, heads, spec.head_dim) * scale).to(dtype)

        return cls(
            values(spec.num_heads, 2.0),
            values(spec.num_kv_heads, 1.0),
            values(spec.num_kv_heads, 1.0),
        )

    def attend(self, spec: ModelSpec) -> torch.Tensor:
        """All outputs, dense and in float64: [length, Hq, D]."""
        group = spec.num_heads // spec.num_kv_heads
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / spec.head_dim**0.5
        length = len(q)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


class Bench:
    """Runs chunks of given sequences through the attention under test, on fresh pages each time."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        rng: random.Random,
        exactness: Exactness = Exactness.BITWISE,
    ) -> None:
        heads, kv_heads, head_dim, self.page_tokens = shape
        self.spec = model_spec(heads, kv_heads, head_dim)
        self.dtype, self.rng = dtype, rng
        self.attention = PagedAttention(
            self.spec, page_tokens=self.page_tokens, dtype=dtype, exactness=exactness
        )

    def tokens(self, length: int) -> Tokens:
        return Tokens.random(self.spec, length, self.dtype)

    def run(self, chunks: list[tuple[Tokens, int, int]]) -> list[torch.Tensor]:
        """Compute positions [first, stop) of each sequence in one batch, in random pages.

        Every slot that holds no token up to `stop` holds NaN.
        """
        num_pages = sum(-(-stop // self.page_tokens) for _, _, stop in chunks) + 3
        free = self.rng.sample(range(num_pages), num_pages)
        memory = torch.zeros(
            PagedKV.nbytes(num_pages, self.spec, self.page_tokens, self.dtype), dtype=torch.uint8
        )
        kv = PagedKV(memory, num_pages, self.spec, self.page_tokens, self.dtype)
        kv.pages.fill_(float("nan"))
        layer = self.rng.randrange(LAYERS)
        inputs = []
        for tokens, first, stop in chunks:
            table = tuple(free.pop() for _ in range(-(-stop // self.page_tokens)))
            slots = [
                table[position // self.page_tokens] * self.page_tokens + position % self.page_tokens
                for position in range(stop)
            ]
            kv.write(layer, tokens.k[:stop], tokens.v[:stop], torch.tensor(slots))
            table += (free[0],) * self.rng.randrange(3)  # a table may be longer than needed
            inputs.append(
                SequenceInput(
                    token_ids=[0] * (stop - first), first_position=first, block_table=table
                )
            )
        batch = build_batch(inputs, page_tokens=self.page_tokens)
        q = torch.cat([tokens.q[first:stop] for tokens, first, stop in chunks])
        output = self.attention(q, kv, layer, self.attention.plan(batch))
        assert output.shape == q.shape
        assert output.dtype == q.dtype
        return list(output.split([stop - first for _, first, stop in chunks]))

    def strangers(self, count: int) -> list[tuple[Tokens, int, int]]:
        """Chunks of other sequences: decodes and prefills."""
        chunks = []
        for _ in range(count):
            stop = self.rng.randrange(1, 300)
            first = self.rng.choice([stop - 1, self.rng.randrange(stop)])
            chunks.append((self.tokens(stop), first, stop))
        return chunks

    def run_among(
        self, chunk: tuple[Tokens, int, int], others: list[tuple[Tokens, int, int]]
    ) -> torch.Tensor:
        """Compute one chunk somewhere between others."""
        at = self.rng.randrange(len(others) + 1)
        return self.run([*others[:at], chunk, *others[at:]])[at]


def random_cuts(rng: random.Random, length: int, count: int) -> list[tuple[int, int]]:
    cuts = [0, *sorted(rng.sample(range(1, length), count)), length]
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("exactness", list(Exactness))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_those_of_dense_attention(rng, dtype, shape, exactness):
    bench = Bench(shape, dtype, rng, exactness)
    chunks = bench.strangers(6)
    one = bench.tokens(1)
    chunks += [(one, 0, 1), (bench.tokens(130), 120, 130)]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    for (tokens, first, stop), output in zip(chunks, bench.run(chunks), strict=True):
        until = Tokens(tokens.q[:stop], tokens.k[:stop], tokens.v[:stop])
        expected = until.attend(bench.spec)[first:]
        assert (output.double() - expected).abs().max() < tolerance
    # a single token attends to itself alone
    assert torch.equal(
        bench.run([(one, 0, 1)])[0],
        one.v.repeat_interleave(bench.spec.num_heads // bench.spec.num_kv_heads, dim=1),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_chunk_batch_or_pages(rng, dtype, shape):
    bench = Bench(shape, dtype, rng)
    length = rng.randrange(260, 420)
    tokens = bench.tokens(length)
    whole = bench.run([(tokens, 0, length)])[0]
    assert whole.isfinite().all()

    chunked = [
        bench.run_among((tokens, first, stop), bench.strangers(rng.randrange(4)))
        for first, stop in random_cuts(rng, length, 6)
    ]
    assert torch.equal(torch.cat(chunked), whole)

    positions = {0, 1, 15, 16, 127, 128, 255, 256, length - 1, *rng.sample(range(length), 12)}
    decodes = [(tokens, position, position + 1) for position in sorted(positions)]
    for (_, position, _), output in zip(decodes, bench.run(decodes), strict=True):
        assert torch.equal(output[0], whole[position]), f"position {position} decoded in a batch"
    for position in rng.sample(sorted(positions), 4):
        alone = bench.run([(tokens, position, position + 1)])[0]
        assert torch.equal(alone[0], whole[position]), f"position {position} decoded alone"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_over_a_long_context(rng, dtype):
    """Beyond 512 keys the CPU kernel rescales between its own blocks of keys."""
    bench = Bench((8, 4, 64, 16), dtype, rng)
    length = rng.randrange(1100, 1300)
    tokens = bench.tokens(length)
    whole = bench.run([(tokens, 0, length)])[0]
    first = rng.randrange(900, 1000)
    middle, last = bench.run([(tokens, first, first + 77), (tokens, length - 1, length)])
    assert torch.equal(middle, whole[first : first + 77])
    assert torch.equal(last[0], whole[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tiles_alone_are_exact_too(rng, dtype, monkeypatch):
    """A machine on which large tiles give other bits computes everything in small ones."""
    bench = Bench((8, 4, 64, 16), dtype, rng)
    large = bench.tokens(150)
    monkeypatch.setattr(bench.attention, "large_tiles_equal", lambda num_keys: False)
    whole = bench.run([(large, 0, 150)])[0]
    for first, stop in random_cuts(rng, 150, 8):
        assert torch.equal(
            bench.run_among((large, first, stop), bench.strangers(2)), whole[first:stop]
        )


def test_two_threads_are_exact_too(rng):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        bench = Bench((6, 1, 80, 16), torch.float32, rng)
        tokens = bench.tokens(140)
        whole = bench.run([(tokens, 0, 140)])[0]
        for position in (0, 100, 139):
            alone = bench.run([(tokens, position, position + 1)])[0][0]
            among = bench.run_among((tokens, position, position + 1), bench.strangers(3))[0]
            assert torch.equal(alone, whole[position])
            assert torch.equal(among, whole[position])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("exactness", list(Exactness))
def test_no_tokens(rng, exactness):
    bench = Bench((8, 4, 64, 16), torch.bfloat16, rng, exactness)
    memory = torch.zeros(
        PagedKV.nbytes(1, bench.spec, bench.page_tokens, bench.dtype), dtype=torch.uint8
    )
    kv = PagedKV(memory, 1, bench.spec, bench.page_tokens, bench.dtype)
    nothing = torch.empty(0, dtype=torch.int64)
    batch = ForwardBatch(token_ids=nothing, positions=nothing, slot_mapping=nothing, sequences=())
    q = torch.empty(0, 8, 64, dtype=torch.bfloat16)
    assert bench.attention(q, kv, 0, bench.attention.plan(batch)).shape == (0, 8, 64)


def test_a_kernel_that_looks_at_the_batch_is_refused(rng, monkeypatch):
    exact = attention_module.scaled_dot_product_attention

    def fickle(q, *args, **kwargs):
        return exact(q, *args, **kwargs) * (1.0 + len(q) * 2**-10)

    monkeypatch.setattr(attention_module, "scaled_dot_product_attention", fickle)
    bench = Bench((8, 4, 64, 16), torch.float32, rng)
    with pytest.raises(AttentionNotInvariant, match="exactness: tolerant") as caught:
        bench.attention.warm_up(200)
    assert pickle.loads(pickle.dumps(caught.value)).num_keys == caught.value.num_keys


def test_a_kernel_that_looks_at_the_rows_gets_small_tiles(rng, monkeypatch):
    exact = attention_module.scaled_dot_product_attention

    def fickle(q, *args, **kwargs):
        return exact(q, *args, **kwargs) * (1.0 + q.shape[2] * 2**-10)

    monkeypatch.setattr(attention_module, "scaled_dot_product_attention", fickle)
    bench = Bench((8, 4, 64, 16), torch.float32, rng)
    tokens = bench.tokens(40)
    whole = bench.run([(tokens, 0, 40)])[0]
    assert not bench.attention.large_tiles_equal(128)
    assert torch.equal(bench.run([(tokens, 33, 34)])[0], whole[33:34])


def test_plan_of_a_small_batch():
    """The worked example: Q = 4 in small tiles and 16 in large ones, 16 tokens per page."""
    bench = Bench((8, 4, 64, 16), torch.bfloat16, random.Random(0))
    batch = build_batch(
        [
            SequenceInput(token_ids=[0], first_position=17, block_table=(5, 3)),
            SequenceInput(token_ids=[0] * 20, first_position=10, block_table=(2, 9)),
        ],
        page_tokens=16,
    )
    plan = bench.attention.plan(batch)
    small, large = plan.groups
    assert (small.queries_per_tile, large.queries_per_tile) == (4, 16)
    # position 17 stands in slot 1 of the tile of positions [16, 20); the others repeat it
    assert small.query_rows.tolist() == [0, 0, 0, 0]
    # positions 10 to 29 are rows 1 to 20: tiles [0, 16) and [16, 32)
    assert large.query_rows.tolist() == [*[1] * 10, *range(1, 7), *range(7, 21), 20, 20]
    assert plan.output_slots.tolist() == [1, *range(14, 34)]
    (gather,) = small.gathers
    rows = [page * LAYERS * 2 for page in (5, 3, 5, 5, 5, 5, 5, 5)]  # 128 keys, padded with page 5
    assert gather.rows.tolist() == [*rows, *[row + 1 for row in rows]]
    assert gather.stale is not None
    assert gather.stale.tolist() == [*range(18, 32), *range(146, 160)]
    (call,) = gather.calls
    assert call.num_keys == 128
    assert (call.mask[0, 0] == 0).sum(dim=-1).tolist() == [18] * 8
