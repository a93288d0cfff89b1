"""Checkpoints quantized by MLX, or only converted by it, end to end."""

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest
from safetensors.torch import load_file

from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import BlockScaledWeight, CodedWeight
from tests.quantization.foreign_quantizers import write_mlx
from tests.support.block_checkpoints import assert_logits, transformers_logits
from tests.support.dequantized import dequantize
from tests.support.quantized_models import IDS, assert_equal, load, logits, values
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import variant, write_checkpoint

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODES = {
    "affine 4": {"group_size": 64},
    "affine 6": {"bits": 6, "group_size": 32},
    "mixed": {"bits": lambda module: 6 if module.endswith(("v_proj", "down_proj", "lm_head")) else 3, "group_size": 64},
    "mxfp4": {"mode": "mxfp4", "group_size": 32},
    "mxfp8": {"mode": "mxfp8", "bits": 8, "group_size": 32},
    "nvfp4": {"mode": "nvfp4", "group_size": 16},
}
SIZES = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "qwen3", tokenizer=False, **SIZES)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sparse") / "moe", "qwen3_moe", tokenizer=False, **SIZES, **EXPERTS)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "mode"),
    quick_rows(
        itertools.product(["dense with a tied head", "experts"], MODES),
        [*(("dense with a tied head", mode) for mode in ("affine 4",)), ("experts", "mixed")],
    ),
)
def test_logits_are_those_of_the_weights_that_the_file_stands_for(source, sparse, tmp_path, kind, mode):
    quantized, wide = write_mlx(tmp_path, sparse if kind == "experts" else source, **MODES[mode])
    assert_low_precision_weights(assert_logits(quantized, wide), load_file(wide / "model.safetensors"))


def assert_low_precision_weights(model, expected):
    """Projections, embeddings and the head are held as the file has them, and stand for these weights."""
    for name, weight in values(model).items():
        is_quantized = name.endswith(("_proj.weight", "_proj", "embed_tokens.weight", "lm_head.weight"))
        assert isinstance(weight, CodedWeight | BlockScaledWeight) == is_quantized, name
        array = np.asarray(dequantize(weight))
        if array.ndim == 3:
            stack = name.rpartition(".")[2]
            names = [name.removesuffix(stack) + f"{expert}.{stack}.weight" for expert in range(len(array))]
            np.testing.assert_array_equal(array, np.stack([expected[each] for each in names]), err_msg=name)
        else:
            # A router is dequantized when it is loaded, where a product and a sum may be rounded as one.
            np.testing.assert_allclose(
                array, expected[name], rtol=0 if is_quantized else 1e-6, atol=0 if is_quantized else 1e-7
            )


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_unquantized_files_of_mlx_load(source, sparse, tmp_path, kind):
    original = sparse if kind == "experts" else source
    quantized, _ = write_mlx(tmp_path, original, names="none", quantization=None, quantization_config=None)
    with (quantized / "config.json").open() as file:
        assert "quantization" not in json.load(file)
    assert_equal(load(quantized), load(original))


def test_old_files_have_only_one_of_the_objects(source, tmp_path):
    quantized, wide = write_mlx(tmp_path, source, quantization_config=None)
    expected = transformers_logits(wide, IDS)
    np.testing.assert_allclose(logits(load(quantized)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_shards_are_indexed_by_mlxs_names(sparse, tmp_path):
    quantized, _ = write_mlx(tmp_path / "one", sparse)
    tensors = mx.load(str(quantized / "model.safetensors"))
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    folder = variant(
        tmp_path / "two", quantized, files={"model.safetensors": None, "model.safetensors.index.json": index}
    )
    for file, half in halves.items():
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in half}, metadata={"format": "mlx"})
    assert_equal(load(folder), load(quantized))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up_proj.scales": None}, r"up_proj.weight' has shape \[192, 16\] in the checkpoint, \[192, 128\]"),
        (
            {"up_proj.biases": None},
            r"up_proj has 128 features, which weight \[192, 16\] with float32 scales \[192, 2\] do n",
        ),
        ({"up_proj.scales": lambda t: t[:, :1]}, r"up_proj.biases' has shape \[192, 2\] in the checkpoint, \[192, 1\]"),
        (
            {"up_proj.weight": lambda t: t[:, :15]},
            r"which weight \[192, 15\] with float32 scales \[192, 2\] do not match",
        ),
        ({"up_proj.scales": lambda t: t * mx.inf}, "up_proj has a weight whose scales or biases are not all finite"),
        ({"up_proj.global_scale": lambda _: mx.array(1.0)}, "has a global_scale, which is not supported"),
    ],
)
def test_tensors_that_do_not_fit_are_named(source, tmp_path, change, message):
    quantized, _ = write_mlx(tmp_path / "whole", source)
    tensors = mx.load(str(quantized / "model.safetensors"))
    for name, function in change.items():
        full_name = f"model.layers.0.mlp.{name}"
        tensor = tensors.pop(full_name, None)
        if function is not None:
            tensors[full_name] = mx.contiguous(function(tensor))
    folder = variant(tmp_path / "changed", quantized, files={"model.safetensors": None})
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"bits": 4, "group_size": 64, "mode": "nf3"},
            "mode='nf3' is not supported; known: affine, mxfp4, mxfp8, nvfp4",
        ),
        ({"bits": 7, "group_size": 64}, "bits=7 with group_size=64 is not supported"),
        ({"bits": 4, "group_size": "64"}, "bits=4 with group_size='64' is not supported"),
    ],
)
def test_settings_that_are_not_supported_are_named(source, tmp_path, quantization, message):
    quantized, _ = write_mlx(tmp_path, source, quantization_config=quantization)
    with pytest.raises(ConfigError, match=message):
        load(quantized)
