"""Train the example model `tiny-moe` (Qwen3-MoE, 16 experts, top-4) on a CPU, in half an hour.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr*.deb /tmp/austen
    python examples/train_tiny_moe.py --text /tmp/austen --output examples/tiny-moe

Writes a Hugging Face checkpoint: weights (bf16), tokenizer with chat template, configuration,
and `training.json` with the held-out loss that the model card quotes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from austen import Corpus, conversations, read_corpus
from grouped_experts import use_grouped_experts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

logger = logging.getLogger("train_tiny_moe")

VOCAB = 4096
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS_PER_STEP = 2048
BALANCE = 0.02
WARMUP_STEPS = 50
SHORT, LONG = 256, 2048
LONG_SHARE = 0.1  # the last steps see whole windows of the model's full context
HELD_OUT_WINDOW = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Token streams, and the bytes of text that the held-out stream stands for."""

    train: torch.Tensor
    held_out: torch.Tensor
    held_out_bytes: int


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE: every text can be encoded, there is no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("\n".join(chapter) for chapter in corpus.train), trainer)
    return tokenizer


def chat_text(turns: list[str]) -> str:
    """A conversation as the chat template writes it, speakers taking turns."""
    roles = ("user", "assistant")
    return "".join(
        f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns)
    )


def encode(corpus: Corpus, tokenizer: Tokenizer, generator: torch.Generator) -> Data:
    """Chapters and conversations in random order, each closed by `<|endoftext|>`."""
    documents = ["\n".join(chapter) for chapter in corpus.train]
    documents += [chat_text(turns) for c in corpus.train for turns in conversations(c)]
    order = torch.randperm(len(documents), generator=generator).tolist()
    held_out = ["\n".join(chapter) for chapter in corpus.held_out]

    def stream(texts: list[str]) -> torch.Tensor:
        return torch.tensor([i for t in texts for i in tokenizer.encode(t + SPECIALS[0]).ids])

    return Data(
        train=stream([documents[i] for i in order]),
        held_out=stream(held_out),
        held_out_bytes=sum(len(text.encode()) for text in held_out),
    )


def build_model() -> Qwen3MoeForCausalLM:
    """About 3.6 M parameters, of which a token uses 1.8 M."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=LONG,
        tie_word_embeddings=True,
        output_router_logits=True,
        router_aux_loss_coef=0.0,  # ours is per layer, see `balance`
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
        dtype="float32",
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config)
    use_grouped_experts(model)
    return model


def batches(data: torch.Tensor, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Random windows, `TOKENS_PER_STEP` tokens a step; the last steps use long ones."""
    for step in range(steps):
        length = LONG if step >= steps * (1 - LONG_SHARE) else SHORT
        count = TOKENS_PER_STEP // length
        starts = torch.randint(len(data) - length, (count,), generator=generator).tolist()
        yield torch.stack([data[start : start + length] for start in starts])


def rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to 3 %."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done))


def balance(router_logits: tuple[torch.Tensor, ...], topk: int) -> torch.Tensor:
    """Mean over layers of E * sum(share of choices * mean probability); 1 is even.

    transformers sums over the layers first, and so never misses an expert that is dead in one
    layer and busy in another.
    """
    terms = []
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(topk).indices.flatten()
        shares = torch.bincount(chosen, minlength=logits.shape[-1]) / len(chosen)
        terms.append(logits.shape[-1] * (shares * probabilities.mean(0)).sum())
    return torch.stack(terms).mean()


