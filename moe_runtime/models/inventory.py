"""The tensors that a Qwen3-MoE checkpoint must hold, by name and shape, and whether it does.

Whoever starts a cluster looks before a dozen workers stumble over the same file. Only the headers
of the files are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moe_runtime.models.checkpoint import Checkpoint
    from moe_runtime.models.spec import ModelSpec

#: name and shape
Entry = tuple[str, tuple[int, ...]]


def check_inventory(checkpoint: Checkpoint) -> None:
    """Look at every tensor of an open checkpoint, without reading it.

    Raises:
        CheckpointError: The first that is missing, or of another shape or type, or whose file is.
    """
    for name, shape in inventory(checkpoint.spec):
        checkpoint.check(name, shape)


def inventory(spec: ModelSpec) -> Iterator[Entry]:
    """Yield every tensor of the model."""
    hidden = spec.hidden_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from _attention(spec, f"{prefix}.self_attn")
        if layer not in spec.moe_layers:
            yield from _mlp(f"{prefix}.mlp", hidden, spec.intermediate_size)
            continue
        yield f"{prefix}.mlp.gate.weight", (spec.num_experts, hidden)
        for expert in range(spec.num_experts):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, spec.moe_intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not spec.tie_word_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)


def _attention(spec: ModelSpec, prefix: str) -> Iterator[Entry]:
    rows = {
        "q_proj": (spec.query_size, spec.hidden_size),
        "k_proj": (spec.kv_size, spec.hidden_size),
        "v_proj": (spec.kv_size, spec.hidden_size),
        "o_proj": (spec.hidden_size, spec.query_size),
    }
    for name, shape in rows.items():
        yield f"{prefix}.{name}.weight", shape
        if spec.attention_bias:
            yield f"{prefix}.{name}.bias", shape[:1]
    for name in ("q_norm", "k_norm"):
        yield f"{prefix}.{name}.weight", (spec.head_dim,)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Entry]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)
