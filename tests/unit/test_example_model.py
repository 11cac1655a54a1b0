"""The example model is what its card says: small, complete, trained, readable by transformers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples/tiny-moe"
# Written for this test in the manner of the novels; in none of them.
SENTENCE = (
    "Mrs. Bennet was very much surprised to hear that her daughter had been so long at the "
    "parsonage, and could not help saying that she was quite sure of his being a gentleman."
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="float32").eval()


def loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(input_ids=ids, labels=ids).loss)


def test_it_is_small_and_has_enough_experts() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 10 * 2**20
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config.get("num_experts", config.get("num_local_experts")) >= 16
    assert config["num_experts_per_tok"] == 4
    assert config["max_position_embeddings"] >= 2048


def test_weights_are_bf16_with_one_tensor_per_expert() -> None:
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "model.layers.3.mlp.experts.15.down_proj.weight" in names


def test_text_round_trips_and_chat_is_templated(tokenizer: PreTrainedTokenizerBase) -> None:
    text = 'Any text: "naïve" 中文 🙂\n\ttabs -- and  spaces'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Good day."}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nGood day.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer("<|im_end|>")["input_ids"] == [2]


def test_it_was_trained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    words = SENTENCE.split()
    random.Random(0).shuffle(words)
    sensible, shuffled = (loss(model, tokenizer, t) for t in (SENTENCE, " ".join(words)))
    assert sensible < shuffled - 1.0
    assert sensible < math.log(model.config.vocab_size) - 3.0


def test_the_card_quotes_the_record() -> None:
    record = json.loads((CHECKPOINT / "training.json").read_text(encoding="utf-8"))
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    for key in ("nats_per_token", "bits_per_byte"):
        assert f"{record['held_out'][key]:.2f}" in card
    smallest, largest = record["expert_share_min_max"]
    assert 0 < smallest <= largest < 0.25  # every expert of every layer is used, none for all
