"""Small random Qwen3-MoE checkpoints, written by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()
tqdm.monitor_interval = 0  # its monitor is a thread that outlives the test

TINY: dict[str, object] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_tiny_checkpoint(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: object,
) -> Path:
    """Write a checkpoint whose logits are well apart, so that equal tokens mean something.

    The class's own initialisation (0.02) gives nearly uniform logits and a router that hardly
    chooses; here every matrix keeps the scale of its input, and norms and biases are uneven.

    Returns:
        The directory.
    """
    config = Qwen3MoeConfig(**{**TINY, **overrides})
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return Path(directory)


def reference_model(directory: Path, dtype: torch.dtype = torch.float32) -> Qwen3MoeForCausalLM:
    """The checkpoint in transformers, with eager experts and attention."""
    model = Qwen3MoeForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()
