"""Jamba's and Falcon Mamba's states are the reference's, their published names load, and what config.json may say."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxis import LLM, SamplingParams
from jaxis.compilation.targets import parse_target
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.planning.plan import Planner, Wanted
from tests.support import parity
from tests.support.paged_sequences import PagedSequence
from tests.support.parity import FAMILIES, prompt
from tests.support.places import TESTS
from tests.support.plan_sources import published

FOLDER = TESTS / "data" / "configs"


def family(name):
    return next(family for family in FAMILIES if family.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), [("Jamba", 2), ("Falcon Mamba", 1)])
def test_states_in_slots_are_the_references_cache(name, layer):
    tokens = prompt(17)
    paged, sequence = parity.paged_sequences(family(name)), PagedSequence()
    for chunk in (tokens[:11], tokens[11:12], tokens[12:]):
        paged.step([(sequence, chunk)], **parity.PADDING)
    inputs, recurrent = (np.asarray(array[sequence.slot]) for array in paged.caches[layer])
    with torch.no_grad():
        output = parity.reference_model(family(name))(torch.tensor([tokens]), use_cache=True)
    cache = getattr(output, "cache_params", None) or output.past_key_values
    # The reference has channels first, and one input more.
    expected_inputs = cache.get_conv_state(layer, state_idx=0)[0].numpy().T[-len(inputs) :]
    np.testing.assert_allclose(inputs, expected_inputs, rtol=1e-4, atol=1e-5)
    expected = cache.get_recurrent_state(layer, state_idx=0)[0].numpy().T
    np.testing.assert_allclose(recurrent, expected, rtol=1e-4, atol=1e-5)


def test_experts_under_their_published_names_load(tmp_path):
    folder = parity.checkpoint_folder(family("Jamba"))
    tensors = {}
    for name, tensor in load_file(f"{folder}/model.safetensors").items():
        prefix, found, part = name.partition(".experts.")
        if not found:
            tensors[name] = tensor
            continue
        parts = {"gate_proj": None, "up_proj": None} if part == "gate_up_proj" else {"down_proj": None}
        if part not in ("gate_up_proj", "down_proj"):  # saved one by one already
            tensors[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            for key, piece in zip(parts, np.split(matrix, len(parts)), strict=True):
                tensors[f"{prefix}.experts.{expert}.{key}.weight"] = piece
    assert "model.layers.1.feed_forward.experts.7.up_proj.weight" in tensors
    assert {"model.layers.1.feed_forward.router.weight", "model.final_layernorm.weight"} <= set(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HFConfig.from_folder(folder).to_dict()))
    config = ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path), max_model_len=1024)
    logits = parity.run_model(load_model(VllmConfig(config), make_mesh()), (17,))[17][0]
    np.testing.assert_allclose(logits, parity.reference_run(family("Jamba"), 17)[0], rtol=1e-4, atol=1e-4)


def test_the_table_of_embeddings_may_have_its_first_name(tmp_path):
    folder = parity.checkpoint_folder(family("Falcon Mamba"))
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HFConfig.from_folder(folder).to_dict()))
    config = ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path), max_model_len=1024)
    load_model(VllmConfig(config), make_mesh())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("jamba-1.5-mini", {"attn_layer_offset": 8}, "attn_layer_period=8 and attn_layer_offset=8, expected an offset"),
        ("jamba-1.5-mini", {"expert_layer_period": 0}, "expert_layer_period=0 and expert_layer_offset=1, expected"),
        ("jamba-1.5-mini", {"layers_block_type": ["mamba"] * 32}, "layers_block_type=.*, of which only"),
        (
            "jamba-1.5-mini",
            {"mamba_dt_rank": "all"},
            "mamba_dt_rank='all', expected 'auto' or an integer of at least 1",
        ),
        ("falcon-mamba-7b", {"intermediate_size": 0.5}, "intermediate_size=0.5, expected an integer of at least"),
        ("falcon-mamba-7b", {"hidden_act": "gelu"}, "hidden_act='gelu', of which only 'silu' is supported"),
    ],
)
def test_what_cannot_be_is_refused(name, changes, message):
    values = json.loads((FOLDER / f"{name}.json").read_text()) | changes
    with pytest.raises(ConfigError, match=message):
        construct_abstractly(VllmConfig(ModelConfig("it", HFConfig(values), max_model_len=4096)))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["mamba-2.8b", "falcon-mamba-7b"])
def test_a_published_config_without_heads_and_lengths_is_served_and_planned(name, tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "time_step_rank": 4}
    published_values = json.loads((FOLDER / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published_values | sizes | {"vocab_size": 258}))
    arguments = {"load_format": "dummy", "kv_cache_memory": "2MiB", "max_num_seqs": 2}
    with LLM(tmp_path, **arguments) as llm:
        assert llm.max_model_len == 2048
        assert "max_model_len is 2048: config.json names no longest sequence" in capsys.readouterr().err
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3
    with LLM(tmp_path, **arguments, max_model_len=5000) as llm:
        assert llm.max_model_len == 5000
    planner = Planner(published(name), Wanted(context_len=100_000, quantization="none"))
    one, eight = (planner.plan(parse_target(target)).chosen for target in ("v6e-1", "v6e-8"))
    config = published(name).config
    # The last inputs of the convolution in the checkpoint's type, and a float32 state of 16, for each channel.
    element = 4 if config["torch_dtype"] == "float32" else 2
    state_bytes = config["num_hidden_layers"] * config["intermediate_size"] * (3 * element + 16 * 4)
    assert one.max_requests == one.device_cache_bytes // state_bytes
    assert eight.tensor_parallel_size == 8
    exchanges = {each.name: each.count for each in eight.steps[0].cost.exchanges}
    assert exchanges["attention"] == config["num_hidden_layers"], "one sum a layer"
    assert "feed-forward" not in exchanges
