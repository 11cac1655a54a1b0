"""Sampling: distribution, filters and counter, against references written from the definitions."""

from __future__ import annotations

import math
import pickle
import random
import secrets

import numpy as np
import pytest
import torch

from moe_runtime.sampling import (
    LogitsInvalid,
    SamplingParams,
    SamplingParamsInvalid,
    sample,
    uniform,
)


@pytest.fixture(params=[secrets.randbits(32)], ids=lambda seed: f"seed={seed}")
def seed(request) -> int:
    """A fresh seed, which is part of the test's name."""
    return request.param


def philox4x64(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox4x64-10 in Python integers."""
    mask = (1 << 64) - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (
            (second >> 64) ^ c1 ^ k0,
            second & mask,
            (first >> 64) ^ c3 ^ k1,
            first & mask,
        )
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c0, c1, c2, c3


def kept_reference(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Tokens and probabilities after the filters, in plain Python."""
    top = max(logits)
    weights = {i: math.exp((x - top) / params.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total = math.fsum(weights[i] for i in order)
    kept: list[int] = []
    for i in order:
        kept.append(i)
        if math.fsum(weights[j] for j in kept) / total >= params.top_p:
            break
    kept = [i for i in kept if weights[i] > 0]
    total = math.fsum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


def draw(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    return sample(logits.expand(count, -1), [params] * count, range(count))


def test_random_numbers_are_those_of_the_published_generator(seed):
    rng = random.Random(seed)
    for key in (0, (1 << 64) - 1, rng.getrandbits(64)):
        for position in (0, 1, 12345, rng.getrandbits(40)):
            # numpy counts up before it draws
            word = philox4x64((key, 0), (position + 1, 0, 0, 0))[0]
            assert uniform(key, position) == (word >> 11) / 2**53


def test_uniform_numbers_look_uniform_over_positions_and_seeds(seed):
    for draws in (
        [uniform(seed, position) for position in range(4000)],
        [uniform(seed + offset, 17) for offset in range(4000)],
    ):
        counts = np.histogram(draws, bins=16, range=(0.0, 1.0))[0]
        assert ((counts - 250.0) ** 2 / 250.0).sum() < 60.0  # 15 degrees of freedom: p < 1e-6
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.5, 0.8, 0), (1.0, 1.0, 5), (0.9, 0.7, 8)],
)
def test_frequencies_follow_the_filtered_distribution(seed, temperature, top_p, top_k):
    torch.manual_seed(seed)
    logits = torch.randn(1, 24) * 2
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    expected = kept_reference(logits[0].tolist(), params)
    count = 4000
    tokens = draw(logits, params, count)
    assert set(tokens) <= set(expected)
    statistic = sum(
        (tokens.count(i) - count * p) ** 2 / (count * p)
        for i, p in expected.items()
        if count * p >= 5
    )
    cells = sum(count * p >= 5 for p in expected.values())
    assert statistic < cells + 8 * math.sqrt(2 * cells)


def test_filters_keep_what_the_definition_keeps(seed):
    rng = random.Random(seed)
    for _ in range(60):
        size = rng.choice([2, 5, 40, 300])
        # few distinct values: ties at every boundary
        values = [float(rng.choice([-math.inf, 0, 1, 1, 2, 2.5])) for _ in range(size)]
        values[rng.randrange(size)] = 2.0
        params = SamplingParams(
            temperature=rng.choice([0.3, 1.0, 2.0]),
            top_p=rng.choice([1e-9, 0.123, 0.5, 0.876, 1.0]),
            top_k=rng.choice([0, 2, 3, size, size + 7]),
            seed=rng.getrandbits(64),
        )
        expected = kept_reference(values, params)
        tokens = set(draw(torch.tensor([values]), params, 200))
        assert tokens <= set(expected)
        if min(expected.values()) > 0.1:
            assert tokens == set(expected)


def test_a_row_is_the_same_alone_in_any_order_and_in_any_batch(seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    logits = torch.randn(12, 5000)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([0.9, 1.0]),
            top_k=rng.choice([0, 50]),
            seed=rng.getrandbits(64),
        )
        for _ in range(12)
    ]
    positions = [rng.randrange(10_000) for _ in range(12)]
    together = sample(logits, params, positions)
    alone = [
        sample(logits[row : row + 1].clone(), [params[row]], [positions[row]])[0]
        for row in range(12)
    ]
    order = rng.sample(range(12), 12)
    shuffled = sample(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert alone == together
    assert shuffled == [together[i] for i in order]


def test_another_position_or_seed_draws_anew():
    logits = torch.zeros(1, 1000)
    by_position = {sample(logits, [SamplingParams(seed=1)], [p])[0] for p in range(50)}
    by_seed = {sample(logits, [SamplingParams(seed=s)], [1])[0] for s in range(50)}
    assert len(by_position) > 40
    assert len(by_seed) > 40


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(3, 4001)
    logits[0, [7, 3999]] = 2.0
    logits[1, [4000, 1234, 1235]] = 1.0
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=1, seed=3)):
        assert sample(logits, [params] * 3, [0, 1, 2]) == [7, 1234, 0]


