"""Triton kernels on the CPU: the interpreter, made right for bf16 and fp8, for one test at a time.

The interpreter is normally switched on by an environment variable before Triton is imported, for
the whole process and its children. Here every JIT function in sight is replaced by an interpreted
one while a test runs and put back after it, so that kernels can be compiled in the same process.

As delivered it converts to bf16 by cutting bits off, rounds fp8 wrongly, and adds and multiplies
bf16 numbers as if they were integers, all without an error. So every conversion goes through torch
here, and bf16 is computed in fp32 and rounded once, as the hardware does.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dispatch.kernels.operands import kernels_on_cpu

pytest.importorskip("triton")
# Loaded by Triton at the first launch, and then it wants to find compiled functions.
pytest.importorskip("triton.experimental.gluon")

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

Handle = interpreter.TensorHandle
FLOATS = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def converted(data: np.ndarray, source: Any, target: Any, rounding: Any = None) -> np.ndarray:
    """Bit patterns of `source` numbers as the bit patterns of the nearest `target` numbers."""
    assert rounding is None or "RTZ" not in str(rounding), "only rounding to nearest is modelled"
    wide = np.ascontiguousarray(data).view(f"i{source.primitive_bitwidth // 8}")
    numbers = torch.from_numpy(np.atleast_1d(wide).copy()).view(FLOATS[source])
    found = numbers.to(FLOATS[target])
    size = found.dtype.itemsize
    return found.view(SIGNED[size]).numpy().view(f"u{size}").reshape(np.shape(data))


def in_fp32(handle: Any) -> Any:
    data = converted(handle.data, handle.dtype.scalar, tl.float32).view(np.float32)
    return Handle(data, tl.float32)


def in_bf16(data: np.ndarray) -> Any:
    return Handle(converted(data.astype(np.float32), tl.float32, tl.bfloat16), tl.bfloat16)


class ExactBuilder(interpreter.InterpreterBuilder):
    """The interpreter's operations with the conversions and the bf16 arithmetic put right."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source in FLOATS and target in FLOATS:
            data = converted(src.data, source, target)
            return Handle(data.view(interpreter._get_np_dtype(dst_type)), target)
        if source == tl.bfloat16:
            return super().cast_impl(in_fp32(src), dst_type)
        if target == tl.bfloat16:
            return in_bf16(super().cast_impl(src, tl.float32).data)
        return super().cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or rhs.dtype.scalar != tl.bfloat16:
            return super().binary_op(lhs, rhs, op)
        data = op(in_fp32(lhs).data, in_fp32(rhs).data)
        return Handle(data, tl.int1) if op in COMPARISONS else in_bf16(data)

    def unary_op(self, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar != tl.bfloat16:
            return super().unary_op(arg, op)
        return in_bf16(op(in_fp32(arg).data))

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.bfloat16:
            return super().create_fma(x, y, z)
        return in_bf16(in_fp32(x).data * in_fp32(y).data + in_fp32(z).data)

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        narrow = [in_fp32(h) if h.dtype.scalar.is_floating() else h for h in (a, b)]
        return super().create_dot(*narrow, d, *rest)


PATCHED_CLASSES = (tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)


def _language() -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("triton.language")]
    return [*modules, *PATCHED_CLASSES]


def _kernel_modules() -> list[Any]:
    return [
        module
        for name, module in sys.modules.items()
        if ".kernels." in name and not name.startswith(("triton", "torch"))
    ]


def _restore(owner: Any, names: dict[str, Any]) -> None:
    for name, value in list(vars(owner).items()):
        if name not in names:
            delattr(owner, name)
        elif value is not names[name]:
            setattr(owner, name, names[name])


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret every kernel of the modules imported so far, and let CPU tensors reach them."""
    language = _language()
    owners = [*language, *_kernel_modules()]
    # The interpreter leaves some of its own changes to the language behind; these go too.
    before = [dict(vars(owner)) for owner in owners]
    known: dict[int, Any] = {}
    builder = ExactBuilder()
    saved = interpreter.interpreter_builder, interpreter.interpreter_semantic
    executor = interpreter.GridExecutor
    saved_arguments = executor._init_args_hst, executor._restore_args_dev
    saved_convert, patch_language = interpreter._convert_float, interpreter._patch_lang
    try:
        interpreter.interpreter_builder = builder
        interpreter.interpreter_semantic = type(saved[1])(builder)
        interpreter._convert_float = converted
        # Tensors are used where they are, instead of being copied to the CPU and back whole.
        executor._init_args_hst = lambda self, arguments, named: (arguments, named)
        executor._restore_args_dev = lambda self, *arguments: None
        for owner in owners:
            for name, value in list(vars(owner).items()):
                if isinstance(value, JITFunction):
                    function = known.setdefault(
                        id(value), interpreter.InterpretedFunction(value.fn)
                    )
                    setattr(owner, name, function)
        # Once for all: done again at each call of a device function it takes most of the time.
        patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        # What Triton 3.6 has for this fails with numpy 2.4.
        tl.tensor.__index__ = lambda number: int(number.handle.data.squeeze())
        interpreter._patch_lang = lambda body: SimpleNamespace(restore=lambda: None)
        with kernels_on_cpu(), warnings.catch_warnings(), np.errstate(all="ignore"):
            # Of numpy, where a GPU silently computes a NaN.
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        interpreter.interpreter_builder, interpreter.interpreter_semantic = saved
        executor._init_args_hst, executor._restore_args_dev = saved_arguments
        interpreter._convert_float, interpreter._patch_lang = saved_convert, patch_language
        # Rewritten bodies refer to names that the interpreter put into the kernels' modules.
        interpreter.InterpretedFunction.rewritten_fn.clear()
        for owner, names in zip(owners, before, strict=True):
            _restore(owner, names)
