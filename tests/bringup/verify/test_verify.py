"""`verify` as a whole: what it says of right models, wrong ones, and stored logits."""

import dataclasses
import json

import numpy as np
import pytest

from jaxis.bringup.verify.golden import Golden, checkpoint_hashes
from jaxis.bringup.verify.verify import verify
from jaxis.errors import CheckpointError, ConfigError
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.models.registry import get_model_class
from tests.bringup.verify.faulty_models import become
from tests.bringup.verify.verified_models import registered
from tests.support import published_configs
from tests.support.quick_rows import quick_rows


@pytest.fixture
def config_file(tmp_path):
    def write(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return str(path)

    return write


@pytest.fixture(scope="module")
def golden(checkpoint, tmp_path_factory):
    """(The checkpoint, stored logits of it, what was found while they were stored.)"""
    path = tmp_path_factory.mktemp("golden") / "logits.safetensors"
    result = verify(str(checkpoint()), prompt_lengths=[1, 40], save_golden=path, only=["decode"])
    return checkpoint(), path, result


def forget(monkeypatch, *modules):
    """Makes the modules ones that cannot be imported."""
    for name in modules:
        monkeypatch.setitem(__import__("sys").modules, name, None)


def test_a_tiny_twin_passes_every_check(config_file):
    stages = []
    result = verify(config_file(published_configs.MISTRAL), on_stage=stages.append)
    assert result.passed
    assert result.weights == "tiny twin"
    assert [check.prompt_length for check in result.logits] == [1, 17, 500]
    assert result.layers.num_compared > 20
    assert {path.path for path in result.paths} == {
        *("prefill", "decode", "prefix cache hit", "prefill in chunks of 24", "batch", "batch, in chunks"),
    }
    assert all(path.comparison.num_tokens >= 7 for path in result.paths)
    assert result.decode.num_equal == result.decode.num_tokens
    assert set(result.versions) >= {"jaxis", "jax", "torch", "transformers", "python"}
    assert stages[0] == "running the reference"
    json.dumps(result.to_dict())


PARTS = ("layers", "images", "logits", "paths", "decode")


@pytest.mark.parametrize("part", quick_rows(["layers", "paths", "decode"], ["layers"]))
def test_one_part_alone_is_checked(config_file, part):
    result = verify(config_file(published_configs.MISTRAL), only=[part], prompt_lengths=[5])
    checked = {name for name in PARTS if getattr(result, name)}
    assert checked == ({"logits", "decode"} if part == "decode" else {part})
    assert result.passed


def test_a_part_that_cannot_be_checked_is_an_error(config_file, golden):
    folder, path, _ = golden
    with pytest.raises(ConfigError, match="only='layer' must be of layers, images"):
        verify(config_file(published_configs.MISTRAL), only=["layer"])
    with pytest.raises(ConfigError, match="has no images to check"):
        verify(str(folder), only=["images"])
    with pytest.raises(ConfigError, match="layers and images need the reference"):
        verify(str(folder), only=["layers"], golden=path)


@pytest.mark.slow
def test_a_fault_on_one_path_only_is_found_there(config_file):
    """A scale that is wrong where there is a cache, and right where there is none."""

    def call(self, kv_cache, x, metadata):
        right = self.scale
        self.scale = right if kv_cache is None else 1.1 * right
        try:
            return GroupedQueryAttention.__call__(self, kv_cache, x, metadata)
        finally:
            self.scale = right

    class Faulty(get_model_class(["MistralForCausalLM"])):
        def __init__(self, vllm_config, rng, quant_config=None):
            super().__init__(vllm_config, rng, quant_config)
            become(self.model.layers[0].self_attn, GroupedQueryAttention, __call__=call)

    with registered("MistralForCausalLM", Faulty):
        result = verify(config_file(published_configs.MISTRAL), prompt_lengths=[20])
    assert not result.passed
    assert result.layers.passed
    assert all(check.passed for check in result.logits)
    assert not any(path.passed for path in result.paths)


@pytest.mark.slow
def test_stored_logits_stand_for_the_reference_without_torch(golden, monkeypatch):
    folder, path, stored = golden
    forget(monkeypatch, "torch", "transformers")
    result = verify(str(folder), golden=path)
    assert stored.passed
    assert result.passed
    assert stored.weights == result.weights == "checkpoint"
    assert result.layers is None
    assert [check.prompt_length for check in result.logits] == [1, 40]
    assert result.decode == stored.decode
    assert result.hashes == stored.hashes == checkpoint_hashes(folder)
    assert result.versions["torch"] == stored.versions["torch"]


def test_stored_logits_of_other_numbers_fail(golden, tmp_path):
    folder, path, _ = golden
    right = Golden.load(path)
    prompt = right.prompts[1]
    wrong = dataclasses.replace(prompt, logits=prompt.logits + np.linspace(0, 0.1, prompt.logits.shape[1], dtype="f4"))
    other = tmp_path / "wrong.safetensors"
    dataclasses.replace(right, prompts=(right.prompts[0], wrong)).save(other)
    result = verify(str(folder), golden=other, only=["logits"])
    assert [check.passed for check in result.logits] == [True, False]


def test_stored_logits_of_another_checkpoint_are_refused(golden, tmp_path, checkpoint):
    folder, path, _ = golden
    with pytest.raises(CheckpointError, match=r"made from other config\.json"):
        verify(str(checkpoint("llama")), golden=path)
    with pytest.raises(CheckpointError, match="no reference logits"):
        verify(str(folder), golden=folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="--save-golden"):
        verify(str(folder), golden=tmp_path / "none")


def test_without_torch_one_line_says_what_to_install(config_file, monkeypatch):
    forget(monkeypatch, "torch")
    with pytest.raises(ConfigError, match=r"pip install 'jaxis\[verify\]'"):
        verify(config_file(published_configs.LLAMA_2))


def test_what_cannot_be_verified_is_one_error(config_file, tmp_path):
    unknown = {**published_configs.LLAMA_2, "architectures": ["NoneForCausalLM"]}
    with pytest.raises(ConfigError, match=r"\['NoneForCausalLM'\] in config.json is not supported"):
        verify(config_file(unknown))
    with (
        registered("NoneForCausalLM", get_model_class(["LlamaForCausalLM"])),
        pytest.raises(ConfigError, match=r"transformers .* has no model for architectures=\['NoneForCausalLM'\]"),
    ):
        verify(config_file(unknown))
    with pytest.raises(ConfigError, match="has no weights"):
        verify(config_file(published_configs.LLAMA_2), save_golden=tmp_path / "x")
    with pytest.raises(ConfigError, match="dtype='int8'"):
        verify(config_file(published_configs.LLAMA_2), dtype="int8")
    with pytest.raises(CheckpointError, match="there is no folder"):
        verify("./nowhere")
