"""Checkpoints with affine modules, which jaxis writes in MLX's format: against MLX, and against quantizing online."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import WeightScheme, quantize
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from jaxis.quantization.mlx_export import tensor_specs, tensors
from tests.support.dequantized import dequantize
from tests.support.quantized_models import assert_equal, load, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import variant, write_checkpoint

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MIXED = [
    {"module_path": ".*embed_tokens"},
    {"module_path": ".*o_proj", "weight_qtype": "int5", "tile_size": 64, "weight_calibration_method": "affine"},
    {
        **{"module_path": ".*down_proj|.*experts", "weight_qtype": "int6", "tile_size": 32, "act_qtype": "int8"},
        **{"weight_calibration_method": "affine"},
    },
    {"module_path": ".*q_proj", "weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "mse"},
    {"module_path": ".*", "weight_qtype": "int8", "tile_size": 32},
]
RULES = {"int4": "int4", "mixed": MIXED}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {
        "dense": write_checkpoint(root / "dense", "qwen3", tie_word_embeddings=False),
        "experts": write_checkpoint(root / "experts", "qwen3_moe", tokenizer=False, hidden_size=128, **EXPERTS),
    }


@pytest.fixture(scope="module")
def written(sources, tmp_path_factory):
    """(Kind of source, name of RULES) -> the quantized folder, made once."""
    root = tmp_path_factory.mktemp("written")

    def folder(kind, name):
        path = root / f"{kind}-{name}"
        if not path.exists():
            quantize_checkpoint(sources[kind], path, parse_quantization(RULES[name]))
        return path

    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("group_size", quick_rows([32, 64, 128], [64]))
@pytest.mark.parametrize(
    ("qtype", "method"),
    [("int8", "absmax"), ("int4", "affine"), ("int5", "affine"), ("int6", "affine"), ("int4", "mse")],
)
def test_mlx_dequantizes_to_the_same_numbers(qtype, method, group_size):
    weight = np.random.default_rng(0).standard_normal((13, 256)).astype(np.float32)
    scheme = WeightScheme(qtype, group_size, method)
    quantized = quantize(weight, scheme)
    ours = tensors("x", quantized)
    assert {name: (t.dtype, t.shape) for name, t in ours.items()} == {
        name: (spec.dtype, spec.shape) for name, spec in tensor_specs("x", weight.shape, scheme).items()
    }
    restored = mx.dequantize(
        mx.array(ours["x.weight"]),
        *(mx.array(ours[f"x.{name}"].astype(np.float32)) for name in ("scales", "biases")),
        group_size=group_size,
        bits=int(qtype.removeprefix("int")),
    )
    np.testing.assert_array_equal(np.asarray(restored), dequantize(quantized))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_it_loads_bit_for_bit_as_quantized_online(sources, written, kind, name, native):
    assert_equal(load(written(kind, name), native=native), load(sources[kind], RULES[name], native=native))


def test_the_settings_of_every_module_are_in_config_json(written):
    """Parameters as mlx-lm reads them: a module's own, or else the general ones."""
    for kind in ("dense", "experts"):
        folder = written(kind, "mixed")
        config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        assert "quantization_config" not in config
        settings = config["quantization"]
        assert settings["mode"] == "affine"
        for name in stored:
            if name.endswith(".scales"):
                module = name.removesuffix(".scales")
                path = re.sub(r"experts\.\d+", "switch_mlp", module)
                found = settings.get(path, settings)
                words = stored[f"{module}.weight"].shape[1]
                assert words * 32 == found["bits"] * stored[name].shape[1] * found["group_size"], module


def test_activations_can_be_chosen_when_loading(sources, written):
    def with_int8(rule):
        return rule | {"act_qtype": "int8"} if "weight_qtype" in rule else rule

    expected = load(sources["dense"], [with_int8(rule) for rule in MIXED])
    assert_equal(load(written("dense", "mixed"), "int8_activations"), expected)
    with pytest.raises(ConfigError, match="cannot be quantized again"):
        load(written("dense", "mixed"), "int8")


def test_calibrated_weights_are_written_in_place_of_others(sources, tmp_path):
    name, rng = "model.layers.1.mlp.up_proj", np.random.default_rng(3)
    shape = load_file(sources["dense"] / "model.safetensors")[f"{name}.weight"].shape
    other = quantize(rng.standard_normal(shape).astype(np.float32), WeightScheme("int4", 32, "affine", "int8"))
    quantize_checkpoint(sources["dense"], tmp_path / "q", parse_quantization("int4"), calibrated={name: other})
    ours, plain = values(load(tmp_path / "q")), values(load(sources["dense"], "int4"))
    np.testing.assert_array_equal(dequantize(ours[f"{name}.weight"]), dequantize(other))
    unchanged = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(dequantize(ours[unchanged]), dequantize(plain[unchanged]))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"weight_qtype": "int8"}, "q_proj has tile_size=None, which a checkpoint with affine modules cannot store"),
        ({"weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "minmax"}, "q_proj has .*'minmax'"),
    ],
)
def test_what_the_format_does_not_have_is_refused(sources, tmp_path, rule, message):
    affine = {"weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "affine"}
    rules = [{"module_path": ".*q_proj"} | rule, {"module_path": ".*k_proj"} | affine]
    with pytest.raises(ConfigError, match=message):
        quantize_checkpoint(sources["dense"], tmp_path / "q", parse_quantization(rules))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.0.self_attn.k_proj.biases", 1.5, "whose biases are not -128 times its scales"),
        ("model.layers.0.self_attn.o_proj.scales", 1.0039, "are not 8-bit codes times a power of two"),
    ],
)
def test_tensors_that_contradict_the_rules_are_refused(written, tmp_path, name, change, message):
    folder = variant(tmp_path / "broken", written("dense", "mixed"))
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    changed = stored[name].astype(np.float32)
    changed[0, 0] *= change
    save_file(stored | {name: changed}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(folder)
