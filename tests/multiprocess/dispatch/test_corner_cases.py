"""The corner cases of token dispatch by number, on every backend, in real processes.

The processes of a backend stay for the whole module. What a backend cannot do is a typed error,
asserted like everything else. Not here: scales of fp8 rows (12 to 14, `test_deepep.py` and
`tests/unit/dispatch/test_fp8_rows.py`), addresses beyond 32 bits (15, `test_large_offsets.py`
there), lost ranks and different views of them (21, 23, `tests/fault/dispatch`).
"""

from __future__ import annotations

import pytest

from tests.support import corner_cases as cases
from tests.support import corner_cases_wire as wire
from tests.support.rank_pool import BACKENDS, RankPool, rank_pool

WORLD = 6


@pytest.fixture(scope="module", params=BACKENDS)
def pool(request):
    with rank_pool(request.param, WORLD) as started:
        yield started


ON_EVERY_RANK = [
    cases.case_01_no_tokens,
    cases.case_03_one_rank,
    cases.case_04_duplicate_experts,
    cases.case_05_masked_and_invalid,
    cases.case_06_uneven_tokens,
    cases.case_07_many_choices,
    cases.case_08_any_number_of_experts_and_ranks,
    cases.case_09_hidden_sizes,
    cases.case_11_twice_the_same,
    cases.case_16_groups_of_experts,
    cases.case_17_handle_is_used_once,
    cases.case_18_handle_of_an_older_group,
    cases.case_19_shared_expert_is_added_once,
    cases.case_20_one_at_a_time,
    cases.case_27_tensors_of_another_kind,
    cases.case_28_many_exchanges_on_two_dispatchers,
    cases.case_29_weights_of_missing_experts,
    cases.case_31_uninitialised_memory,
    wire.case_bytes_and_messages,
    wire.case_12_fp8_on_the_wire,
    wire.case_22_ranks_leave_and_join,
    wire.case_22_a_new_life_of_a_rank,
    wire.case_24_any_order_and_twice,
    wire.case_25_epochs_beyond_the_immediate,
    wire.case_26_more_than_any_queue_holds,
]


@pytest.mark.parametrize("check", ON_EVERY_RANK, ids=lambda check: check.__name__)
def test_corner(check, pool: RankPool, seed: int):
    pool.run(check, seed)


def test_corner_case_02_one_hot_expert(pool: RankPool, seed: int):
    results = pool.run(cases.case_02_one_hot_expert, seed)
    assert {routed for routed, _ in results} == {128}
    assert max(received for _, received in results) == 128 * pool.world_size, "all on one rank"


def test_corner_case_10_order_of_the_sum(pool: RankPool, seed: int):
    results = [out for found in pool.run(cases.case_10_order_of_the_sum, seed) for out in found]
    assert all(results[0].equal(out) for out in results), "for any number of ranks"


def test_corner_case_30_redundant_experts(pool: RankPool, seed: int):
    results = pool.run(cases.case_30_redundant_experts, seed)
    assert sum(routed for routed, _ in results) == sum(received for _, received in results)


def test_corner_case_32_conservation(pool: RankPool, seed: int):
    valid, routed, received = map(
        sum, zip(*pool.run(cases.case_32_conservation, seed), strict=True)
    )
    assert valid == routed == received > 0
