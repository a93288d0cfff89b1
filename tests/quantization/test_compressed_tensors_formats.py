"""Checkpoints in every format of compressed-tensors, from file to logits, against transformers on the same weights."""

import json
import logging

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight
from jaxis.layers.weight_format import WeightSlot
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.support.block_checkpoints import assert_logits, transformers_logits
from tests.support.compressed_checkpoints import (
    compress,
    config_of,
    decompress_wide,
    encoded_by,
    scheme_of,
    write_stored,
)
from tests.support.quantized_models import IDS, assert_equal, load, logits, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import variant, write_checkpoint

INT3 = {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
INT8_ASYMMETRIC = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
INT8_TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}
SCHEMES = {
    "int3": scheme_of("pack-quantized", INT3),
    "W6A16": scheme_of("pack-quantized", {**INT3, "num_bits": 6, "symmetric": True}),
    "W8A16": scheme_of("pack-quantized", {**INT3, "num_bits": 8, "symmetric": True}),
    "int8 asymmetric": scheme_of("int-quantized", INT8_ASYMMETRIC),
    "int8 tensor": scheme_of("int-quantized", INT8_TENSOR),
    "FP8 naive": scheme_of("naive-quantized", "FP8"),
    "FP8_DYNAMIC": scheme_of("float-quantized", "FP8_DYNAMIC"),
    "NVFP4": scheme_of("nvfp4-pack-quantized", "NVFP4"),
    "MXFP4": scheme_of("mxfp4-pack-quantized", "MXFP4"),
    "MXFP6A8": scheme_of("mxfp6-pack-quantized", "MXFP6A8"),
    "MXFP8": scheme_of("mxfp8-quantized", "MXFP8"),
}
TYPES = {
    "int3": CodedWeight,
    "W6A16": CodedWeight,
    "W8A16": QuantizedWeight,
    "int8 asymmetric": CodedWeight,
    "int8 tensor": QuantizedWeight,
    "NVFP4": CodedWeight,
    "MXFP6A8": CodedWeight,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 96, "intermediate_size": 160, "tie_word_embeddings": False}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return {
        "dense": write_checkpoint(root / "dense", tokenizer=False, **sizes),
        "moe": write_checkpoint(root / "moe", "qwen3_moe", tokenizer=False, **sizes, **moe),
    }


