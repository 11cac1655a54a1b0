"""Reading checkpoints: only what is needed, and every fault as one typed line."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import Exactness
from moe_runtime.errors import (
    CheckpointConfigInvalid,
    CheckpointError,
    CheckpointFileInvalid,
    CheckpointNotFound,
    TensorInvalid,
    TensorMissing,
    UnsupportedModel,
)
from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.experts import ExpertBank
from moe_runtime.models.qwen3_moe import Qwen3MoeModel
from moe_runtime.models.spec import ModelSpec
from tests.support.checkpoints import make_tiny_checkpoint
from tests.support.generation import allocate, load_bank


@pytest.fixture
def directory(tmp_path):
    return make_tiny_checkpoint(tmp_path / "model", num_hidden_layers=2)


def edit_config(directory, remove=(), **values):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name in remove:
        config.pop(name, None)
    path.write_text(json.dumps(config | values))


def edit_tensors(directory, edit):
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def load_model(directory, dtype=torch.float32):
    with Checkpoint(directory) as checkpoint:
        bank = load_bank(checkpoint, dtype, lambda layer: range(checkpoint.spec.num_experts))
        return Qwen3MoeModel(
            checkpoint.spec, checkpoint, bank, dtype=dtype, exactness=Exactness.TOLERANT
        )


def fault(directory):
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is type(caught.value)
    assert str(copy) == str(caught.value)
    return caught.value


def test_a_rank_reads_only_its_own_experts(tmp_path):
    directory = make_tiny_checkpoint(tmp_path / "model", max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 3, "the checkpoint must be sharded"
    mine = {0: (1, 6), 1: (), 2: (0,)}
    with Checkpoint(directory) as checkpoint:
        spec = checkpoint.spec
        bank = load_bank(checkpoint, torch.float32, mine.__getitem__)
        expected = {
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            for layer, experts in mine.items()
            for expert in experts
            for part in ("gate", "up", "down")
        }
        assert checkpoint.names_read == expected
        Qwen3MoeModel(spec, checkpoint, bank, dtype=torch.float32, exactness=Exactness.TOLERANT)
        experts_read = {name for name in checkpoint.names_read if ".experts." in name}
        assert experts_read == expected


def test_sharded_and_single_files_hold_the_same(tmp_path):
    single = make_tiny_checkpoint(tmp_path / "single", seed=5)
    sharded = make_tiny_checkpoint(tmp_path / "sharded", seed=5, max_shard_size="60KB")
    name, shape = "model.layers.1.self_attn.q_proj.weight", (128, 64)
    with Checkpoint(single) as first, Checkpoint(sharded) as second:
        expected = first.tensor(name, shape, torch.bfloat16)
        assert torch.equal(second.tensor(name, shape, torch.bfloat16), expected)


def test_returned_tensors_outlive_the_files(directory):
    with Checkpoint(directory) as checkpoint:
        found = checkpoint.tensor("model.norm.weight", (64,), torch.float32)
    before = found.clone()
    path = directory / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(found, before)


def test_an_expert_blob_is_gate_then_up_then_down(directory):
    stored = load_file(directory / "model.safetensors")
    with Checkpoint(directory) as checkpoint:
        bank = load_bank(checkpoint, torch.bfloat16, lambda layer: [3])
    prefix = "model.layers.1.mlp.experts.3"
    parts = [stored[f"{prefix}.{part}_proj.weight"].bfloat16() for part in ("gate", "up", "down")]
    flat = torch.cat([part.flatten() for part in parts]).view(torch.uint8)
    assert torch.equal(bank.blob(1, 3), flat)
    gate_up, down = bank.weights(1, 3)
    assert torch.equal(gate_up, torch.cat(parts[:2]))
    assert torch.equal(down, parts[2])


def test_hub_names_and_new_names_give_the_same_spec(directory):
    written = ModelSpec.from_directory(directory)
    edit_config(
        directory,
        remove=("num_local_experts", "rope_parameters", "dtype"),
        num_experts=8,
        rope_theta=10000.0,
        torch_dtype="float32",
    )
    assert ModelSpec.from_directory(directory) == written
    edit_config(directory, rope_theta=5e5)
    assert ModelSpec.from_directory(directory).rope_theta == 5e5


def test_layers_without_experts(directory):
    edit_config(directory, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert ModelSpec.from_directory(directory).moe_layers == (1, 5)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(directory, values, named):
    edit_config(directory, **values)
    error = fault(directory)
    assert isinstance(error, UnsupportedModel)
    assert named in str(error)


@pytest.mark.parametrize(
    ("remove", "values", "named"),
    [
        (("hidden_size",), {}, "hidden_size"),
        (("num_local_experts",), {}, "num_experts or num_local_experts"),
        ((), {"num_hidden_layers": "two"}, "num_hidden_layers"),
        ((), {"num_key_value_heads": 3}, "num_key_value_heads"),
        ((), {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ((), {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ],
)
def test_bad_configurations_name_the_field(directory, remove, values, named):
    edit_config(directory, remove, **values)
    error = fault(directory)
    assert isinstance(error, CheckpointConfigInvalid)
    assert named in str(error)


def test_missing_directory_and_files(directory, tmp_path):
    with pytest.raises(CheckpointNotFound, match=r"directory not found: .*nowhere"):
        Checkpoint(tmp_path / "nowhere")
    (directory / "model.safetensors").unlink()
    assert isinstance(fault(directory), CheckpointNotFound)
    (directory / "config.json").write_text("{ not json")
    assert isinstance(fault(directory), CheckpointConfigInvalid)
    (directory / "config.json").unlink()
    assert isinstance(fault(directory), CheckpointNotFound)


def test_missing_shard_and_bad_index(tmp_path):
    directory = make_tiny_checkpoint(tmp_path / "model", max_shard_size="60KB")
    sorted(directory.glob("model-*.safetensors"))[1].unlink()
    assert isinstance(fault(directory), CheckpointNotFound)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    assert isinstance(fault(directory), CheckpointConfigInvalid)


@pytest.mark.parametrize("keep", [0, 5, 900, -1])
def test_truncated_file(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    error = fault(directory)
    assert isinstance(error, CheckpointFileInvalid)
    assert error.path == str(path)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.7.up_proj.weight", "lm_head.weight", "model.norm.weight"]
)
def test_missing_tensor(directory, name):
    edit_tensors(directory, lambda tensors: tensors.pop(name))
    error = fault(directory)
    assert isinstance(error, TensorMissing)
    assert error.name == name


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.experts.2.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"],
)
def test_wrong_shape_and_type(directory, name):
    def transpose(tensors):
        tensors[name] = tensors[name][:, :-1].contiguous()

    edit_tensors(directory, transpose)
    error = fault(directory)
    assert isinstance(error, TensorInvalid)
    assert "shape" in str(error)
    assert error.name == name

    def quantise(tensors):
        shape = (64, 48) if "down" in name else (64, 64)
        tensors[name] = torch.zeros(shape, dtype=torch.int8)

    edit_tensors(directory, quantise)
    error = fault(directory)
    assert isinstance(error, TensorInvalid)
    assert "int8" in str(error)


def test_dtype_of_the_weights(directory):
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.dtype == torch.float32
    edit_config(directory, dtype="bfloat16")
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.dtype == torch.bfloat16
    assert ExpertBank(checkpoint.spec, torch.bfloat16, allocate).blob_bytes == 3 * 48 * 64 * 2
