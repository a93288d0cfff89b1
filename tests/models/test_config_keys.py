"""Keys of config.json that a family accepts: those of published files, and none that would change answers.

The files in tests/data/config_keys have the keys of published models, with fewer layers and without quantization.
"""

import json

import jax.numpy as jnp
import pytest
import torch
import transformers

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.models.model_loader import construct_abstractly
from tests.support.places import TESTS

FOLDER = TESTS / "data" / "config_keys"
ACCEPTED = json.loads((FOLDER / "accepted.json").read_text())
REFUSED = json.loads((FOLDER / "refused.json").read_text())
# Of each kind of spelling one, since building the reference takes a while.
COMPARED = (
    *("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-3B-Instruct, merged with transformers 5"),
    *("bigcode/starcoder2-15b", "unsloth/gemma-3-270m-it", "huggyllama/llama-7b"),
)


def construct(values):
    config = HFConfig(values)
    return config, construct_abstractly(VllmConfig(ModelConfig("it", config, dtype=jnp.bfloat16, max_model_len=2048)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_published_config_is_accepted_and_the_keys_of_tools_are_named(name):
    config, _ = construct(ACCEPTED[name]["config"])
    assert config.ignored_keys() == ACCEPTED[name]["ignored"]


@pytest.mark.parametrize("name", COMPARED)
def test_an_accepted_config_makes_the_references_parameters(name, tmp_path):
    values = ACCEPTED[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    model = construct(values)[1]
    known_as = model.checkpoint_names.name_in_checkpoint
    ours = {known_as(path): parameter.shape for path, parameter in model.named_parameters()}
    assert ours == {path: tuple(parameter.shape) for path, parameter in reference.named_parameters()}


@pytest.mark.parametrize("name", ["InternLM3", "IQuestCoder"])
def test_a_llama_of_another_name_has_the_parameters_that_the_reference_says(name, tmp_path):
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=1, architectures=[f"{name}ForCausalLM"])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
    assert type(reference) is transformers.LlamaForCausalLM
    ours, model = construct(json.loads((tmp_path / "config.json").read_text()))
    assert ours.unread_keys() == []
    expected = {path: tuple(parameter.shape) for path, parameter in reference.named_parameters()}
    assert {path: parameter.shape for path, parameter in model.named_parameters()} == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_asks_for_something_else_is_refused_by_the_key_and_the_reason(name):
    with pytest.raises(ConfigError) as error:
        construct(REFUSED[name]["config"])
    assert REFUSED[name]["names"] in str(error.value)
    assert REFUSED[name]["because"] in str(error.value)


def test_an_override_removes_a_key_that_is_refused():
    values = REFUSED["Qwen2.5-7B-Instruct-1M"]["config"]
    config = HFConfig(values, {"dual_chunk_attention_config": None})
    construct_abstractly(VllmConfig(ModelConfig("it", config, dtype=jnp.bfloat16, max_model_len=2048)))
