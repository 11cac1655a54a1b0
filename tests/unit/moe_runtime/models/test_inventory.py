"""The inventory is what the model reads, and every fault is found from the headers alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import Exactness
from moe_runtime.errors import (
    CheckpointFileInvalid,
    CheckpointNotFound,
    TensorInvalid,
    TensorMissing,
)
from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.inventory import check_inventory, inventory
from moe_runtime.models.qwen3_moe import Qwen3MoeModel
from tests.support.checkpoints import make_tiny_checkpoint
from tests.support.generation import load_bank

Tensors = dict[str, torch.Tensor]


def check(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint:
        check_inventory(checkpoint)
        assert checkpoint.names_read == set()


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [1]},
    ],
    ids=str,
)
def test_it_lists_exactly_what_the_model_reads(tmp_path: Path, variant: dict[str, Any]) -> None:
    directory = make_tiny_checkpoint(tmp_path / "model", **variant)
    check(directory)
    with Checkpoint(directory) as checkpoint:
        bank = load_bank(
            checkpoint, torch.float32, lambda layer: range(checkpoint.spec.num_experts)
        )
        Qwen3MoeModel(
            checkpoint.spec,
            checkpoint,
            bank,
            dtype=torch.float32,
            exactness=Exactness.TOLERANT,
        )
        listed = [name for name, _ in inventory(checkpoint.spec)]
        assert len(listed) == len(set(listed))
        assert set(listed) == checkpoint.names_read


def edit(change: Callable[[Tensors, str], None]) -> Callable[[Path, str], None]:
    def apply(directory: Path, name: str) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors, name)
        save_file(tensors, directory / "model.safetensors")

    return apply


def drop(tensors: Tensors, name: str) -> None:
    del tensors[name]


def reshape(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.cat((tensors[name], tensors[name]))


def retype(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "kind"), [(drop, TensorMissing), (reshape, TensorInvalid), (retype, TensorInvalid)]
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, change: Callable[[Tensors, str], None], kind: type[Exception]
) -> None:
    directory = make_tiny_checkpoint(tmp_path / "model", num_hidden_layers=2)
    with Checkpoint(directory) as checkpoint:
        names = [name for name, _ in inventory(checkpoint.spec)]
    victim = random.SystemRandom().choice(names)
    edit(change)(directory, victim)
    with pytest.raises(kind, match=victim.replace(".", r"\.")) as caught:
        check(directory)
    assert "\n" not in str(caught.value)


def test_a_shard_that_is_truncated_or_missing_is_named(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path / "model", max_shard_size="100KB")
    shards = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    victim = directory / random.SystemRandom().choice(sorted(set(shards.values())))
    content = victim.read_bytes()
    victim.write_bytes(content[: len(content) - 1])
    with pytest.raises(CheckpointFileInvalid, match=victim.name):
        check(directory)
    victim.unlink()
    with pytest.raises(CheckpointNotFound, match=victim.name):
        check(directory)
