"""Every kernel as machine code for four GPUs, within its budget and without a spill.

The launches are those of real sizes: hidden 7168, 256 experts, top-8, bf16; and of odd ones.
"""

from __future__ import annotations

import re

import pytest
import torch

from dispatch.expert_map import ExpertMap
from dispatch.kernels import (
    arrange,
    fp8,
    locate_results,
    pack,
    pack_fp8,
    pack_results,
    route,
    sigmoid_topk,
    softmax_topk,
    topk_softmax,
    unpack,
)
from dispatch.kernels.routed import ExpertSlots
from dispatch.routing import LayerRoute
from tests.support.compiled_kernels import TARGETS, Launch, compiled, recorded

REAL = (128, 256, 8, 7168, 8)  # tokens, experts, choices of a token, hidden, members
ODD = ((1, 1, 1, 1, 1), (3, 7, 3, 33, 2), (1, 512, 200, 2880, 64))

# Kernel: registers of a thread, bytes of shared memory of a program; the most of all targets.
BUDGETS = {
    "_count_kernel": (80, 2048),
    "_dequantise_kernel": (32, 4096),
    "_quantise_kernel": (56, 64),
    "_pack_fp8_kernel": (56, 64),
    "_pack_kernel": (40, 0),
    "_place_kernel": (72, 512),
    "_scan_kernel": (72, 8192),
    "_locate_results_kernel": (40, 64),
    "_pack_results_kernel": (40, 64),
    "_place_arrivals_kernel": (40, 64),
    "_sum_kernel": (56, 2048),
    "_survey_kernel": (40, 64),
    "_unpack_kernel": (24, 0),
    "_unpack_scales_kernel": (80, 0),
    "_sigmoid_topk_kernel": (64, 256),
    "_softmax_topk_kernel": (64, 256),
    "_topk_softmax_kernel": (72, 256),
}
FP8_KERNELS = {"_quantise_kernel", "_dequantise_kernel", "_pack_fp8_kernel"}
MOVERS = {"_pack_kernel", "_pack_fp8_kernel", "_pack_results_kernel", "_unpack_kernel"}


def launches(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int, int] = REAL
) -> list[Launch]:
    T, E, K, H, W = sizes
    logits = torch.zeros(T, E)
    known = LayerRoute(ExpertMap.even(num_layers=1, num_logical=E, ranks=range(W)), range(W), 0, 0)
    slots = ExpertSlots.of(known, E, torch.device("cpu"))
    ids = torch.zeros(T, K, dtype=torch.int64)
    routed = route.route_torch(ids, slots)
    x = torch.zeros(T, H, dtype=torch.bfloat16)
    narrow = fp8.quantise_torch(x)
    room = (T * K + 32) // 32 * 32  # rows of a window, their bytes a multiple of 64
    messages = {
        "header": torch.zeros(64, dtype=torch.uint8),
        "messages": torch.zeros(W * room * 2 * H, dtype=torch.uint8),
        "offsets": torch.zeros(W, dtype=torch.int64),
    }
    arrivals = messages["messages"], torch.full((W,), -1)
    facts = {
        "header": messages["header"],
        "ranks": torch.zeros(W, dtype=torch.int32),
        "num_experts": -(-E // W),
        "window_bytes": 1 << 24,
        "row_bytes": 2 * H,
        "scale_bytes": 4 * -(-H // 128),
        "alignment": 128,
        "capacity": W * T * K,
    }
    arranged = arrange.arrange_torch(*arrivals, **facts)
    results = torch.zeros(W * T * K, H, dtype=torch.bfloat16)
    returned = {"header": facts["header"], "ranks": facts["ranks"], "row_bytes": 2 * H}
    returned["window_rows"] = room
    divides = E % 8 == 0
    groups = {
        "bias": torch.zeros(E),
        "num_groups": 8 if divides else 1,
        "topk_groups": 4 if divides else 1,
    }
    return [
        *recorded(monkeypatch, lambda: softmax_topk.softmax_topk(logits, K), softmax_topk),
        *recorded(monkeypatch, lambda: topk_softmax.topk_softmax(logits, K), topk_softmax),
        *recorded(
            monkeypatch, lambda: sigmoid_topk.sigmoid_topk(logits, K, **groups), sigmoid_topk
        ),
        *recorded(monkeypatch, lambda: route.route(ids, slots), route),
        *recorded(monkeypatch, lambda: fp8.quantise(x), fp8),
        *recorded(monkeypatch, lambda: pack_fp8.pack_fp8(x, routed, slots, **messages), pack_fp8),
        *recorded(monkeypatch, lambda: fp8.dequantise(*narrow), fp8),
        *recorded(monkeypatch, lambda: arrange.arrange(*arrivals, **facts), arrange),
        *recorded(
            monkeypatch,
            lambda: unpack.unpack(arrivals[0], arranged, hidden=H, dtype=torch.bfloat16),
            unpack,
        ),
        *recorded(
            monkeypatch, lambda: unpack.unpack_scales(arrivals[0], arranged, hidden=H), unpack
        ),
        *recorded(
            monkeypatch,
            lambda: pack_results.pack_results(results, arranged, **messages),
            pack_results,
        ),
        *recorded(
            monkeypatch,
            lambda: locate_results.locate_results(arrivals[0], routed, **returned),
            locate_results,
        ),
        *recorded(monkeypatch, lambda: pack.pack(x, routed, slots, **messages), pack),
    ]


@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_within_their_budgets(target, monkeypatch, tmp_path) -> None:
    found = launches(monkeypatch)
    assert {launch.name for launch in found} == set(BUDGETS)
    over = []
    for launch in found:
        if launch.name in FP8_KERNELS and target == "sm_80":
            continue  # has no conversion to e4m3
        cost = compiled(launch, target, tmp_path)
        registers, shared_bytes = BUDGETS[launch.name]
        print(launch.name, target, cost)
        if cost.registers > registers or cost.shared_bytes > shared_bytes or cost.spilled_bytes:
            over.append((launch.name, cost))
    assert over == []


@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize("sizes", ODD)
def test_odd_sizes_compile_too(sizes, monkeypatch, tmp_path) -> None:
    """Ones become constants and nothing is divisible: other code than that of real sizes."""
    for launch in launches(monkeypatch, sizes):
        assert compiled(launch, "sm_90", tmp_path).spilled_bytes == 0, launch.name


@pytest.mark.usefixtures("compiler_cache")
def test_rows_are_moved_sixteen_bytes_at_a_time(monkeypatch, tmp_path) -> None:
    movers = {name: launch for launch in launches(monkeypatch) if (name := launch.name) in MOVERS}
    assert set(movers) == MOVERS
    for name, launch in movers.items():
        code = compiled(launch, "sm_90", tmp_path).code
        assert re.search(r"ld\.global[.\w]*\.v(2\.b64|4\.b32)", code), name
        assert re.search(r"st\.global[.\w]*\.v(2\.b64|4\.b32)", code), name
