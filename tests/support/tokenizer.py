"""A tiny byte-level tokenizer with a chat template, written like a checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, TURN, END_OF_TURN = "<s>", "</s>", "<|turn|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}(no thoughts)\n{% endif %}"
    "{% endif %}"
)
CORPUS = (
    "In the beginning was the word, and the word was with the people.",
    "The quick brown fox jumps over the lazy dog; the dog does not mind.",
    "Grüße aus Köln: schöne Straßen, süße Brötchen.",
    "one two three four five six seven eight nine ten",
)


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 350 tokens: characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=[AddedToken(t, special=True) for t in (BOS, EOS, TURN, END_OF_TURN)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(directory: Path, *, vocab_size: int | None = None) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and, if there is none, a minimal config.json."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": BOS,
        "eos_token": {"content": EOS, "special": True},
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = directory / "config.json"
    if not config.exists():
        size = vocab_size or tokenizer.get_vocab_size()
        config.write_text(json.dumps({"vocab_size": size, "max_position_embeddings": 512}))
    return tokenizer
