"""Qwen3-MoE: the forward step of one rank over a flat batch of tokens.

    x = embed(tokens)
    each layer:  x += attention(norm(x))      data parallel: this rank's tokens, its own KV pages
                 x += experts(norm(x))        dispatched to the ranks that hold the chosen experts
    logits = head(norm(x[wanted rows]))

Legend: T tokens, S wanted rows, H hidden, Hq query heads, Hkv key and value heads, D head width.

Every step treats a row by itself (see `exactness`), so a token's logits depend on the tokens before
it in its own sequence and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from configs.schema import Exactness
from moe_runtime.models.attention import PagedAttention
from moe_runtime.models.attention_plan import AttentionPlan
from moe_runtime.models.batch import ForwardBatch
from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.elementwise import choose_experts, rms_norm, silu_and_mul
from moe_runtime.models.expert_exchange import ExpertDispatcher, ExpertRowsLike, through_experts
from moe_runtime.models.expert_mlp import ExpertMLP
from moe_runtime.models.experts import ExpertBank
from moe_runtime.models.linear import Linear
from moe_runtime.models.paged_kv import PagedKV
from moe_runtime.models.rotary import Rotary, apply_rotary
from moe_runtime.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What all layers of one forward step share."""

    batch: ForwardBatch
    kv: PagedKV
    dispatcher: ExpertDispatcher
    microbatch_tokens: int | None
    rotation: tuple[torch.Tensor, torch.Tensor]
    attention: PagedAttention
    plan: AttentionPlan


