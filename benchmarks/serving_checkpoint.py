"""A random Qwen3-MoE checkpoint of 111 M parameters in bf16, for comparing engines.

    python -m benchmarks.serving_checkpoint DIRECTORY

Random weights cost what trained ones cost. The tokenizer has one word per id, because engines are
given token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

VOCABULARY = 4096


def write_checkpoint(directory: Path) -> Path:
    """Write the checkpoint unless it is there; returns the directory."""
    if (directory / "tokenizer.json").exists():
        return directory
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        decoder_sparse_step=1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