def test_extreme_parameters(seed):
    torch.manual_seed(seed)
    logits = torch.randn(1, 100)
    best = int(logits.argmax())
    for params in (
        SamplingParams(temperature=5e-324, seed=seed),
        SamplingParams(temperature=1e-12, seed=seed),
        SamplingParams(top_p=1e-9, seed=seed),
        SamplingParams(top_p=5e-324, seed=seed),
    ):
        assert set(draw(logits, params, 20)) == {best}
    assert len(set(draw(logits, SamplingParams(temperature=1e300, seed=seed), 50))) > 20
    only = torch.full((1, 100), -math.inf)
    only[0, 42] = -1e30
    assert set(draw(only, SamplingParams(temperature=3.0, top_p=0.5, top_k=9), 20)) == {42}
    assert sample(torch.empty(0, 9), [], []) == []


@pytest.mark.parametrize(
    ("value", "problem"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (-math.inf, "forbidden")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_is_named(value, problem, temperature):
    logits = torch.randn(4, 50)
    if value == -math.inf:
        logits[2] = value
    else:
        logits[2, 17] = value
    with pytest.raises(LogitsInvalid, match=problem) as caught:
        sample(logits, [SamplingParams(temperature=temperature)] * 4, [1, 2, 3, 4])
    assert caught.value.row == 2
    assert pickle.loads(pickle.dumps(caught.value)).row == 2


def test_no_ending_token_before_min_tokens():
    logits = torch.zeros(1, 6)
    logits[0, 3] = 9.0
    logits[0, 4] = 8.0
    before = logits.clone()
    params = SamplingParams(
        temperature=0.0, min_tokens=3, stop_token_ids=(3, 99), eos_token_ids=(4,)
    )
    assert [sample(logits, [params], [7], outputs=[n])[0] for n in (0, 2, 3)] == [0, 0, 3]
    lenient = SamplingParams(
        temperature=0.0, min_tokens=3, stop_token_ids=(3,), eos_token_ids=(4,), ignore_eos=True
    )
    assert sample(logits, [lenient], [7], outputs=[0]) == [4]
    assert torch.equal(logits, before)


def test_finish_reason():
    params = SamplingParams(max_tokens=4, stop_token_ids=(8,), eos_token_ids=(2,))
    reasons = [params.finish_reason(t, num_output=n) for t, n in ((8, 1), (2, 1), (5, 3), (5, 4))]
    assert reasons == ["stop", "stop", None, "length"]
    assert (
        SamplingParams(eos_token_ids=(2,), ignore_eos=True).finish_reason(2, num_output=1) is None
    )
    assert params.finish_reason(2, num_output=4) == "stop"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 1 << 64),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("stop_token_ids", (3, -1)),
        ("eos_token_ids", (None,)),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field}: expected .*, found ") as caught:
        SamplingParams(**{field: value})
    error = caught.value
    assert isinstance(error, SamplingParamsInvalid)
    assert error.field == field
    assert pickle.loads(pickle.dumps(error)).field == field
