"""Quantized checkpoints of mixtures of experts: what is written loads as what the rules make of the original."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxis.errors import CheckpointError, ConfigError
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from tests.support.quantized_models import assert_equal, load, logits, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import variant

SIZES = {
    **{"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1, "head_dim": 16, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    "num_experts_per_tok": 4,  # all of them, so that no rounding changes which
}
# One tensor an expert, one with other names, and one for all experts with biases.
FAMILIES = {
    "Qwen3 MoE": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 96}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "intermediate_size": 96}),
    "GPT-OSS": ("GptOssConfig", {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": 32}),
}
RULES = {
    "int8": "int8",
    "int4": "int4",
    "int4 with zero points": [
        {"module_path": r".*\.experts", "weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "minmax"}
    ],
    "experts not": [
        {"module_path": r".*\.experts", "weight_qtype": None},
        {"module_path": r".*_proj", "weight_qtype": "int8"},
    ],
}


@functools.cache
def checkpoint(family: str) -> Path:
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES | settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    folder = Path(tempfile.mkdtemp(prefix="experts-"))
    model.save_pretrained(folder)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "native"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("family", quick_rows(FAMILIES, ["GPT-OSS"]))
def test_the_quantized_checkpoint_is_what_the_rules_make_of_the_original(family, rules, native, tmp_path):
    if family != "Qwen3 MoE" and rules not in ("int8", "int4"):
        pytest.skip("the same for all")
    quantize_checkpoint(checkpoint(family), tmp_path / "q", parse_quantization(RULES[rules]))
    stored = load(tmp_path / "q", native=native)
    assert_equal(stored, load(checkpoint(family), RULES[rules], native=native))
    assert np.isfinite(logits(stored)).all()


def test_each_expert_is_a_linear_module_to_other_engines(tmp_path):
    quantize_checkpoint(checkpoint("Qwen3 MoE"), tmp_path / "q", parse_quantization(RULES["int8"]))
    written = load_file(tmp_path / "q" / "model.safetensors")
    original = load_file(checkpoint("Qwen3 MoE") / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.up_proj"
    scale = written[f"{name}.weight_scale"].astype(np.float64)
    restored = written[f"{name}.weight"] * np.repeat(scale, 32, axis=1)
    weight = original[f"{name}.weight"]
    np.testing.assert_allclose(restored, weight, rtol=0, atol=np.abs(weight).max() / 250)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert ["Linear"] in [group["targets"] for group in config["config_groups"].values()]
    # The router is not quantized.
    np.testing.assert_array_equal(written["model.layers.0.mlp.gate.weight"], original["model.layers.0.mlp.gate.weight"])
    assert "model.layers.0.mlp.gate" in config["ignore"]


def test_experts_left_as_they_are_are_named(tmp_path):
    quantize_checkpoint(checkpoint("Qwen3 MoE"), tmp_path / "q", parse_quantization(RULES["experts not"]))
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert r"re:model\.layers\.0\.mlp\.experts\.\d+\." in config["ignore"]


def broken(tmp_path, change):
    """A source whose tensors are changed."""
    source = variant(tmp_path / "source", checkpoint("Qwen3 MoE"), files={"model.safetensors": None})
    tensors = load_file(checkpoint("Qwen3 MoE") / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    return source


NAME = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), r"parameter 'model.layers.0.mlp.experts.up_proj of expert 2' is not in the checkpoint"),
        (lambda t: t.update({NAME: t[NAME] * np.inf}), rf"tensor '{NAME}' has values that are not finite"),
        (lambda t: t.update({NAME.replace("2", "4"): t[NAME]}), r"experts.4.up_proj.weight' has no parameter in Qwen3"),
        (
            lambda t: t.update({NAME.replace("up", "side"): t[NAME]}),
            r"'.*side_proj.weight' is not one of the tensors of",
        ),
    ],
    ids=["missing", "infinite", "surplus", "unknown"],
)
def test_sources_that_are_not_whole_are_refused(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(broken(tmp_path, change), tmp_path / "q", parse_quantization("int8"))
    assert not (tmp_path / "q").exists()


def test_experts_quantized_in_different_ways_are_refused(tmp_path):
    quantize_checkpoint(checkpoint("Qwen3 MoE"), tmp_path / "q", parse_quantization("int8"))
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["ignore"].append(NAME.removesuffix(".weight"))
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"experts of model.layers.0.mlp.experts are quantized in different ways"):
        load(tmp_path / "q")


def test_a_missing_scale_is_named(tmp_path):
    quantize_checkpoint(checkpoint("Qwen3 MoE"), tmp_path / "q", parse_quantization("int8"))
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors.pop(NAME.replace("weight", "weight_scale"))
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: .*experts.up_proj_weight_scale of expert 2"):
        load(tmp_path / "q")


def test_experts_are_quantized_in_memory(tmp_path):
    quantize_checkpoint(checkpoint("Qwen3 MoE"), tmp_path / "q", parse_quantization("int4"))
    stack = values(load(tmp_path / "q", native=True))["model.layers.0.mlp.experts.up_proj"]
    # Four bits, and a scale and a minimum of eight for 32 of them; a row has two floats that these are multiplied by.
    assert stack.nbytes == 4 * 96 * (64 * (0.5 + 2 / 32) + 8)
