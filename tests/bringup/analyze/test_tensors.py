"""Tensors against parameters, told from headers: on checkpoints of transformers, damaged, and on one of 642 GB."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jaxis.bringup.analyze.analysis import analyze
from tests.support.places import TESTS

CONFIGS = TESTS / "data" / "configs"


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory):
    config = transformers.Qwen3MoeConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("moe")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def damaged(folder, source, change):
    """A copy of the checkpoint after `change(tensors)`."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def groups(analysis):
    return {(finding.code.split("_")[0], *finding.names, finding.count) for finding in analysis.findings}


def test_a_checkpoint_that_matches(moe_checkpoint):
    analysis = analyze(moe_checkpoint)
    assert analysis.can_run
    assert analysis.not_checked == ""
    tensors = load_file(moe_checkpoint / "model.safetensors")
    assert analysis.num_tensors == len(tensors)
    assert analysis.bytes_by_dtype == {"float32": sum(4 * tensor.numel() for tensor in tensors.values())}


def test_all_errors_are_reported_at_once_and_similar_ones_in_one_line(moe_checkpoint, tmp_path):
    def change(tensors):
        for layer in range(3):
            del tensors[f"model.layers.{layer}.self_attn.k_norm.weight"]
        for layer, expert in ((1, 0), (1, 2), (1, 3)):
            tensors[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"] = torch.zeros(24, 31)
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(31)
        tensors["vision_tower.patch.weight"] = torch.zeros(2, 2)

    analysis = analyze(damaged(tmp_path / "damaged", moe_checkpoint, change))
    assert not analysis.can_run
    assert groups(analysis) == {
        ("refused", "model.layers.1.mlp.experts.[0,2-3].up_proj.weight", 3),
        ("refused", "model.layers.0.self_attn.o_proj.bias", 1),
        ("refused", "model.layers.2.input_layernorm.weight", 1),
        ("refused", "vision_tower.patch.weight", 1),
        ("unfilled", "model.layers.[0-2].self_attn.k_norm.weight", 3),
        ("unfilled", "model.layers.1.mlp.experts.up_proj of expert [0,2-3]", 3),
        ("unfilled", "model.layers.2.input_layernorm.weight", 1),
    }
    [reason] = [str(each) for each in analysis.findings if each.code == "refused_tensor" and "2.input" in each.names[0]]
    assert "[31] in the checkpoint, [32] in the model" in reason


def test_a_dense_checkpoint_with_a_tied_head_of_its_own(checkpoint, tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = damaged(tmp_path / "tied", checkpoint(), change)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    assert (analyze(folder).findings, analyze(folder).not_checked) == ((), "")


def test_an_untied_checkpoint_without_its_head(checkpoint, tmp_path):
    analysis = analyze(damaged(tmp_path / "headless", checkpoint(), lambda tensors: tensors.pop("lm_head.weight")))
    assert groups(analysis) == {("unfilled", "lm_head.weight", 1)}


@pytest.mark.sampled
@pytest.mark.parametrize("quantization", ["int8", [{"module_path": ".*", "weight_qtype": "int4"}]])
def test_a_quantized_checkpoint_is_checked_in_its_own_layout(checkpoint, tmp_path, quantization):
    from jaxis.quantization.arguments import parse_quantization
    from jaxis.quantization.checkpoint import quantize_checkpoint

    folder = tmp_path / "quantized"
    quantize_checkpoint(checkpoint(), folder, parse_quantization(quantization))
    analysis = analyze(folder)
    assert (analysis.findings, analysis.not_checked) == ((), "")
    assert analysis.sizes.parameters.total == analyze(checkpoint()).sizes.parameters.total

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight_scale"]

    assert groups(analyze(damaged(tmp_path / "damaged", folder, change))) == {
        ("unfilled", "model.layers.1.mlp.up_proj.weight_scale", 1)
    }


def test_a_checkpoint_with_affine_weights_is_complete(checkpoint, tmp_path):
    from jaxis.quantization.arguments import parse_quantization
    from jaxis.quantization.checkpoint import quantize_checkpoint

    quantize_checkpoint(checkpoint(), tmp_path / "quantized", parse_quantization("int4"))
    analysis = analyze(tmp_path / "quantized")
    assert (analysis.findings, analysis.not_checked) == ((), "")
    assert analysis.sizes.parameters.total == analyze(checkpoint()).sizes.parameters.total


@pytest.mark.sampled
@pytest.mark.parametrize("scanned", [False, True])
def test_an_orbax_checkpoint_is_checked_like_the_one_it_was_made_of(moe_checkpoint, tmp_path, scanned):
    from jaxis.bringup.convert.convert import convert_checkpoint

    convert_checkpoint(moe_checkpoint, tmp_path / "orbax", "orbax", scanned=scanned)
    analysis, of_source = analyze(tmp_path / "orbax"), analyze(moe_checkpoint)
    assert (analysis.findings, analysis.not_checked) == ((), "")
    assert analysis.num_tensors == of_source.num_tensors
    assert analysis.bytes_by_dtype == of_source.bytes_by_dtype


def test_without_weights_the_reason_is_reported(moe_checkpoint):
    analysis = analyze(moe_checkpoint / "config.json")
    assert analysis.can_run
    assert analysis.not_checked == "config.json alone was given"
    assert analysis.sizes.parameters == analyze(moe_checkpoint).sizes.parameters


@pytest.mark.parametrize("differs", [False, True])
def test_two_tables_are_a_head_of_its_own_if_they_differ(tmp_path, differs):
    """Loading and transformers have it so, whatever the config says."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + differs
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    analysis = analyze(tmp_path)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert analysis.sizes.parameters.total == reference.num_parameters()
    assert ("lm_head" in [row.name for row in analysis.modules]) == differs
    assert (analysis.findings, analysis.not_checked) == ((), "")
