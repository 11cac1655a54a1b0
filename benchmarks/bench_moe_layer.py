"""One MoE layer on the CPU: router, experts and weighted sum, ours against transformers' block.

    python -m benchmarks.bench_moe_layer                          # hidden 2048, 64 experts, top-8
    python -m benchmarks.bench_moe_layer --tokens 1 16 --rounds 5

All contestants have the same weights and get the same tokens in turns, fresh ones each round; a
ratio is taken within a round, and the median over the rounds counts. One rank, no messages: what
an exchange between ranks costs is measured by `bench_dispatch`.

    ours            bitwise: a token's result does not depend on the tokens beside it
    ours tolerant   the same layer without that promise
    eager           transformers' Qwen3-MoE block, a loop over experts
    grouped_mm      the same block on `torch.nn.functional.grouped_mm`, its default
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Recorder
from configs.schema import Exactness
from dispatch import DispatchLayout, LocalDispatcher
from moe_runtime.models.elementwise import choose_experts
from moe_runtime.models.expert_mlp import ExpertMLP
from moe_runtime.models.experts import ExpertBank
from moe_runtime.models.linear import Linear
from moe_runtime.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import nn

Layer = Callable[[torch.Tensor], torch.Tensor]
PEERS = ("eager", "grouped_mm")
SAMPLE_S = 0.02
DTYPE = torch.bfloat16
AGREEMENT = 0.05  # of the largest element: two roundings to bfloat16 and another order of sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """H, I, E and K of the layer."""

    hidden: int
    inner: int
    experts: int
    topk: int

    def spec(self) -> ModelSpec:
        """A model of this one layer; what attention would need is of no account."""
        return ModelSpec(
            vocab_size=1,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            moe_intermediate_size=self.inner,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=self.hidden,
            num_experts=self.experts,
            topk=self.topk,
            norm_topk_prob=True,
            attention_bias=False,
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            max_position_embeddings=1,
            moe_layers=(0,),
            eos_token_ids=(),
            dtype=DTYPE,
        )


@dataclass(slots=True)
class Slab:
    """Plain memory for the bank."""

    tensor: torch.Tensor


def transformers_block(sizes: Sizes) -> nn.Module:
    """A block with random weights of the usual scale."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.inner,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.topk,
        norm_topk_prob=True,
    )
    block = Qwen3MoeSparseMoeBlock(config).to(DTYPE).eval()
    for weight in block.parameters():
        weight.requires_grad_(requires_grad=False)
        weight.normal_(std=weight.shape[-1] ** -0.5)
    return block


def theirs(block: nn.Module, implementation: str) -> Layer:
    """The block with one implementation of its experts."""
    config = block.experts.config

    def layer(x: torch.Tensor) -> torch.Tensor:
        config._experts_implementation = implementation
        out: torch.Tensor = block(x.unsqueeze(0))
        return out[0]

    return layer


def ours(block: nn.Module, sizes: Sizes, max_tokens: int, exactness: Exactness) -> Layer:
    """Our layer with the block's weights, reordered as serving does."""
    bank = ExpertBank(
        sizes.spec(), DTYPE, lambda nbytes: Slab(torch.empty(nbytes, dtype=torch.uint8))
    )
    for expert in range(sizes.experts):
        matrices = bank.as_matrices(bank.reserve(0, expert))
        matrices[:2].view(-1, sizes.hidden).copy_(block.experts.gate_up_proj[expert])
        matrices[2].view(sizes.hidden, sizes.inner).copy_(block.experts.down_proj[expert])
        bank.ready(0, expert)
    experts = ExpertMLP(bank, exactness=exactness)
    experts.warm_up()
    router = Linear(block.gate.weight.detach(), exactness=exactness)
    layout = DispatchLayout(
        hidden=sizes.hidden,
        topk=sizes.topk,
        num_logical=sizes.experts,
        num_layers=1,
        dtype=DTYPE,
        max_tokens=max_tokens,
    )
    dispatcher = LocalDispatcher(layout=layout)

    def layer(x: torch.Tensor) -> torch.Tensor:
        dispatcher.begin_pass()
        ids, weights = choose_experts(router(x), sizes.topk, renormalise=True)
        arrived, handle = dispatcher.dispatch(x, ids, weights, layer=0)
        rows = experts(arrived.rows, arrived.counts, arrived.experts, moe_layer=0)
        out = dispatcher.combine(rows, handle)
        dispatcher.end_pass()
        return out

    return layer


def check(layers: dict[str, Layer], x: torch.Tensor) -> None:
    """Raise unless all contestants compute the same function."""
    expected = layers["eager"](x).to(torch.float32)
    for name, layer in layers.items():
        difference = (layer(x).to(torch.float32) - expected).abs().max() / expected.abs().max()
        if difference > AGREEMENT:
            raise RuntimeError(f"{name} differs from eager by {difference:.3g} of the largest")


def milliseconds(layer: Layer, x: torch.Tensor, calls: int) -> float:
    """Time of one call, the mean of `calls`."""
    start = time.perf_counter()
    for _ in range(calls):
        layer(x)
    return (time.perf_counter() - start) * 1e3 / calls


def measure(
    layers: dict[str, Layer], sizes: Sizes, num_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each contestant, a round each; the first round warms up and is left out."""
    x = torch.randn(num_tokens, sizes.hidden).to(DTYPE)
    check(layers, x)
    once_s = milliseconds(layers["eager"], x, 1) / 1e3
    calls = max(1, round(SAMPLE_S / once_s))
    found: dict[str, list[float]] = {name: [] for name in layers}
    for number in range(rounds + 1):
        x = torch.randn(num_tokens, sizes.hidden).to(DTYPE)
        names = list(layers)
        for name in names if number % 2 else reversed(names):
            taken = milliseconds(layers[name], x, calls)
            if number:
                found[name].append(taken)
    return found


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="Write no results.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = Sizes(
        hidden=options.hidden, inner=options.inner, experts=options.experts, topk=options.topk
    )
    recorder = Recorder("moe_layer")
    with torch.inference_mode():
        block = transformers_block(sizes)
        most = max(options.tokens)
        layers: dict[str, Layer] = {
            "ours": ours(block, sizes, most, Exactness.BITWISE),
            "ours tolerant": ours(block, sizes, most, Exactness.TOLERANT),
        }
        layers |= {name: theirs(block, name) for name in PEERS}
        for tokens in options.tokens:
            found = measure(layers, sizes, tokens, options.rounds)
            labels = {"tokens": tokens, "threads": options.threads}
            for name, samples in found.items():
                recorder.add("layer", "ms", samples, contestant=name, **labels)
            for peer in PEERS:
                pairs = zip(found["ours"], found[peer], strict=True)
                recorder.add(f"layer, ours over {peer}", "1", [a / b for a, b in pairs], **labels)
    if not options.dry:
        recorder.write()


if __name__ == "__main__":
    main()
