"""Which bar a figure of the store is held to."""

from __future__ import annotations

from benchmarks.bench_kvstore_peers import MEMCPY, OURS, OURS_TCP, cases_of, verdicts_of
from benchmarks.transfer_bars import Case, Figures


def figures_of(case: Case, figure: str, **medians: float) -> Figures:
    names = {name.replace("_", " "): value for name, value in medians.items()}
    return {(case, name, figure): {0: value, 1: value} for name, value in names.items()}


def test_the_best_peer_is_the_bar_and_at_memcpy_s_speed_memcpy() -> None:
    case = next(c for c in cases_of((1,)) if c.op == "put" and c.size == 1 << 20)
    slow = figures_of(
        case, "gb_s", ours=7, ours_tcp=2, mooncake_remote=1, mooncake_dummy=3, redis=2, memcpy=10
    )
    same_host, tcp = verdicts_of(slow, [case])
    assert (same_host.bar, same_host.ratio) == (f"{OURS}: gb_s >= 2 x mooncake dummy", 7 / 3)
    assert same_host.word == "met"
    assert (tcp.bar, tcp.ratio, tcp.word) == (
        f"{OURS_TCP}: gb_s >= 1.5 x mooncake remote",
        2,
        "met",
    )
    fast = slow | figures_of(case, "gb_s", mooncake_dummy=8)
    (same_host, _) = verdicts_of(fast, [case])
    assert same_host.bar == f"{OURS}: gb_s >= 0.9 x {MEMCPY}"
    assert same_host.word == "MISSED"


def test_the_latency_of_a_small_get_is_held_to_redis() -> None:
    case = next(c for c in cases_of((1, 4)) if c.size == 4096)
    (verdict,) = verdicts_of(figures_of(case, "p50_us", ours=10, redis=30), [case])
    assert verdict.word == "met"
    (verdict,) = verdicts_of(figures_of(case, "p50_us", redis=30), [case])
    assert verdict.word == "not measured"
