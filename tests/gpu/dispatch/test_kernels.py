"""Every kernel against its torch reference on a real GPU, and as one graph that is replayed."""

from __future__ import annotations

import random

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

pytest.importorskip("triton")

from benchmarks.bench_kernels import parsed, wrong_results  # noqa: E402
from dispatch.kernels.combine import combine, combine_torch  # noqa: E402
from dispatch.kernels.grouped_gemm import grouped_gemm, grouped_gemm_torch  # noqa: E402


@pytest.fixture(autouse=True)
def device() -> torch.device:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("hidden", [256, 1000, 2880, 7168])
def test_kernels_agree_with_their_references(device, hidden) -> None:
    options = parsed(["--hidden", str(hidden), "--tokens", "1", "5", "130", "--experts", "64"])
    assert wrong_results(options, device) == []


def test_a_captured_layer_follows_what_its_buffers_hold(device) -> None:
    experts, num_rows, hidden = 6, 48, 256
    rows = torch.randn(num_rows, hidden, device=device).bfloat16()
    weights = torch.randn(experts, 512, hidden, device=device).bfloat16()
    bounds = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    slots = torch.zeros(8, 4, dtype=torch.int64, device=device)
    factors = torch.rand(8, 4, device=device)

    def layer() -> torch.Tensor:
        return combine(grouped_gemm(rows, weights, bounds), slots, factors)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(5):
        cuts = torch.randint(0, num_rows + 1, (experts - 1,)).sort().values
        bounds.copy_(torch.cat((torch.tensor([0]), cuts, torch.tensor([num_rows]))))
        slots.copy_(torch.randint(-1, num_rows, (8, 4)))
        graph.replay()
        due = combine_torch(grouped_gemm_torch(rows, weights, bounds), slots, factors)
        torch.testing.assert_close(out.float(), due.float(), rtol=2**-6, atol=0.25)
