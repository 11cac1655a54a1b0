from __future__ import annotations

import random
import secrets

import pytest
from tokenizers import Tokenizer, decoders, models

from moe_runtime.front.detokenizer import PENDING_TOKENS_MAX, Detokenizer
from tests.support.tokenizer import EOS, build_tokenizer

TEXTS = (
    "plain text, nothing else",
    "Grüße 日本語 und 👩‍👩‍👧‍👦 — fini",
    "🙂" * 20,
    "mixed é\n\n  spaces\tand tabs ﷽ 𝄞",
)


class Decoding:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def decode(self, token_ids):
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def run(decoder, ids, prompt_ids=()):
    detokenizer = Detokenizer(decoder, prompt_ids=prompt_ids)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return pieces, "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_text_and_none_breaks_a_character(tokenizer, text):
    ids = tokenizer.encode(text).ids
    pieces, whole = run(Decoding(tokenizer), ids)
    assert whole == text
    assert len(ids) > len([p for p in pieces if p]) or text.isascii()
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("seed", [secrets.randbits(32)])
def test_random_unicode_with_random_prompts(tokenizer, seed):
    rng = random.Random(seed)
    alphabet = [chr(c) for c in (*range(32, 127), *range(0xA1, 0x250), *range(0x4E00, 0x4E40))]
    alphabet += ["🙂", "𝄞", "\u200d", "\n"]
    for _ in range(60):
        prompt = "".join(rng.choices(alphabet, k=rng.randint(0, 12)))
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
        prompt_ids, ids = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
        assert run(Decoding(tokenizer), ids, prompt_ids)[1] == text


def test_special_tokens_have_no_text(tokenizer):
    ids = tokenizer.encode("one").ids
    eos = tokenizer.token_to_id(EOS)
    assert run(Decoding(tokenizer), [*ids, eos, *ids, eos, eos])[1] == "oneone"


def test_a_prompt_that_ends_within_a_character(tokenizer):
    ids = tokenizer.encode("🙂 one").ids
    _, whole = run(Decoding(tokenizer), ids[2:], prompt_ids=ids[:2])
    assert whole.endswith(" one")


def test_an_incomplete_end_is_given_out_at_the_end(tokenizer):
    ids = tokenizer.encode("ok 🙂").ids
    pieces, whole = run(Decoding(tokenizer), ids[:-1])
    assert "".join(pieces) == "ok "
    assert whole == "ok \ufffd"


def test_endless_broken_bytes_are_not_held_back_for_ever(tokenizer):
    broken = tokenizer.encode("🙂").ids[1]
    pieces, whole = run(Decoding(tokenizer), [broken] * (3 * PENDING_TOKENS_MAX))
    assert len([piece for piece in pieces if piece]) == 3
    assert whole == "\ufffd" * 3 * PENDING_TOKENS_MAX


@pytest.fixture(scope="module")
def spaces_in_front():
    """A decoder in the manner of sentencepiece: the first token's leading space is dropped."""
    names = ["▁one", "▁two", "three", *(f"<0x{byte:02X}>" for byte in "é日".encode())]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "three"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Decoding(tokenizer)


def test_a_leading_space_depends_on_the_prompt(spaces_in_front):
    assert run(spaces_in_front, [0, 1, 2])[1] == "one twothree"
    assert run(spaces_in_front, [1, 2], prompt_ids=[0])[1] == " twothree"


def test_byte_tokens_wait_for_their_character(spaces_in_front):
    pieces, whole = run(spaces_in_front, [0, 3, 4, 5, 6, 7, 1])
    assert whole == "oneé日 two"
    assert "\ufffd" not in "".join(pieces)
