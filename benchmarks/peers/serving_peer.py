"""One peer engine behind standard input and output, so that rounds can be interleaved.

    python serving_peer.py vllm|transformers MODEL_DIR

Each input line is JSON: the prompts (token ids) of one round and the tokens to generate. Each
output line that starts with "round " is the seconds that the round took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Run = Callable[[list[list[int]], int], None]


def vllm_runner(model: str) -> Run:
    """vLLM, offline interface."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        enforce_eager=True,
        max_num_seqs=16,
    )

    def run(prompts: list[list[int]], length: int) -> None:
        sampling = SamplingParams(
            max_tokens=length, min_tokens=length, temperature=0, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(requests, sampling, use_tqdm=False)

    return run


def transformers_runner(model: str) -> Run:
    """transformers, `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def run(prompts: list[list[int]], length: int) -> None:
        ids = torch.tensor(prompts)
        lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )

    return run


def main() -> None:
    """Load the engine, then run one round per line."""
    engine, model = sys.argv[1:3]
    run = {"vllm": vllm_runner, "transformers": transformers_runner}[engine](model)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        run(request["prompts"], request["length"])
        print(f"round {time.perf_counter() - start:.6f}", flush=True)


if __name__ == "__main__":
    main()