def train(model: Qwen3MoeForCausalLM, data: Data, *, steps: int, rate: float, seed: int) -> None:
    """AdamW with weight decay on matrices only; the balance term keeps all experts in use."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(seed)
    started = time.monotonic()
    model.train()
    for step, tokens in enumerate(batches(data.train, steps, generator)):
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_factor(step, steps)
        # In fp32: bf16 products compile a kernel for every new number of rows per expert.
        output = model(input_ids=tokens, labels=tokens, output_router_logits=True)
        even = balance(output.router_logits, model.config.num_experts_per_tok)
        (output.loss + BALANCE * even).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == steps - 1:
            speed = (step + 1) * TOKENS_PER_STEP / (time.monotonic() - started)
            logger.info(
                "step %d/%d loss %.3f balance %.2f, %.0f tokens/s",
                *(step, steps, output.loss.item(), even.item(), speed),
            )


@torch.inference_mode()
def held_out_loss(model: Qwen3MoeForCausalLM, data: Data) -> dict[str, float]:
    """Mean loss in windows of 512 tokens, each token predicted once from its window."""
    model.eval()
    total = 0.0
    count = 0
    for start in range(0, len(data.held_out) - 1, HELD_OUT_WINDOW):
        window = data.held_out[start : start + HELD_OUT_WINDOW + 1].unsqueeze(0)
        logits = model(input_ids=window[:, :-1]).logits.float().flatten(0, 1)
        targets = window[0, 1:]
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        count += len(targets)
    return {
        "nats_per_token": round(total / count, 4),
        "bits_per_byte": round(total / math.log(2) / data.held_out_bytes, 4),
        "nats_per_byte": round(total / data.held_out_bytes, 4),
        "tokens": count,
        "bytes": data.held_out_bytes,
    }


@torch.inference_mode()
def expert_shares(model: Qwen3MoeForCausalLM, data: Data) -> tuple[float, float]:
    """Smallest and largest share of held-out choices that any expert of any layer got."""
    model.eval()
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for window in data.held_out.split(LONG):
        output = model(input_ids=window.unsqueeze(0), output_router_logits=True)
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(model.config.num_experts_per_tok).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=logits.shape[-1])
    shares = counts / counts.sum(1, keepdim=True)
    return round(shares.min().item(), 4), round(shares.max().item(), 4)


def save(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Write the checkpoint in bf16, one tensor per expert as on the hub."""
    model.config.use_cache = True
    model.config.eos_token_id = [0, 2]
    model.config.output_router_logits = False
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.8, top_p=0.95, eos_token_id=[0, 2], pad_token_id=0
    )
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save(str(output / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LONG,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIALS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(tokenizer_config, indent=2) + "\n"
    (output / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (output / "model.safetensors").chmod(0o644)


def main() -> None:
    """Read, train, measure on the rounded weights, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path("/"), help="where the package lies")
    parser.add_argument("--output", type=Path, default=Path("tiny-moe"))
    parser.add_argument("--steps", type=int, default=1700)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--start-from", type=Path, help="a checkpoint to train further")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)

    corpus = read_corpus(arguments.text)
    earlier = arguments.start_from
    tokenizer = (
        Tokenizer.from_file(str(earlier / "tokenizer.json")) if earlier else train_tokenizer(corpus)
    )
    data = encode(corpus, tokenizer, torch.Generator().manual_seed(arguments.seed))
    model = build_model()
    if earlier:
        trained = Qwen3MoeForCausalLM.from_pretrained(earlier, dtype="float32")
        model.load_state_dict(trained.state_dict())
    parameters = sum(p.numel() for p in model.parameters())
    logger.info("%d training tokens, %d parameters", len(data.train), parameters)

    started = time.monotonic()
    train(
        model,
        data,
        steps=arguments.steps,
        rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    minutes = round((time.monotonic() - started) / 60, 1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, arguments.output)
    record = {
        "command": "python " + " ".join(sys.argv),
        "before": json.loads((earlier / "training.json").read_text()) if earlier else None,
        "minutes": minutes,
        "steps": arguments.steps,
        "tokens_per_step": TOKENS_PER_STEP,
        "training_tokens": len(data.train),
        "parameters": parameters,
        "held_out": held_out_loss(model, data),
        "expert_share_min_max": expert_shares(model, data),
        "torch": torch.__version__,
    }
    text = json.dumps(record, indent=2) + "\n"
    (arguments.output / "training.json").write_text(text, encoding="utf-8")
    logger.info("%s", text)


if __name__ == "__main__":
    main()
