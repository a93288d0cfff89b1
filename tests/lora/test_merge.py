"""Adapters merged at load, against PEFT's unmerged models in float32."""

from __future__ import annotations

import re

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxis import LLM
from jaxis.bringup.verify.compare import relative_error
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.fingerprint import arguments_digest
from jaxis.errors import CheckpointError, ConfigError
from tests.support.adapters import base_model, edit_config, reference_logits, save_adapter
from tests.support.tiny_checkpoints import write_checkpoint

TOKENS = [5, 100, 7, 8, 9, 400, 11, 12]
# What PEFT can be told, each kind once.
CONFIGS = {
    "all linear": {"target_modules": "all-linear"},
    "rank-stabilized": {"use_rslora": True, "r": 8, "lora_alpha": 4},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
        "alpha_pattern": {"q_proj": 1, "1.mlp.down_proj": 32},
    },
    "expression": {"target_modules": r".*layers\.1\.self_attn\.[qv]_proj"},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers", "exclude_modules": ["k_proj"]},
    "norms of rows": {"use_dora": True},
    "embeddings and head": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "norms of embeddings": {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True},
    "whole modules": {"modules_to_save": ["lm_head", "norm"]},
    "biases of its modules": {"bias": "lora_only"},
    "all biases": {"bias": "all", "target_modules": ["o_proj"]},
    "orthogonal start": {"init_lora_weights": "orthogonal"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("base"), "qwen2", tokenizer=False, tie_word_embeddings=False, num_hidden_layers=2
    )


@pytest.mark.sampled
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_peft(base, tmp_path, kind):
    adapter = save_adapter(base, tmp_path / "adapter", **CONFIGS[kind])
    expected = reference_logits(base, adapter, TOKENS)
    with LLM(str(base), adapter=adapter, merge=True, max_model_len=64) as llm:
        logits = llm.compute_logits(TOKENS)
    assert relative_error(logits, expected) < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_adapters_of_any_float_type_are_read(base, tmp_path, stored):
    adapter = save_adapter(base, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    tensors = {name: tensor.to(getattr(torch, stored)) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    expected = reference_logits(base, adapter, TOKENS)
    with LLM(str(base), adapter=adapter, merge=True, max_model_len=64) as llm:
        assert relative_error(llm.compute_logits(TOKENS), expected) < 1e-5


def test_the_merged_weights_are_then_quantized(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(base_model(base), str(adapter)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    with LLM(str(tmp_path / "merged"), quantization="int8", max_model_len=64) as llm:
        expected = llm.compute_logits(TOKENS)
    with LLM(str(base), adapter=adapter, merge=True, quantization="int8", max_model_len=64) as llm:
        logits = llm.compute_logits(TOKENS)
    assert relative_error(logits, expected) < 0.02  # the last bit of a sum may decide how it is rounded


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices"),
        ({"trainable_token_indices": {"embed_tokens": [1, 1]}}, "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"a_key_of_tomorrow": 3}, "a_key_of_tomorrow=3"),
        ({"target_parameters": "experts.down_proj"}, "target_parameters"),
        ({"r": 0}, "r=0"),
        ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern"),
        ({"rank_pattern": {"(": 8}}, "invalid regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "invalid regular expression"),
        ({"layers_pattern": "(?P<layer>layers)"}, "invalid regular expression"),
        ({"lora_alpha": 10**400}, r"lora_alpha=10{199}\.\.\. must be a number from -1e"),
        ({"bias": "some"}, "bias='some'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"r": 5}, r"q_proj.lora_A.weight' has shape \[4, 64\], expected \[5"),
        ({"target_modules": ["v_proj"]}, "q_proj.lora_A.weight' is of a module that"),
        ({"use_dora": True}, "has no tensor .*lora_magnitude_vector"),
    ],
)
def test_what_an_adapter_asks_for_is_refused_by_name(base, tmp_path, changes, named):
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_config(adapter, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=named) as caught:
        LLM(str(base), adapter=adapter, merge=True)
    assert "\n" not in str(caught.value)


def test_unknown_keys_that_are_not_set_are_no_matter(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    edit_config(adapter, a_key_of_tomorrow=None, another={})
    LLM(str(base), adapter=adapter, merge=True, max_model_len=64).close()


def test_adapters_of_another_model_are_refused_by_name(base, tmp_path):
    larger = write_checkpoint(tmp_path, "qwen2", tokenizer=False, hidden_size=80, num_hidden_layers=2)
    adapter = save_adapter(larger, tmp_path / "larger", target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"q_proj' is for a weight of shape \[128, 80\].* has \[128, 64\]"):
        LLM(str(base), adapter=adapter, merge=True)
    deeper = write_checkpoint(tmp_path / "deeper", "qwen2", tokenizer=False, num_hidden_layers=3)
    adapter = save_adapter(deeper, tmp_path / "deep", target_modules=["q_proj"])
    with pytest.raises(ConfigError, match=r"changes 'model.layers.2.self_attn.q_proj', which the model's checkpoint"):
        LLM(str(base), adapter=adapter, merge=True)


def test_damaged_adapters_are_refused(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match="is truncated: 8 of"):
        LLM(str(base), adapter=adapter, merge=True)
    weights.write_bytes((10 << 30).to_bytes(8, "little") + whole[8:])
    with pytest.raises(CheckpointError, match="its header claims 10737418240 bytes"):
        LLM(str(base), adapter=adapter, merge=True)
    tensors = load_file(save_adapter(base, adapter, target_modules=["q_proj"]) / weights.name)
    name = next(iter(tensors))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, weights)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}' has NaN or infinite elements"):
        LLM(str(base), adapter=adapter, merge=True)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin is a pickle, which can run code"):
        LLM(str(base), adapter=adapter, merge=True)
    with pytest.raises(CheckpointError, match="is not a folder"):
        LLM(str(base), adapter=tmp_path / "nowhere", merge=True)


def test_an_adapter_needs_weights_and_a_place(base, tmp_path):
    with pytest.raises(ConfigError, match="merge needs adapter"):
        LLM(str(base), merge=True)
    with pytest.raises(ConfigError, match="needs the weights that it was trained on"):
        LLM(str(base), adapter=tmp_path, merge=True, load_format="dummy")


def test_fingerprints_depend_on_what_the_adapter_holds(base, tmp_path):
    first, second = (save_adapter(base, tmp_path / name, seed=0, target_modules=["q_proj"]) for name in "ab")
    other = save_adapter(base, tmp_path / "c", seed=1, target_modules=["q_proj"])
    digests = [arguments_digest(EngineArgs(adapter=str(path), merge=True)) for path in (first, second, other)]
    assert digests[0] == digests[1] != digests[2]