class _Loader:
    """Reads this model's dense weights, in the compute type."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, exactness: Exactness) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._exactness = exactness

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.tensor(name, shape, self._dtype)

    def linear(self, *names: tuple[str, int], in_features: int, bias: bool = False) -> Linear:
        """One layer from the rows of one or more stored ones, each `(name, out_features)`."""
        weights = [self.tensor(f"{name}.weight", out, in_features) for name, out in names]
        biases = [self.tensor(f"{name}.bias", out) for name, out in names] if bias else []
        return Linear(
            torch.cat(weights),
            exactness=self._exactness,
            bias=torch.cat(biases) if biases else None,
        )


class _Attention:
    """Self attention of one layer over the paged cache."""

    def __init__(self, load: _Loader, spec: ModelSpec, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self._spec = spec
        self._layer = layer
        self._qkv = load.linear(
            (f"{prefix}.q_proj", spec.query_size),
            (f"{prefix}.k_proj", spec.kv_size),
            (f"{prefix}.v_proj", spec.kv_size),
            in_features=spec.hidden_size,
            bias=spec.attention_bias,
        )
        self._out = load.linear(
            (f"{prefix}.o_proj", spec.hidden_size),
            in_features=spec.query_size,
            bias=spec.attention_bias,
        )
        q_norm = load.tensor(f"{prefix}.q_norm.weight", spec.head_dim)
        k_norm = load.tensor(f"{prefix}.k_norm.weight", spec.head_dim)
        # Queries and keys are normalised in one call, each head with its own row of weights.
        self._norm_weight = torch.cat(
            (q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1))
        )
        self._unit = torch.ones(spec.head_dim, dtype=q_norm.dtype)

    def __call__(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        spec, kv = self._spec, step.kv
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = self._qkv(x).view(-1, heads + 2 * kv_heads, spec.head_dim)
        qk = rms_norm(qkv[:, : heads + kv_heads], self._unit, spec.rms_norm_eps)
        qk = apply_rotary(qk.mul_(self._norm_weight), *step.rotation)
        values = qkv[:, heads + kv_heads :]
        kv.write(self._layer, qk[:, heads:], values, step.batch.slot_mapping)
        attended = step.attention(qk[:, :heads], kv, self._layer, step.plan)
        return self._out(attended.reshape(-1, spec.query_size))


class _DenseMLP:
    """Gated MLP of a layer without experts."""

    def __init__(self, load: _Loader, spec: ModelSpec, layer: int, exactness: Exactness) -> None:
        prefix, inner = f"model.layers.{layer}.mlp", spec.intermediate_size
        self._exactness = exactness
        self._gate_up = load.linear(
            (f"{prefix}.gate_proj", inner),
            (f"{prefix}.up_proj", inner),
            in_features=spec.hidden_size,
        )
        self._down = load.linear((f"{prefix}.down_proj", spec.hidden_size), in_features=inner)

    def __call__(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        del step  # the same call as for a layer with experts
        return self._down(silu_and_mul(self._gate_up(x), self._exactness))


class _SparseMLP:
    """Router and experts of a layer; takes part in the exchange even with no tokens."""

    def __init__(self, load: _Loader, spec: ModelSpec, layer: int, experts: ExpertMLP) -> None:
        self._spec = spec
        self._moe_layer = spec.moe_layers.index(layer)
        self._experts = experts
        self._router = load.linear(
            (f"model.layers.{layer}.mlp.gate", spec.num_experts), in_features=spec.hidden_size
        )

    def __call__(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        spec, moe_layer = self._spec, self._moe_layer
        ids, weights = choose_experts(self._router(x), spec.topk, renormalise=spec.norm_topk_prob)
        return through_experts(
            step.dispatcher,
            x,
            ids,
            weights,
            layer=moe_layer,
            experts=self._compute,
            microbatch_tokens=step.microbatch_tokens,
        )

    def _compute(self, arrived: ExpertRowsLike) -> torch.Tensor:
        return self._experts(
            arrived.rows, arrived.counts, arrived.experts, moe_layer=self._moe_layer
        )


class _Layer:
    """Attention and MLP, each behind its norm."""

    def __init__(
        self,
        load: _Loader,
        spec: ModelSpec,
        layer: int,
        exactness: Exactness,
        experts: ExpertMLP,
    ) -> None:
        prefix = f"model.layers.{layer}"
        self._epsilon = spec.rms_norm_eps
        self._attention_norm = load.tensor(f"{prefix}.input_layernorm.weight", spec.hidden_size)
        self._mlp_norm = load.tensor(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size)
        self._attention = _Attention(load, spec, layer)
        self._mlp: _SparseMLP | _DenseMLP = (
            _SparseMLP(load, spec, layer, experts)
            if layer in spec.moe_layers
            else _DenseMLP(load, spec, layer, exactness)
        )

    def __call__(self, x: torch.Tensor, step: _Step) -> torch.Tensor:
        if step.batch.num_tokens:
            x = x + self._attention(rms_norm(x, self._attention_norm, self._epsilon), step)
        return x + self._mlp(rms_norm(x, self._mlp_norm, self._epsilon), step)


class Qwen3MoeModel:
    """Weights and forward step of one rank. Used from the rank loop only.

    The dense weights are read by the constructor's caller through an open checkpoint; experts come
    from the bank and may change between steps.

    Args:
        spec: Sizes.
        checkpoint: Opened; may be closed afterwards.
        bank: Expert weights, in the same dtype.
        dtype: Compute type.
        exactness: `bitwise`: measures row tiles once for each shape, then keeps to them.
        reorder_experts: Keep reordered copies of used experts (faster, twice their memory).
        microbatch_tokens: See `expert_exchange`; the same on every rank.

    Raises:
        CheckpointError: A tensor is missing or wrong.
        ExactnessUnavailable: `bitwise` is impossible on this machine.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        bank: ExpertBank,
        *,
        dtype: torch.dtype,
        exactness: Exactness,
        reorder_experts: bool = True,
        microbatch_tokens: int | None = None,
    ) -> None:
        assert bank.dtype == dtype
        self.spec = spec
        self.dtype = dtype
        self._exactness = exactness
        self._microbatch_tokens = microbatch_tokens
        self._attention: PagedAttention | None = None
        load = _Loader(checkpoint, dtype, exactness)
        self.experts = ExpertMLP(bank, exactness=exactness, reorder=reorder_experts)
        self._embedding = load.tensor(
            "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size
        )
        self._rotary = Rotary(spec, dtype)
        self._layers = [
            _Layer(load, spec, layer, exactness, self.experts) for layer in range(spec.num_layers)
        ]
        self._final_norm = load.tensor("model.norm.weight", spec.hidden_size)
        if spec.tie_word_embeddings:
            self._head = Linear(self._embedding, exactness=exactness)
        else:
            self._head = load.linear(("lm_head", spec.vocab_size), in_features=spec.hidden_size)

    def forward(
        self, batch: ForwardBatch, kv: PagedKV, dispatcher: ExpertDispatcher
    ) -> torch.Tensor:
        """Compute one step: writes the tokens' keys and values, returns the wanted logits.

        The same step may be run again after a failure: it rewrites the same slots.

        Args:
            batch: T tokens, T = 0 included.
            kv: This rank's cache, of the model's dtype.
            dispatcher: Already in a pass; called for each layer with experts.

        Returns:
            [S, vocab] float32.

        Raises:
            ExpertNotResident: A row arrived for an expert that the bank does not have.
            DispatchError: Whatever the dispatcher raises.
        """
        with torch.inference_mode():
            attention = self._attention_over(kv.page_tokens)
            step = _Step(
                batch=batch,
                kv=kv,
                dispatcher=dispatcher,
                microbatch_tokens=self._microbatch_tokens,
                rotation=self._rotary.at(batch.positions),
                attention=attention,
                plan=attention.plan(batch),
            )
            x = self._embedding[batch.token_ids]
            for layer in self._layers:
                x = layer(x, step)
            wanted = x[batch.logit_rows]
            normed = rms_norm(wanted, self._final_norm, self.spec.rms_norm_eps)
            return self._head(normed).to(torch.float32)

    def warm_up(self, *, page_tokens: int, context_len_max: int) -> None:
        """Do ahead of traffic what would stall first steps: measurements and reordering of weights.

        Covers the experts that are resident now; call it again when that has changed.

        Args:
            page_tokens: Of the cache.
            context_len_max: Longest context that attention is measured for.

        Raises:
            AttentionNotInvariant: `bitwise` is impossible on this machine.
            ExactnessUnavailable: Likewise.
        """
        self._attention_over(page_tokens).warm_up(context_len_max)
        self.experts.warm_up()

    def _attention_over(self, page_tokens: int) -> PagedAttention:
        known = self._attention
        if known is None or known.shape.page_tokens != page_tokens:
            known = PagedAttention(
                self.spec, page_tokens=page_tokens, dtype=self.dtype, exactness=self._exactness
            )
            self._attention = known
        return known
