"""What the other tests of kernels rest on: the interpreter computes as the hardware does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dispatch.errors import KernelsUnavailable
from dispatch.kernels import softmax_topk
from dispatch.kernels.language import jit, launch, tl
from dispatch.kernels.operands import runs_kernel

CPU = torch.device("cpu")


@jit
def _convert_kernel(source_ptr: tl.tensor, target_ptr: tl.tensor, N: tl.constexpr) -> None:
    at = tl.arange(0, N)
    value = tl.load(source_ptr + at)
    tl.store(target_ptr + at, value.to(target_ptr.dtype.element_ty))


@jit
def _arithmetic_kernel(
    left_ptr: tl.tensor, right_ptr: tl.tensor, out_ptr: tl.tensor, N: tl.constexpr
) -> None:
    at = tl.arange(0, N)
    left, right = tl.load(left_ptr + at), tl.load(right_ptr + at)
    tl.store(out_ptr + at, left + right)
    tl.store(out_ptr + N + at, left * right)
    tl.store(out_ptr + 2 * N + at, tl.where(left < right, left, right - left))


@jit
def _dot_kernel(left_ptr: tl.tensor, right_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    product = tl.dot(tl.load(left_ptr + at), tl.load(right_ptr + at))
    tl.store(out_ptr + at, product)


def every(dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def same(found: torch.Tensor, due: torch.Tensor) -> bool:
    """Bits, but for the many that mean NaN."""
    wide = found.float(), due.float()
    assert torch.equal(wide[0].isnan(), wide[1].isnan())
    kept = ~wide[0].isnan()
    return torch.equal(found.view(torch.uint8).view(len(found), -1)[kept],
                       due.view(torch.uint8).view(len(due), -1)[kept])  # fmt: skip


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_narrow_number_widens_exactly(interpreted, source) -> None:
    values = every(source)
    out = torch.empty(len(values))
    launch(_convert_kernel, (1,), values, out, device=CPU, N=len(values))
    assert same(out, values.float())


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_wide_numbers_are_rounded_to_the_nearest(interpreted, seed, target) -> None:
    values = torch.randn(8192) * torch.randn(8192).mul(4).exp2()
    if target is torch.float8_e4m3fn:
        values = values.clamp(-448, 448)  # beyond, hardware and torch differ
    out = torch.empty(8192, dtype=target)
    launch(_convert_kernel, (1,), values, out, device=CPU, N=8192)
    assert same(out, values.to(target))


def test_bf16_is_computed_as_numbers_and_rounded_once(interpreted, seed) -> None:
    left, right = torch.randn(2, 1024).to(torch.bfloat16).unbind()
    out = torch.empty(3 * 1024, dtype=torch.bfloat16)
    launch(_arithmetic_kernel, (1,), left, right, out, device=CPU, N=1024)
    due = (left + right, left * right, torch.where(left < right, left, right - left))
    assert torch.equal(out, torch.cat(due))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_products_of_narrow_matrices(interpreted, seed, dtype) -> None:
    left, right = torch.randn(2, 16, 16).to(dtype).unbind()
    out = torch.empty(16, 16)
    launch(_dot_kernel, (1,), left, right, out, device=CPU)
    torch.testing.assert_close(out, left.float() @ right.float(), rtol=1e-6, atol=1e-5)


def test_everything_is_put_back() -> None:
    from triton.runtime.jit import JITFunction

    from tests.support.triton_interpreter import interpreted

    names = ("load", "sum", "range", "multiple_of")
    before = {name: getattr(tl, name) for name in names}
    kernel = softmax_topk._softmax_topk_kernel
    with interpreted():
        assert not isinstance(softmax_topk._softmax_topk_kernel, JITFunction)
        assert runs_kernel(CPU)
        softmax_topk.softmax_topk(torch.randn(3, 5), 2)
    assert softmax_topk._softmax_topk_kernel is kernel
    assert isinstance(kernel, JITFunction)
    assert {name: getattr(tl, name) for name in names} == before
    assert not runs_kernel(CPU)


def test_other_devices_are_refused() -> None:
    with pytest.raises(KernelsUnavailable, match="no kernels for meta"):
        softmax_topk.softmax_topk(torch.zeros(2, 3, device="meta"), 1)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import dispatch
from dispatch.errors import KernelsUnavailable
from dispatch.kernels import softmax_topk
from dispatch.kernels.operands import kernels_on_cpu
ids, weights = softmax_topk.softmax_topk(torch.tensor([[0.0, 2.0, 1.0]]), 2)
assert ids.tolist() == [[1, 2]]
try:
    with kernels_on_cpu():
        softmax_topk.softmax_topk(torch.zeros(2, 3), 1)
except KernelsUnavailable as error:
    assert "not installed" in str(error), error
else:
    raise AssertionError("no error")
try:
    softmax_topk._softmax_topk_kernel[(1,)]()
except KernelsUnavailable as error:
    assert error.operation == "_softmax_topk_kernel", error
else:
    raise AssertionError("no error")
"""

WITHOUT_USE = """
import sys
import dispatch
from dispatch import *
import dispatch.kernels
assert "triton" not in sys.modules
"""


@pytest.mark.parametrize("program", [WITHOUT_TRITON, WITHOUT_USE], ids=["absent", "unused"])
def test_without_triton_the_references_work(program) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
