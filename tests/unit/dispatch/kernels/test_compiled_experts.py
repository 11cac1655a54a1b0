"""What runs on expert rows, as machine code for four GPUs, within its budget and without a spill.

The launches have the tile sizes, depths and alignments of real ones: hidden 7168, top-8, and 8, 64,
256 or 600 rows for an expert; odd is one column more than Triton can load in vectors. Experts are
few and narrow, for these are only counted at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from dispatch.kernels import combine, grouped_gemm, grouped_gemm_fp8, swiglu, swiglu_fp8
from dispatch.kernels.grouped_tiles import Architecture
from tests.support.compiled_kernels import TARGETS, Launch, compiled, recorded

T, E, N, K, H = 16, 2, 256, 8, 7168
FEW, SOME, MANY, MOST = 8, 64, 256, 600
E4M3 = torch.float8_e4m3fn
KINDS = {
    "sm_80": Architecture.AMPERE,
    "sm_90": Architecture.HOPPER,
    "sm_100": Architecture.HOPPER,
    "gfx942": Architecture.CDNA,
}
NO_FP8 = "sm_80"  # its tensor cores have none

# Case and target: registers of a thread, bytes of shared memory of a program. Triton 3.6 and 3.7
# differ by a few registers; these hold for both.
BUDGETS = {
    "combine": {"sm_80": (48, 0), "sm_90": (48, 0), "sm_100": (64, 0), "gfx942": (48, 0)},
    "partial": {"sm_80": (48, 4096), "sm_90": (48, 4096), "sm_100": (48, 4096), "gfx942": (48, 0)},
    "swiglu": {"sm_80": (40, 0), "sm_90": (40, 0), "sm_100": (40, 0), "gfx942": (40, 0)},
    "fp8 swiglu": {"sm_90": (64, 128), "sm_100": (64, 128), "gfx942": (64, 128)},
    "gemm few": {
        "sm_80": (80, 61440),
        "sm_90": (72, 61440),
        "sm_100": (72, 61440),
        "gfx942": (64, 18432),
    },
    "gemm some": {
        "sm_80": (176, 73728),
        "sm_90": (136, 98304),
        "sm_100": (104, 98336),
        "gfx942": (96, 24576),
    },
    "gemm many": {
        "sm_80": (176, 98304),
        "sm_90": (128, 131072),
        "sm_100": (104, 131104),
        "gfx942": (128, 32768),
    },
    "gemm most": {
        "sm_80": (176, 98304),
        "sm_90": (240, 196608),
        "sm_100": (208, 196640),
        "gfx942": (128, 32768),
    },
    "gemm odd": {
        "sm_80": (224, 16384),
        "sm_90": (216, 16384),
        "sm_100": (216, 32800),
        "gfx942": (112, 8192),
    },
    "fp8 odd": {"sm_90": (232, 8192), "sm_100": (232, 8192), "gfx942": (224, 8192)},
    "fp8 few": {"sm_90": (80, 30720), "sm_100": (80, 30720), "gfx942": (128, 18432)},
    "fp8 some": {"sm_90": (216, 98304), "sm_100": (192, 98336), "gfx942": (168, 24576)},
    "fp8 many": {"sm_90": (216, 131072), "sm_100": (192, 131104), "gfx942": (168, 24576)},
}
TENSOR_CORES = {
    "sm_80": r"mma\.sync",
    "sm_90": r"wgmma\.mma_async",
    "sm_100": r"tcgen05\.mma",
    "gfx942": r"v_mfma_f32",
}
CASES = [(case, target) for case, costs in BUDGETS.items() for target in costs]


def gemm(mean: int, depth: int = H) -> Callable[[], object]:
    rows = torch.zeros(E * mean, depth, dtype=torch.bfloat16)
    weights = torch.zeros(E, N, depth, dtype=torch.bfloat16)
    bounds = torch.arange(E + 1) * mean
    return lambda: grouped_gemm.grouped_gemm(rows, weights, bounds)


def fp8(mean: int, depth: int = H) -> Callable[[], object]:
    rows, weights = torch.zeros(E * mean, depth).to(E4M3), torch.zeros(E, N, depth).to(E4M3)
    blocks = -(-depth // 128)
    row_scales, weight_scales = torch.zeros(E * mean, blocks), torch.zeros(E, 2, blocks)
    bounds = torch.arange(E + 1) * mean
    return lambda: grouped_gemm_fp8.grouped_gemm_fp8(
        rows, row_scales, weights, weight_scales, bounds
    )


def sums(out_dtype: torch.dtype) -> Callable[[], object]:
    rows, slots = torch.zeros(T, H, dtype=torch.bfloat16), torch.zeros(T, K, dtype=torch.int64)
    return lambda: combine.combine(rows, slots, torch.zeros(T, K), out_dtype=out_dtype)


def activation(operation: Callable[..., object]) -> Callable[[], object]:
    gate_up, bounds = torch.zeros(T, 4096, dtype=torch.bfloat16), torch.tensor([0, T])
    return lambda: operation(gate_up, bounds)


def launch_of(case: str, target: str, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """The one launch of a case, as the operation makes it on a host with such a GPU."""
    calls = {
        "combine": (sums(torch.bfloat16), combine),
        "partial": (sums(torch.float32), combine),
        "swiglu": (activation(swiglu.swiglu), swiglu),
        "fp8 swiglu": (activation(swiglu_fp8.swiglu_fp8), swiglu_fp8),
        "gemm few": (gemm(FEW), grouped_gemm),
        "gemm some": (gemm(SOME), grouped_gemm),
        "gemm many": (gemm(MANY), grouped_gemm),
        "gemm most": (gemm(MOST), grouped_gemm),
        "gemm odd": (gemm(MOST, H + 1), grouped_gemm),
        "fp8 odd": (fp8(MOST, H + 1), grouped_gemm_fp8),
        "fp8 few": (fp8(FEW), grouped_gemm_fp8),
        "fp8 some": (fp8(SOME), grouped_gemm_fp8),
        "fp8 many": (fp8(MANY), grouped_gemm_fp8),
    }
    call, module = calls[case]
    if hasattr(module, "architecture"):
        monkeypatch.setattr(module, "architecture", lambda device: KINDS[target])
    (launch,) = recorded(monkeypatch, call, module)
    return launch


def test_every_kernel_has_a_budget_wherever_it_can_run() -> None:
    for case, costs in BUDGETS.items():
        assert set(costs) == set(TARGETS) - ({NO_FP8} if "fp8" in case else set())


@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize(("case", "target"), CASES)
def test_kernels_compile_within_their_budgets(case, target, monkeypatch, tmp_path) -> None:
    cost = compiled(launch_of(case, target, monkeypatch), target, tmp_path)
    print(case, target, cost)
    registers, shared_bytes = BUDGETS[case][target]
    assert cost.spilled_bytes == 0
    assert (cost.registers <= registers, cost.shared_bytes <= shared_bytes) == (True, True)
    if case in ("combine", "partial"):
        # The bits of the reference: no product is added without having been rounded.
        assert not re.search(r"\bfma\b|fma\.rn|v_(pk_)?fma|v_fmac|v_mad_f32", cost.code)
        assert re.search(r"mul\.rn|v_(pk_)?mul_f32", cost.code)
    elif case.endswith(("some", "many", "most")):
        assert re.search(TENSOR_CORES[target], cost.code)
