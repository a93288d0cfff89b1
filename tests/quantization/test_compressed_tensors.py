"""Checkpoints in the compressed-tensors format, against the format's own library and transformers."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.kernels import native as kernels
from jaxis.kernels.weights import WeightScheme, quantize
from jaxis.layers.weight_format import WeightSlot
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.checkpoints.compressed_tensors import CompressedTensorsConfig
from jaxis.quantization.compressed_tensors_export import quantization_config, tensor_specs, tensors
from tests.support.block_checkpoints import write_fp8
from tests.support.dequantized import dequantize
from tests.support.quantized_models import IDS, assert_equal, load, logits
from tests.support.tiny_checkpoints import variant, write_checkpoint

HEAD_AND_EMBEDDINGS = {"module_path": ".*embed_tokens|lm_head"}
RULES = {
    "int8": [HEAD_AND_EMBEDDINGS, {"module_path": ".*", "weight_qtype": "int8"}],
    "int8 in groups": [HEAD_AND_EMBEDDINGS, {"module_path": ".*", "weight_qtype": "int8", "tile_size": 32}],
    "int4": [{"module_path": ".*embed_tokens"}, {"module_path": ".*", "weight_qtype": "int4"}],
    "int4 in groups, int8 mixed in": [
        HEAD_AND_EMBEDDINGS,
        {"module_path": ".*o_proj", "weight_qtype": "int8"},
        {"module_path": ".*", "weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "mse"},
    ],
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("untied") / "source", "qwen3", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def quantized_folder(untied, tmp_path_factory):
    """Name of RULES -> folder, made once."""
    root = tmp_path_factory.mktemp("quantized")

    def folder(name):
        if not (root / name).exists():
            quantize_checkpoint(untied, root / name, parse_quantization(RULES[name]))
        return root / name

    return folder


def transformers_logits(folder):
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return reference(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RULES)
def test_transformers_reads_what_we_write(quantized_folder, name):
    folder = quantized_folder(name)
    expected = transformers_logits(folder)
    np.testing.assert_allclose(logits(load(folder)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tile_size", [None, 32])
@pytest.mark.parametrize("shape", [(16, 64), (13, 96)])
def test_packed_weights_are_those_of_the_formats_library(symmetric, tile_size, shape):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    scheme = WeightScheme("int4", tile_size, "absmax" if symmetric else "minmax")
    quantized = quantize(weight, scheme)
    ours = tensors("x", quantized)
    assert {name: (t.dtype, t.shape) for name, t in ours.items()} == {
        name: (spec.dtype, spec.shape) for name, spec in tensor_specs("x", shape, scheme).items()
    }
    config = quantization_config({"x": ("Linear", scheme)})
    state = {
        name.removeprefix("x."): torch.tensor(np.asarray(t, np.float32 if "scale" in name else None))
        for name, t in ours.items()
    }
    state["weight_shape"] = torch.Size(shape)
    unpacked = PackedQuantizationCompressor.decompress(state, QuantizationScheme(**config["config_groups"]["group_0"]))
    np.testing.assert_allclose(unpacked["weight"].numpy(), dequantize(quantized), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["int8", "int4 in groups, int8 mixed in"])
def test_activations_alone_may_be_chosen_whatever_the_weights(quantized_folder, untied, name):
    def with_int8(rule):
        return rule | {"act_qtype": "int8"} if "weight_qtype" in rule else rule

    expected = load(untied, [with_int8(rule) for rule in RULES[name]])
    assert_equal(load(quantized_folder(name), "int8_activations"), expected)
    assert_equal(load(quantized_folder(name), [{"module_path": ".*", "act_qtype": "int8"}]), expected)
    with pytest.raises(ConfigError, match="for quantized checkpoints, and this one is not quantized"):
        load(untied, "int8_activations")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "rules",
    [
        *RULES.values(),
        [
            HEAD_AND_EMBEDDINGS,
            {"module_path": ".*", "weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "minmax"},
        ],
    ],
)
def test_a_checkpoint_of_odd_sizes_loads_bit_for_bit_as_quantized_online(untied, tmp_path, rules):
    quantize_checkpoint(untied, tmp_path / "q", parse_quantization(rules))
    assert_equal(load(tmp_path / "q"), load(untied, rules))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_short_name_loads_bit_for_bit_as_quantized_online(untied, tmp_path, name, tied):
    source = write_checkpoint(tmp_path / "tied", "qwen3", tie_word_embeddings=True) if tied else untied
    quantize_checkpoint(source, tmp_path / "q", parse_quantization(name))
    assert_equal(load(tmp_path / "q"), load(source, name))


def test_int8_activations_of_a_files_own_config(quantized_folder, untied, tmp_path):
    """A W8A8 checkpoint of another tool, which has no rules of ours."""
    w8a8 = [HEAD_AND_EMBEDDINGS, {"module_path": ".*", "weight_qtype": "int8", "act_qtype": "int8"}]
    quantize_checkpoint(untied, tmp_path / "w8a8", parse_quantization(w8a8))
    folder = variant(tmp_path / "foreign", tmp_path / "w8a8", jaxis_quantization=None)
    assert_equal(load(folder), load(untied, w8a8))


@pytest.mark.parametrize(
    "rules", ["int4", "none", [HEAD_AND_EMBEDDINGS, {"module_path": ".*", "weight_qtype": "int8", "tile_size": 32}]]
)
def test_rules_that_contradict_the_file_are_refused(quantized_folder, rules):
    with pytest.raises(ConfigError, match=r"q_proj is stored int8 with one group a row, but|embed_tokens is stored"):
        load(quantized_folder("int8"), rules)


@pytest.mark.sampled
@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_fp8_as_the_formats_library_describes_it(untied, tmp_path, preset):
    """The input stays as it is, which the file's `input_activations` allow."""
    group = json.loads(preset_name_to_scheme(preset, ["Linear"]).model_dump_json())
    config = CONFIG | {"format": "float-quantized", "config_groups": {"group_0": group | {"format": "float-quantized"}}}
    block = (128, 128) if preset == "FP8_BLOCK" else (1, None)
    fp8, wide = write_fp8(
        tmp_path, untied, block=block, scale_dtype=torch.bfloat16, scale_name="weight_scale", config=config
    )
    expected = transformers_logits(wide)
    for native in (False, kernels.usable()):
        actual = logits(load(fp8, native=native))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    if preset == "FP8_DYNAMIC":
        # What transformers makes of the file, where it says nothing of the input.
        config["config_groups"]["group_0"]["input_activations"] = None
        read = transformers_logits(variant(tmp_path / "no-activations", fp8, quantization_config=config))
        np.testing.assert_allclose(read, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    with pytest.raises(ConfigError, match=r"q_proj is stored in a format of .* and cannot be quantized again"):
        load(fp8, [HEAD_AND_EMBEDDINGS, {"module_path": ".*", "weight_qtype": "int8"}])


WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
    "ignore": ["lm_head"],
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("quant_method",), "aqlm", "is quantized by AQLM, which is not supported"),
        (("packing",), 1, "config.json has the key 'packing', which is not supported"),
        (("quantization_status",), "frozen", "quantization_status='frozen' is not supported"),
        (
            ("sparsity_config",),
            {"format": "sparse-24-bitmask"},
            "sparsity_config has the format 'sparse-24-bitmask', and sparse weights are not supported: use a",
        ),
        (("transform_config",), {"config_groups": {"R1": 1}}, "transform_config: R1 is 1, expected an object"),
        (
            ("transform_config",),
            {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["x"], "location": "input"}]}}},
            "R4 transforms activations .location='input'., which is not supported: use a checkpoint of the same model",
        ),
        (("config_groups",), {}, "has no config_groups"),
        (("format",), "fakequant", "format='fakequant' is not supported; known: int-quantized"),
        (("format",), "marlin-24", "format='marlin-24' is not supported: use a checkpoint .* that is not sparse"),
        (("format",), "sparse-bitmask", "format='sparse-bitmask' is not supported: use a checkpoint"),
        (("format",), "float-quantized", "weights: type='int' is not supported; supported: 'float'"),
        (("format",), "nvfp4-pack-quantized", "weights: type='int' is not supported; supported: 'float'"),
        (("format",), "mxfp8-quantized", "weights: type='int' is not supported; supported: 'float'"),
        (("config_groups", "group_0", "targets"), "Linear", "targets='Linear' must be a list of names"),
        (("config_groups", "group_0", "targets"), ["re:("], r"targets has '\(', which is not a regular expression"),
        (("ignore",), "lm_head", "ignore='lm_head' must be a list of names"),
        (("config_groups", "group_0", "weights"), 8, "weights is 8, expected an object"),
        (("config_groups", "group_0", "weights", "type"), "float", "weights: type='float' is not supported"),
        (("config_groups", "group_0", "weights", "num_bits"), 16, "num_bits=16 is not supported; supported: 1 to 8"),
        (("config_groups", "group_0", "weights", "strategy"), "block", "strategy='block' with group_size=None"),
        (("config_groups", "group_0", "weights", "strategy"), "group", "strategy='group' with group_size=None"),
        (("config_groups", "group_0", "weights", "dynamic"), True, "weights: dynamic=True is not supported"),
        (("config_groups", "group_0", "weights", "actorder"), "group", "weights: actorder='group' is not supported"),
        (("config_groups", "group_0", "weights", "actorder"), "column", "weights: actorder='column' is not supported"),
        (("config_groups", "group_0", "weights", "new"), 1, "weights has the key 'new', which is not supported"),
        (
            ("config_groups", "group_0", "input_activations"),
            {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False, "symmetric": True},
            "input_activations: strategy='channel' is not supported",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(path, value, message):
    config = copy.deepcopy(CONFIG)
    target = config
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(ConfigError, match=message) as caught:
        quantization_of_checkpoint(HFConfig({"quantization_config": config}), None)
    assert "\n" not in str(caught.value)


class Layer:
    weight_slots = (WeightSlot("weight", (8, 64), (None, None)),)


def test_names_come_before_classes_and_ignored_modules_before_both():
    int4 = {"targets": ["re:.*down_proj", "model.x"], "format": "pack-quantized", "weights": WEIGHTS | {"num_bits": 4}}
    config = copy.deepcopy(CONFIG)
    config["config_groups"]["group_1"] = int4
    config["ignore"] = ["lm_head", "re:.*gate"]
    found = {
        name: method and f"int{method.formats['weight'].integers.bits}"
        for name in ("a.q_proj", "a.down_proj", "model.x", "lm_head", "a.gate", "model.x.y")
        for method in [CompressedTensorsConfig(config).get_quant_method(Layer(), name)]
    }
    assert found == {
        "a.q_proj": "int8",
        "a.down_proj": "int4",
        "model.x": "int4",
        "lm_head": None,
        "a.gate": None,
        "model.x.y": "int8",
    }


def test_what_the_library_writes_today_is_understood():
    """Every key that its own classes write, at their defaults."""
    from compressed_tensors.quantization import QuantizationConfig

    written = QuantizationConfig(**CONFIG | {"kv_cache_scheme": None}).to_dict()
    written = json.loads(json.dumps(written, default=str))
    hf_config = HFConfig({"quantization_config": written})
    method = quantization_of_checkpoint(hf_config, None).get_quant_method(Layer(), "a.q_proj")
    assert method.formats["weight"].integers.scheme == WeightScheme("int8")
    assert hf_config.unread_keys() == []
