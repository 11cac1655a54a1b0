"""The dispatch kernels on a GPU: first that they are right, then how near they are to the memory.

    python -m benchmarks.bench_kernels                       # all sizes, a few minutes
    python -m benchmarks.bench_kernels --tokens 128 4096 --hidden 7168 --samples 50
    python -m benchmarks.bench_kernels --only pack combine

Needs a GPU, torch and Triton, and of this package only what it is in. On a host without a GPU it
says so in one line and exits with status 2; a wrong result is named, and the status is 1.

Every kernel is compared with its torch reference on fresh random input (the seed is printed) before
anything is timed. A sample is the time between two events on the stream. Before each one a large
buffer is written, so that no operand is in the cache, and the launch overhead hides behind that.

    floor         bytes that must be read and written, over the bandwidth of a copy on this device
    of the floor  floor / time: 1 is as fast as memory allows
    torch         torch's own operation for the same purpose, where there is one
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import Recorder

if TYPE_CHECKING:
    from benchmarks.kernel_case import Case, Shape

UNUSABLE, WRONG = 2, 1
COPY_BYTES = 1 << 30
FLUSH_BYTES = 1 << 30  # takes long enough to hide a few launches
WARM_UPS = 3
WIDTHS = {2048: 768, 7168: 2048}  # hidden -> expert width: Qwen3-30B-A3B, DeepSeek-V3
TINY = {"tokens": [1, 3], "hidden": [256], "experts": [16]}


def unusable() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    del triton
    return None


def shapes(options: argparse.Namespace) -> Iterator[Shape]:
    """All sizes asked for, the small ones first."""
    from benchmarks.kernel_case import Shape

    for hidden in options.hidden:
        for experts in options.experts:
            for tokens in options.tokens:
                yield Shape(
                    tokens=tokens,
                    hidden=hidden,
                    experts=experts,
                    topk=min(options.topk, experts),
                    width=WIDTHS.get(hidden, max(128, hidden // 4)),
                )


def wrong_results(options: argparse.Namespace, device: torch.device) -> list[str]:
    """Compare every kernel with its reference on every shape; names each that differs."""
    from benchmarks.kernel_cases import cases

    found = []
    for shape in shapes(options):
        for case in chosen(cases(shape, device), options.only):
            problem = case.mismatch()
            if problem is not None:
                found.append(f"{case.kernel} {shape.labels()}: {problem}")
        _free(device)
    return found


def chosen(cases: Iterator[Case], names: list[str]) -> Iterator[Case]:
    """Those of the kernels named; all if none is."""
    return (case for case in cases if not names or case.kernel in names)


class Clock:
    """Times calls on one device, operands not in its cache."""

    def __init__(self, device: torch.device, samples: int) -> None:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        self._samples = samples
        self._flushed = torch.empty(
            min(FLUSH_BYTES, free_bytes // 8), dtype=torch.uint8, device=device
        )

    def microseconds(self, call: Callable[[], Any]) -> list[float]:
        """Samples of one call."""
        for _ in range(WARM_UPS):
            call()
        torch.cuda.synchronize()
        pairs = []
        for _ in range(self._samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            self._flushed.zero_()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def bandwidth(clock: Clock, device: torch.device) -> float:
    """Bytes per microsecond of a copy, read and written counted."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    source = torch.empty(min(COPY_BYTES, free_bytes // 8), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = clock.microseconds(lambda: target.copy_(source))
    return 2 * source.numel() / statistics.median(times)


def measure(options: argparse.Namespace, device: torch.device, recorder: Recorder) -> None:
    """Time every kernel on every shape."""
    from benchmarks.kernel_cases import cases

    clock = Clock(device, options.samples)
    speed = bandwidth(clock, device)
    recorder.add("copy", "GB/s", [speed / 1e3])
    for shape in shapes(options):
        for case in chosen(cases(shape, device), options.only):
            labels = {"kernel": case.kernel, **shape.labels(), **case.notes}
            times = clock.microseconds(case.call)
            recorder.add("time", "us", times, **labels)
            floor = case.least_bytes / speed
            recorder.add("of the memory floor", "1", [floor / time for time in times], **labels)
            if case.flops:
                rates = [case.flops / time / 1e6 for time in times]
                recorder.add("products", "TFLOP/s", rates, **labels)
            if case.rival is not None:
                theirs = clock.microseconds(case.rival)
                recorder.add("torch", "us", theirs, **labels)
                ratio = statistics.median(times) / statistics.median(theirs)
                recorder.add("time, ours over torch", "1", [ratio], **labels)
        _free(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024, 4096])
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 7168])
    parser.add_argument("--experts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--only", nargs="+", default=[], help="Names of kernels.")
    parser.add_argument("--check-only", action="store_true", help="Time nothing.")
    return parser.parse_args(arguments)


def main() -> int:
    """Check, measure, write the results."""
    options = parsed()
    reason = unusable()
    if reason is not None:
        print(f"nothing measured: {reason}", file=sys.stderr)
        return UNUSABLE
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(options.seed)
    print(f"seed {options.seed}, {torch.cuda.get_device_name(device)}", file=sys.stderr)
    with torch.inference_mode():
        problems = wrong_results(options, device)
        for problem in problems:
            print(f"wrong: {problem}", file=sys.stderr)
        if problems or options.check_only:
            return WRONG if problems else 0
        recorder = Recorder("kernels")
        measure(options, device, recorder)
    recorder.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
