"""Gemma 3n's published sizes, its checkpoints' names, and what its config.json may say."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxis import LLM
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.module import named_parameters
from jaxis.models.model_loader import construct_abstractly
from tests.support.parity import FAMILIES, checkpoint_folder, prompt, reference_model
from tests.support.places import TESTS

FOLDER = TESTS / "data" / "configs"
FAMILY = next(family for family in FAMILIES if family.name == "Gemma 3n")


def published(size):
    return json.loads((FOLDER / f"gemma-3n-{size}.json").read_text())


def construct(values):
    return construct_abstractly(VllmConfig(ModelConfig("it", HFConfig(values), max_model_len=4096)))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["e2b", "e4b"])
def test_a_published_size_has_the_references_parameters(size):
    values = published(size)
    config = transformers.Gemma3nTextConfig(**values["text_config"])
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
    model = construct(values)
    known_as = model.checkpoint_names.name_in_checkpoint
    ours = {known_as(name): tuple(parameter.shape) for name, parameter in named_parameters(model)}
    expected = {
        name.replace("model.", "model.language_model.", 1): tuple(tensor.shape)
        for name, tensor in reference.named_parameters()
    }
    assert ours == expected
    # llama.cpp counts 4.46 and 6.87, with keys and values of layers that share others'.
    assert sum(map(math.prod, ours.values())) / 1e9 == pytest.approx({"e2b": 4.435, "e4b": 6.835}[size], abs=0.001)


def test_layers_share_the_cache_of_the_last_of_their_kind_that_has_one():
    layers = construct(published("e2b")).decoder.layers
    owners = [getattr(layer.self_attn, "shares_cache_of", None) for layer in layers]
    assert owners == [None] * 20 + [18, 18, 18, 18, 19] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": [8192] * 3}, "intermediate_size=.*, expected one number for each layer"),
        ({"intermediate_size": "8192"}, "intermediate_size='8192', expected an integer of at least"),
        ({"activation_sparsity_pattern": [0.95]}, "activation_sparsity_pattern=.*, expected one number for each layer"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "expected numbers from 0 to less than 1, not 1.0"),
        ({"altup_active_idx": 4}, "altup_active_idx=4 and .*=4, expected an index"),
        ({"num_kv_shared_layers": 27}, "num_kv_shared_layers=27, but layer 4 .* 'full_attention' layer"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    values = published("e2b")
    values["text_config"] |= changes
    with pytest.raises(ConfigError, match=message):
        construct(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "least"), [(None, 1 - 1e-9), pytest.param("int8", 0.99, marks=pytest.mark.slow)]
)
def test_a_published_checkpoint_is_served(tmp_path, quantization, least):
    """Under the names of a published one, with tensors of what is not served beside it."""
    text = Path(checkpoint_folder(FAMILY))
    names = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    outside = {"vision_config": {"model_type": "gemma3n_vision"}, "image_token_id": 130}
    config = json.loads((text / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(names | {"text_config": config} | outside))
    tensors = load_file(text / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    other = np.ones((2, 2), np.float32)
    tensors |= {f"model.{part}.weight": other for part in ("vision_tower.conv", "audio_tower.conf", "embed_audio.x")}
    # Layers 2 and 3 have no use for them.
    tensors |= {
        f"model.language_model.layers.{i}.self_attn.{n}.weight": other for i in (2, 3) for n in ("k_proj", "k_norm")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = prompt(60)
    with torch.no_grad():
        expected = reference_model(FAMILY)(torch.tensor([tokens])).logits.numpy().astype(np.float64).ravel()
    settings = {"dtype": "float32", "kv_cache_memory": "2MiB", "max_model_len": 256, "show_progress": False}
    with LLM(tmp_path, quantization=quantization, **settings) as llm:
        found = llm.compute_logits(tokens, path="paged").astype(np.float64).ravel()
    assert found @ expected / (np.linalg.norm(found) * np.linalg.norm(expected)) >= least
