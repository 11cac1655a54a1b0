"""The forward step against transformers, on the same checkpoint."""

from __future__ import annotations

import pytest
import torch

from configs.schema import Exactness
from moe_runtime.models.batch import SequenceInput, build_batch
from tests.support.checkpoints import make_tiny_checkpoint, reference_model
from tests.support.generation import PAGE_TOKENS, single_rank

LOGITS_TOLERANCE = 1e-4
VARIANTS = {
    "plain": {},
    "not renormalised": {"norm_topk_prob": False},
    "dense layers": {"mlp_only_layers": [1]},
    "every other layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "biases": {"attention_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "odd sizes": {
        "hidden_size": 40,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "vocab_size": 131,
    },
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


def random_tokens(seed, count, vocab):
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def seed(request):
    value = torch.seed() % 100_000
    print(f"seed {value}")
    return value


def reference_logits(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("exactness", list(Exactness))
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path, seed, variant, exactness):
    directory = make_tiny_checkpoint(tmp_path / "model", seed=seed, **VARIANTS[variant])
    rank = single_rank(directory, dtype=torch.float32, exactness=exactness)
    tokens = random_tokens(seed, 53, rank.spec.vocab_size)
    expected = reference_logits(reference_model(directory), tokens)
    assert expected.std() > 0.3, "degenerate logits prove nothing"
    found = rank.logits(tokens, [20, 1, 32])
    assert (found - expected).abs().max() <= LOGITS_TOLERANCE


def test_greedy_tokens_equal_transformers(tmp_path, seed):
    directory = make_tiny_checkpoint(tmp_path / "model", seed=seed)
    rank = single_rank(directory, dtype=torch.float32)
    prompt = random_tokens(seed, 19, rank.spec.vocab_size)
    reference = reference_model(directory)
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
    found = rank.greedy(prompt, 40)
    assert len(set(found)) > 5, "a constant answer proves nothing"
    assert found == expected


def test_bfloat16_is_close_to_the_float32_model(tmp_path, seed):
    directory = make_tiny_checkpoint(tmp_path / "model", seed=seed, dtype=torch.bfloat16)
    rank = single_rank(directory, dtype=torch.bfloat16)
    tokens = random_tokens(seed, 60, rank.spec.vocab_size)
    exact = reference_logits(reference_model(directory, torch.float32), tokens)
    theirs = reference_logits(reference_model(directory, torch.bfloat16), tokens)
    ours = rank.logits(tokens, [60])
    # A token whose router scores nearly tie may go to another expert in either, so medians.
    our_error = (ours - exact).abs().amax(-1).median()
    their_error = (theirs - exact).abs().amax(-1).median()
    assert our_error <= 1.5 * their_error + 0.02


def test_a_step_without_tokens_takes_part_in_the_exchange(tmp_path):
    directory = make_tiny_checkpoint(tmp_path / "model")
    rank = single_rank(directory, dtype=torch.float32)
    calls = []
    dispatch = rank.dispatcher.dispatch
    rank.dispatcher.dispatch = lambda *args, **layer: (
        calls.append(layer) or dispatch(*args, **layer)
    )
    logits = rank.model.forward(build_batch([], page_tokens=PAGE_TOKENS), rank.kv, rank.dispatcher)
    assert logits.shape == (0, rank.spec.vocab_size)
    assert calls == [{"layer": layer} for layer in range(rank.spec.num_moe_layers)]


def test_running_a_step_again_changes_nothing(tmp_path, seed):
    directory = make_tiny_checkpoint(tmp_path / "model", seed=seed)
    rank = single_rank(directory, dtype=torch.bfloat16)
    tokens = random_tokens(seed, 21, rank.spec.vocab_size)
    pages = rank.pages_for(len(tokens))
    inputs = [SequenceInput(token_ids=tokens, first_position=0, block_table=pages, logits=21)]
    first = rank.step(inputs)
    cache = rank.kv.pages.clone()
    assert torch.equal(first, rank.step(inputs))
    assert torch.equal(cache, rank.kv.pages)


def test_warming_up_changes_nothing(tmp_path, seed):
    directory = make_tiny_checkpoint(tmp_path / "model", seed=seed)
    cold, warm = (single_rank(directory, dtype=torch.bfloat16) for _ in range(2))
    warm.model.warm_up(page_tokens=PAGE_TOKENS, context_len_max=200)
    tokens = random_tokens(seed, 30, cold.spec.vocab_size)
    assert torch.equal(warm.logits(tokens, [30]), cold.logits(tokens, [30]))
