"""The check of the kernel benchmark runs here, interpreted; and it finds what is wrong."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_kernels
from benchmarks.bench_kernels import TINY, parsed, shapes, unusable, wrong_results
from benchmarks.harness import Recorder

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def interpreted():
    support = pytest.importorskip("tests.support.triton_interpreter")
    from benchmarks import kernel_cases

    assert kernel_cases.cases
    with support.interpreted():
        yield


@pytest.fixture
def options():
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    found = parsed(["--topk", "4"])
    for name, values in TINY.items():
        setattr(found, name, values)
    return found


def test_every_kernel_agrees_with_its_reference(interpreted, options) -> None:
    assert wrong_results(options, CPU) == []


def test_a_kernel_that_is_wrong_is_named(options, monkeypatch) -> None:
    from benchmarks import kernel_moves

    options.only, options.tokens = ["combine"], [3]
    right = kernel_moves.combine

    def off_by_a_bit(*arguments):
        out = right(*arguments)
        out.view(torch.int16)[0, 0] ^= 1
        return out

    monkeypatch.setattr(kernel_moves, "combine", off_by_a_bit)
    (problem,) = wrong_results(options, CPU)
    assert problem.startswith("combine {'tokens': 3, 'hidden': 256, 'experts': 16, 'topk': 4}")
    assert problem.endswith("result 0 differs in 1 places")


def test_results_that_are_not_numbers_are_wrong(options) -> None:
    from benchmarks.kernel_case import Case
    from benchmarks.kernel_cases import cases

    (shape,) = (shape for shape in shapes(options) if shape.tokens == 3)
    found = {case.kernel: case for case in cases(shape, CPU)}
    case: Case = replace(
        found["swiglu"], call=lambda: torch.full((12, shape.width), torch.nan).bfloat16()
    )
    assert "differs by nan" in str(case.mismatch())
    assert found["swiglu"].mismatch() is None


class FakeClock:
    """Runs what it is to time once, and finds that it took two microseconds."""

    def __init__(self, device, samples) -> None:
        del device, samples

    def microseconds(self, call):
        call()
        return [2.0]


def test_figures_are_recorded_for_every_kernel(options, monkeypatch) -> None:
    monkeypatch.setattr(bench_kernels, "Clock", FakeClock)
    monkeypatch.setattr(bench_kernels, "bandwidth", lambda clock, device: 1000.0)
    recorder = Recorder("kernels")
    bench_kernels.measure(options, CPU, recorder)
    floors = {
        line["kernel"]: line["median"]
        for line in recorder.lines
        if line["figure"] == "of the memory floor" and line["tokens"] == 3
    }
    assert set(floors) == {
        "softmax_topk", "topk_softmax", "sigmoid_topk", "route", "quantise", "pack", "arrange",
        "unpack", "pack_fp8", "unpack_fp8_rows", "unpack_scales", "combine", "swiglu",
        "swiglu_fp8", "grouped_gemm", "grouped_gemm_fp8", "pack_results", "locate_results",
    }  # fmt: skip
    # 3 tokens of 4 choices: 12 rows are read and 3 written, of 256 bf16, and slots and weights.
    assert floors["combine"] == pytest.approx((15 * 512 + 96) / 1000 / 2, abs=1e-4)
    rates = [line for line in recorder.lines if line["unit"] == "TFLOP/s"]
    assert {line["kernel"] for line in rates} == {"grouped_gemm", "grouped_gemm_fp8"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    assert unusable() == "no GPU"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_kernels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "nothing measured: no GPU\n"
