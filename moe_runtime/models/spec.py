"""The shape of a Qwen3-MoE model, read from a Hugging Face `config.json`.

Names differ between files in the wild: `num_experts` (hub) or `num_local_experts` (written by
transformers 5), `rope_theta` (flat) or `rope_parameters` (a table). Both are accepted, and what
this runtime does not compute (sliding windows, scaled rotary embeddings) is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.errors import CheckpointConfigInvalid, CheckpointNotFound, UnsupportedModel

ARCHITECTURE = "Qwen3MoeForCausalLM"
DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of one model; names are those of `config.json` where it has one.

    Attributes:
        moe_layers: Layers with experts, ascending; the others have one dense MLP.
        dtype: Type of the weights on disk, or None where the configuration does not say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    topk: int
    norm_topk_prob: bool
    attention_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    moe_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts. Expert maps, banks and dispatchers count only these, from 0."""
        return len(self.moe_layers)

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return float(self.head_dim**-0.5)

    def page_bytes(self, page_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one KV page: keys and values of all layers."""
        return 2 * self.num_layers * page_tokens * self.kv_size * dtype.itemsize

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one expert's weights: gate, up and down."""
        return 3 * self.moe_intermediate_size * self.hidden_size * dtype.itemsize

    @classmethod
    def from_directory(cls, directory: Path) -> ModelSpec:
        """Read `config.json` of a checkpoint directory.

        Raises:
            CheckpointNotFound: The directory or its `config.json` does not exist.
            CheckpointConfigInvalid: Not JSON, or a field is missing or of the wrong type.
            UnsupportedModel: Another architecture, or a variant that is not computed here.
        """
        path = Path(directory) / "config.json"
        if not Path(directory).is_dir():
            raise CheckpointNotFound(path=str(directory), what="directory")
        if not path.is_file():
            raise CheckpointNotFound(path=str(path), what="file")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            raise CheckpointConfigInvalid(path=str(path), field="", problem=str(error)) from error
        if not isinstance(values, dict):
            raise CheckpointConfigInvalid(path=str(path), field="", problem="not a JSON object")
        return _spec_from(values, str(path))


class _Fields:
    """Typed look-ups in one `config.json`; every failure names the file and the field."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def invalid(self, field: str, problem: str) -> CheckpointConfigInvalid:
        return CheckpointConfigInvalid(path=self.path, field=field, problem=problem)

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise self.invalid(name, f"expected an integer >= {minimum}, found {value!r}")
            return value
        if default is None:
            raise self.invalid(" or ".join(names), "missing")
        return default

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.invalid(name, f"expected a number > 0, found {value!r}")
        return float(value)

    def switch(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.invalid(name, f"expected true or false, found {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.invalid(name, f"expected integers, found {value!r}")
        return tuple(items)


def _spec_from(values: Mapping[str, Any], path: str) -> ModelSpec:
    fields = _Fields(values, path)
    _check_supported(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    spec = ModelSpec(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=fields.integer("head_dim", default=hidden_size // num_heads),
        num_experts=fields.integer("num_experts", "num_local_experts"),
        topk=fields.integer("num_experts_per_tok"),
        norm_topk_prob=fields.switch("norm_topk_prob", default=False),
        attention_bias=fields.switch("attention_bias", default=False),
        tie_word_embeddings=fields.switch("tie_word_embeddings", default=False),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        moe_layers=_moe_layers(fields, num_layers),
        eos_token_ids=fields.integers("eos_token_id"),
        dtype=DTYPES.get(str(values.get("dtype") or values.get("torch_dtype"))),
    )
    _check_sizes(spec, fields)
    return spec


def _check_supported(fields: _Fields) -> None:
    architectures = fields.values.get("architectures") or [fields.values.get("model_type", "")]
    if ARCHITECTURE not in architectures and architectures != ["qwen3_moe"]:
        raise UnsupportedModel(
            path=fields.path,
            found=", ".join(map(str, architectures)) or "no architecture",
            expected=ARCHITECTURE,
        )
    if fields.values.get("use_sliding_window"):
        raise UnsupportedModel(
            path=fields.path, found="use_sliding_window=true", expected="full attention"
        )
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(path=fields.path, found=f"hidden_act={activation}", expected="silu")
    if fields.values.get("quantization_config"):
        raise UnsupportedModel(
            path=fields.path, found="quantization_config", expected="bfloat16 or float32 weights"
        )


def _rope_theta(fields: _Fields) -> float:
    """Base of the rotary frequencies, from the flat or the nested form."""
    nested: Any = None
    for name in ("rope_parameters", "rope_scaling"):
        nested = nested or fields.values.get(name)
    nested = nested or {}
    if not isinstance(nested, dict):
        raise fields.invalid("rope_parameters", f"expected a table, found {nested!r}")
    kind = nested.get("rope_type") or nested.get("type") or "default"
    if kind != "default":
        raise UnsupportedModel(
            path=fields.path, found=f"rotary embedding {kind!r}", expected="default"
        )
    flat = fields.number("rope_theta", 10000.0)
    return _Fields(nested, fields.path).number("rope_theta", flat)


def _moe_layers(fields: _Fields, num_layers: int) -> tuple[int, ...]:
    step = fields.integer("decoder_sparse_step", default=1)
    dense = set(fields.integers("mlp_only_layers"))
    return tuple(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )


def _check_sizes(spec: ModelSpec, fields: _Fields) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise fields.invalid(
            "num_key_value_heads",
            f"{spec.num_kv_heads} does not divide num_attention_heads={spec.num_heads}",
        )
    if spec.head_dim % 2:
        raise fields.invalid("head_dim", f"{spec.head_dim} is odd")
    if spec.topk > spec.num_experts:
        raise fields.invalid(
            "num_experts_per_tok", f"{spec.topk} is more than num_experts={spec.num_experts}"
        )