@pytest.mark.sampled
@pytest.mark.parametrize("family", [pytest.param("dense", marks=pytest.mark.slow), "moe"])  # "moe" contains it
@pytest.mark.parametrize("name", quick_rows(SCHEMES, ["NVFP4", "int3"]))
def test_logits_are_those_of_the_weights_that_a_format_stands_for(sources, tmp_path, family, name):
    scheme = SCHEMES[name]
    stored, wide = write_stored(
        tmp_path, sources[family], encoded_by(scheme), config_of(scheme, ignore=("lm_head", "re:.*mlp.gate$"))
    )
    held = values(assert_logits(stored, wide))["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(held, TYPES.get(name, BlockScaledWeight))


def test_several_formats_in_one_file(sources, tmp_path):
    """By name, by regular expression, by class: mixed-precision."""
    by_name = scheme_of("nvfp4-pack-quantized", "NVFP4A16", targets=["model.layers.0.mlp.down_proj"])
    by_pattern = scheme_of("float-quantized", "FP8", targets=["re:.*self_attn.*"])
    by_class = scheme_of("pack-quantized", INT3)

    def encode(module, weight):
        scheme = by_class
        if module == "model.layers.0.mlp.down_proj":
            scheme = by_name
        elif "self_attn" in module:
            scheme = by_pattern
        tensors = compress(weight, scheme)
        return tensors, decompress_wide(tensors, scheme)

    config = config_of(by_class, by_pattern, by_name)
    assert config["format"] == "mixed-precision"
    stored, wide = write_stored(tmp_path, sources["dense"], encode, config)
    expected = transformers_logits(wide, IDS)
    np.testing.assert_allclose(logits(load(stored)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_head_and_embeddings_may_be_quantized(tmp_path, tied):
    source = write_checkpoint(tmp_path / "source", tokenizer=False, hidden_size=96, tie_word_embeddings=tied)
    scheme = scheme_of("nvfp4-pack-quantized", "NVFP4A16", targets=["Linear", "Embedding"])
    stored, wide = write_stored(
        tmp_path,
        source,
        encoded_by(scheme),
        config_of(scheme, ignore=()),
        layers=r"(_proj|embed_tokens|lm_head)\.weight$",
    )
    assert isinstance(values(assert_logits(stored, wide))["model.embed_tokens.weight"], CodedWeight)


def test_a_quantized_head_of_a_tied_model_is_named(sources, tmp_path):
    scheme = SCHEMES["FP8_DYNAMIC"]
    stored, _ = write_stored(
        tmp_path, sources["dense"], encoded_by(scheme), config_of(scheme, ignore=()), layers=r"(_proj|lm_head)\.weight$"
    )
    folder = variant(tmp_path / "tied", stored, tie_word_embeddings=True)
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight_scale' is of a quantized head, but .*tie_word_embeddings"
    ):
        load(folder)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "target", ["Linear", "FusedMoE", "re:.*experts.*", r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.w?"]
)
def test_experts_are_targets_as_linear_layers_or_together(sources, tmp_path, target):
    scheme = scheme_of("float-quantized", "FP8_DYNAMIC", targets=[target])
    stored, wide = write_stored(
        tmp_path, sources["moe"], encoded_by(scheme), config_of(scheme, ignore=("re:.*self_attn.*",)), layers="experts"
    )
    expected = transformers_logits(wide, IDS)
    np.testing.assert_allclose(logits(load(stored)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["int3", "FP8_DYNAMIC", "NVFP4"])
def test_a_router_that_the_file_quantizes_is_dequantized(sources, tmp_path, name):
    scheme = SCHEMES[name]
    stored, wide = write_stored(
        tmp_path, sources["moe"], encoded_by(scheme), config_of(scheme), layers=r"(_proj|mlp\.gate)\.weight$"
    )
    assert_logits(stored, wide)


def test_what_a_list_forgets_to_ignore_is_taken_as_it_is(sources, tmp_path):
    """Here the head and the routers: their weights in the file are ordinary ones."""
    scheme = SCHEMES["FP8_DYNAMIC"]
    stored, wide = write_stored(tmp_path, sources["moe"], encoded_by(scheme), config_of(scheme, ignore=()))
    held = values(load(stored))
    expected = load_file(wide / "model.safetensors")
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight"):
        np.testing.assert_array_equal(held[name], expected[name].numpy())


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_ignored_modules_named_as_parts_of_a_multimodal_model(sources, tmp_path, prefix):
    scheme = SCHEMES["FP8_DYNAMIC"]
    kept = "model.layers.0.self_attn.q_proj"
    in_list = kept.replace("model.", prefix, 1) if prefix.startswith("model.") else f"{prefix}{kept}"

    def encode(module, weight):
        return ({"weight": weight}, weight) if module == kept else encoded_by(scheme)(module, weight)

    stored, wide = write_stored(tmp_path, sources["dense"], encode, config_of(scheme, ignore=(in_list, "lm_head")))
    hf_config = HFConfig.from_folder(stored)
    config = quantization_of_checkpoint(hf_config, None)  # by the list alone
    layer = type("Layer", (), {"weight_slots": (WeightSlot("weight", (128, 128), (None, None)),)})()
    assert config.get_quant_method(layer, kept) is None
    assert config.get_quant_method(layer, kept.replace("q_proj", "k_proj")) is not None
    expected = transformers_logits(wide, IDS)
    np.testing.assert_allclose(logits(load(stored)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


class TestUnusedScales:
    @pytest.fixture
    def stored(self, sources, tmp_path):
        scheme = SCHEMES["FP8 naive"]
        kv_cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        extra = {}
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn"
            extra |= {f"{prefix}.{name}_scale": torch.ones(1) for name in ("k", "v", "q")}
            extra |= {f"{prefix}.{name}_proj.output_scale": torch.ones(1) for name in ("k", "v")}
            extra |= {f"{prefix}.{name}_proj.input_scale": torch.ones(1) for name in ("q", "k", "v", "o")}
            extra |= {
                f"{prefix}.o_proj.input_global_scale": torch.ones(1),
                f"{prefix}.o_proj.input_zero_point": torch.ones(1),
            }
        config = config_of(scheme, kv_cache_scheme=kv_cache)
        return write_stored(tmp_path, sources["dense"], encoded_by(scheme), config, extra=extra)

    def test_they_change_nothing_and_are_said_once(self, stored, caplog):
        with caplog.at_level(logging.WARNING, logger="jaxis"):
            model = load(stored[0])
        expected = transformers_logits(stored[1], IDS)
        np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        lines = [record.getMessage() for record in caplog.records if record.name.startswith("jaxis.quantization")]
        assert len(lines) == 2
        assert sum("scales of a quantized KV cache are not used" in line for line in lines) == 1
        assert sum("fixed scales of activations are not used" in line for line in lines) == 1


def test_transforms_of_weights_were_applied_offline(sources, tmp_path):
    scheme = SCHEMES["FP8_DYNAMIC"]
    uses = [
        {"targets": ["Linear"], "location": location, "inverse": False}
        for location in ("weight_input", "weight_output")
    ]
    transforms = {"config_groups": {"R1": {"type": "hadamard", "randomize": False, "apply": uses}}}
    stored, _ = write_stored(tmp_path, sources["dense"], encoded_by(scheme), config_of(scheme))
    config = config_of(scheme, transform_config=transforms)
    assert_equal(load(variant(tmp_path / "transformed", stored, quantization_config=config)), load(stored))


def test_int8_activations_with_fixed_scales_are_quantized_dynamically(sources, tmp_path):
    scheme = scheme_of("int-quantized", INT8_TENSOR)
    stored, _ = write_stored(tmp_path, sources["dense"], encoded_by(scheme), config_of(scheme))
    config = config_of(scheme.model_copy(update={"input_activations": scheme.weights}))
    model = load(variant(tmp_path / "static", stored, quantization_config=config))
    assert values(model)["model.layers.0.mlp.up_proj.weight"].act_qtype == "int8"
    assert values(load(stored))["model.layers.0.mlp.up_proj.weight"].act_qtype is None
    np.testing.assert_allclose(logits(model), logits(load(stored)), rtol=0, atol=0.2)


def test_experts_in_different_formats_are_refused(sources, tmp_path):
    one = scheme_of("float-quantized", "FP8_DYNAMIC", targets=[r"re:.*experts\.[01]\."])
    other = scheme_of("pack-quantized", INT3)
    folder = variant(tmp_path / "mixed", sources["moe"], quantization_config=config_of(one, other))
    with pytest.raises(ConfigError, match=r"experts of model.layers.0.mlp.experts are quantized in different ways"):
        load(folder)


def test_every_preset_of_the_library_is_understood():
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    layer = type("Layer", (), {"weight_slots": (WeightSlot("weight", (128, 128), (None, None)),)})()
    formats = {"NVFP4": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized", "MXFP6": "mxfp6-pack-quantized"}
    formats |= {"MXFP8": "mxfp8-quantized", "FP8": "float-quantized", "INT8": "int-quantized", "W8A8": "int-quantized"}
    for preset in PRESET_SCHEMES.keys() - {"UNQUANTIZED"}:
        file_format = next((each for name, each in formats.items() if preset.startswith(name)), "pack-quantized")
        written = json.loads(json.dumps(config_of(scheme_of(file_format, preset))))
        config = quantization_of_checkpoint(HFConfig({"quantization_config": written}), None)
        assert config.get_quant_method(layer, "model.layers.0.mlp.up_proj") is not None, preset


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("dense", marks=pytest.mark.slow), "moe"])  # "moe" contains it
def test_groups_of_columns_that_are_not_neighbours(sources, tmp_path, family):
    """GPTQ with `actorder` "group" stores them: columns were quantized in the order of their importance."""
    scheme = scheme_of("pack-quantized", {**INT3, "num_bits": 4})

    def encode(_, weight):
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.numel()))
        sorted_tensors = compress(weight[:, order], scheme)
        q = unpack_from_int32(sorted_tensors["weight_packed"], 4, weight.shape)
        stored, wide, groups = torch.empty_like(q), torch.empty_like(weight), torch.empty(len(order), dtype=torch.int32)
        stored[:, order], wide[:, order] = q, decompress_wide(sorted_tensors, scheme)
        groups[order] = torch.arange(len(order), dtype=torch.int32) // 32
        return sorted_tensors | {"weight_packed": pack_to_int32(stored, 4), "weight_g_idx": groups}, wide

    config = config_of(scheme, ignore=("lm_head", "re:.*mlp.gate$"))
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    assert_logits(*write_stored(tmp_path, sources[family], encode, config))


def test_projections_of_experts_in_different_formats(sources, tmp_path):
    down = scheme_of("nvfp4-pack-quantized", "NVFP4A16", targets=["re:.*down_proj$"])
    others = scheme_of("float-quantized", "FP8_DYNAMIC")

    def encode(module, weight):
        return encoded_by(down if module.endswith("down_proj") else others)(module, weight)

    stored, wide = write_stored(
        tmp_path, sources["moe"], encode, config_of(down, others, ignore=("lm_head", "re:.*mlp.gate$"))
    )
    assert_logits(stored, wide)
