"""Experts of a checkpoint find their places, in whatever files they are; what is missing is named."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError
from jaxis.layers.module import named_parameters
from jaxis.layers.partial_weight import PartialWeight, finish_experts, take_expert
from jaxis.loading.headers import HeaderTensor
from jaxis.models.common.prediction_layers import without_layers
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from tests.support.tiny_checkpoints import write_checkpoint

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return write_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3_moe", tokenizer=False, **sizes)


def load(folder):
    config = ModelConfig(str(folder), HFConfig.from_folder(folder))
    return dict(named_parameters(load_model(VllmConfig(config), make_mesh())))


def variant(source, folder, tensors):
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_layers_experts_may_be_cut_over_files(folder, tmp_path):
    """Two shards that each hold some experts of each layer, so a layer's load_weights is called more than once."""
    tensors = load_file(folder / "model.safetensors")
    shards = [{}, {}]
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        shards[i % 3 == 0][name] = tensor
    names = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / name)
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    expected, found = load(folder), load(tmp_path)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name][...], expected[name][...]) for name in expected)


def test_a_missing_expert_is_named(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{EXPERTS}.4.up_proj.weight"]
    with pytest.raises(
        CheckpointError, match=rf"1 of the model's parameters are not .*: {EXPERTS}.up_proj of expert 4"
    ):
        load(variant(folder, tmp_path, tensors))


def test_an_expert_too_many_is_named(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.6.up_proj.weight"] = tensors[f"{EXPERTS}.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match=f"{EXPERTS}: tensor '6.up_proj.weight' .* is for expert 6"):
        load(variant(folder, tmp_path, tensors))


def abstract_stack(dtype=jnp.float32):
    return nnx.Param(jax.ShapeDtypeStruct((3, 2, 4), dtype), logical_axes=("expert", "mlp", "embed"))


def load_expert(param, expert, tensor):
    assert take_expert(param, expert, tensor) is None  # it is not packed
    finish_experts(param)


def test_a_stack_is_filled_in_place():
    stack, tensor = abstract_stack(), np.ones((2, 4), np.float32)
    load_expert(stack, 1, tensor)
    address = stack.get_value().stack.stack().unsafe_buffer_pointer()
    load_expert(stack, 0, 2 * tensor)
    assert isinstance(stack.get_value(), PartialWeight)
    assert stack.get_value().missing == [2]
    load_expert(stack, 2, 3 * tensor)
    assert stack.get_value().unsafe_buffer_pointer() == address
    assert stack[...][:, 0, 0].tolist() == [2, 1, 3]
    with pytest.raises(CheckpointError, match="is a duplicate for expert 2"):
        load_expert(stack, 2, tensor)


def test_a_stack_has_the_models_type():
    stack = abstract_stack(jnp.bfloat16)
    for expert in range(3):
        load_expert(stack, expert, np.full((2, 4), 1.001, np.float32))
    assert stack[...].dtype == jnp.bfloat16


def test_headers_alone_fill_a_stack():
    stack = abstract_stack()
    for expert in range(3):
        load_expert(stack, expert, HeaderTensor.of((2, 4), np.float32))
    assert stack.get_value().shape == (3, 2, 4)


def test_prediction_layers_are_left_out():
    """Lists of a model of 46 layers and one prediction layer; a layer more is the loader's to refuse."""
    names = ["model.layers.4.x", "model.layers.45.x", "model.layers.46.x", "model.layers.47.x", "model.layers.460.x"]
    kept = without_layers(((name, np.zeros(1)) for name in names), [46])
    assert [name for name, _ in kept] == [names[0], names[1], names[3], names[4]]
