"""Sizes told from headers, against the arrays of models that were loaded."""

import dataclasses
import itertools

import gguf
import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import pytest

from jaxis import LLM
from jaxis.bringup.analyze.construction import construct
from jaxis.bringup.analyze.source import open_source
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.module import named_parameters
from jaxis.layers.weight_bytes import stored_weights, weight_bytes
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.planning.layout import Layout
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.wrappers import PackingConfig
from jaxis.quantization_rules import SHORT_NAMES
from tests.quantization import test_awq, test_bitsandbytes, test_compressed_tensors_formats, test_hqq, test_torchao
from tests.quantization.foreign_quantizers import bitsandbytes_4bit, bitsandbytes_8bit, write_mlx, write_quantized
from tests.support.block_checkpoints import write_fp8, write_mxfp4
from tests.support.compressed_checkpoints import config_of, encoded_by, write_stored
from tests.support.gguf_models import write_gguf
from tests.support.plan_sources import published
from tests.support.quantized_models import load
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import LATENT_SIZES, write_checkpoint


def loaded_bytes(folder, rules=None):
    """Name -> bytes of each parameter of the model as XLA's platforms load it, without packing."""
    source = open_source(folder)
    config = construct(source.config, source.config_path, rules, source.tensors).vllm_config
    model_config = dataclasses.replace(config.model_config, model=str(folder))
    model = load_model(dataclasses.replace(config, model_config=model_config), make_mesh())
    parameters = {id(param): (name, param) for name, param in named_parameters(model)}.values()
    return {name: sum(a.nbytes for a in jax.tree.leaves(param.get_value())) for name, param in parameters}


def told_bytes(folder, rules=None):
    source = open_source(folder)
    model = construct(source.config, source.config_path, rules, source.tensors).model
    return {weight.name: weight.device_bytes for weight in stored_weights(model)}


@pytest.mark.parametrize(
    ("family", "quantization"),
    quick_rows(
        list(itertools.product(["qwen3", "qwen3_moe", "deepseek_v3", "llama4"], [None, "int8", "int4"])),
        [("qwen3", "int8"), ("deepseek_v3", "int4")],  # the latter has latents and experts
    ),
)
def test_every_parameter_is_as_large_as_when_it_is_loaded(checkpoint, tmp_path, family, quantization):
    def rules():
        return None if quantization is None else RuleQuantizationConfig(SHORT_NAMES[quantization], must_match=False)

    latent = family == "deepseek_v3"
    folder = write_checkpoint(tmp_path / "latent", family, **LATENT_SIZES) if latent else checkpoint(family)
    assert told_bytes(folder, rules()) == loaded_bytes(folder, rules())


# Formats whose scales are floats: a folder and a checkpoint -> the checkpoint quantized.
FLOAT_SCALES = {
    "HQQ": lambda folder, source: test_hqq.write(folder, source, test_hqq.packs(), test_hqq.HQQ),
    "AWQ gemv": lambda folder, source: test_awq.write(
        folder, source, test_awq.pack_gemv, test_awq.AWQ | {"version": "gemv"}
    ),
    "MLX": lambda folder, source: write_mlx(folder, source, group_size=32, dtype=mx.bfloat16),
    "torchao": lambda folder, source: test_torchao.write(folder, source, test_torchao.KINDS["int4"][0]),
    "nf4": lambda folder, source: write_quantized(folder, source, bitsandbytes_4bit, test_bitsandbytes.CONFIG_4),
    "LLM.int8": lambda folder, source: write_quantized(folder, source, bitsandbytes_8bit, test_bitsandbytes.CONFIG_8),
    **{
        name: lambda folder, source, scheme=scheme: write_stored(folder, source, encoded_by(scheme), config_of(scheme))
        for name, scheme in test_compressed_tensors_formats.SCHEMES.items()
        if name in ("int3", "W8A16", "int8 asymmetric", "FP8_DYNAMIC")
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", quick_rows(FLOAT_SCALES, ["HQQ", "MLX"]))
def test_scales_are_as_large_as_those_of_a_loaded_checkpoint(tmp_path, kind, native):
    sizes = {"hidden_size": 128, "intermediate_size": 512}  # rows that sizes grow from, and more
    source = write_checkpoint(tmp_path / "source", tokenizer=False, tie_word_embeddings=False, **sizes)
    quantized, _ = FLOAT_SCALES[kind](tmp_path, source)
    loaded = [param.get_value() for _, param in load(quantized, native=native).named_parameters()]
    config = HFConfig.from_folder(quantized)
    formats = quantization_of_checkpoint(config, None, TensorListing(quantized))
    model_config = ModelConfig(str(quantized), config, dtype=jnp.float32, max_model_len=64)
    vllm_config = VllmConfig(model_config, quant_config=PackingConfig(formats) if native else formats)
    abstract = construct_abstractly(vllm_config, check_config=False)
    assert weight_bytes(abstract, float_bytes=4) == sum(array.nbytes for array in jax.tree.leaves(loaded))


@pytest.mark.parametrize(
    ("kind", "quantization"), [("plain", None), ("plain", "int4"), ("Q5_0", None), ("Q5_0", "dequantize")]
)
def test_weights_are_as_large_as_in_an_engine(checkpoint, tmp_path, kind, quantization):
    """Packed ones too, where native kernels run."""
    model = checkpoint("qwen3")
    if kind != "plain":
        block_type = gguf.GGMLQuantizationType[kind]
        write_gguf(
            model,
            model := tmp_path / "model.gguf",
            quantize=lambda _, tensor: (
                (gguf.quants.quantize(tensor, block_type), block_type) if tensor.ndim > 1 else None
            ),
        )
    with LLM(model, quantization=quantization, max_num_seqs=1, max_model_len=64, show_progress=False) as llm:
        abstract = construct_abstractly(llm.engine.vllm_config, check_config=False)
        assert weight_bytes(abstract, float_bytes=4) == llm.weight_bytes


def test_blocks_that_the_rows_do_not_fill_are_counted(checkpoint, tmp_path):
    """600 rows are five blocks of 128, the last one cut off: more rows than the examples that sizes grow from."""
    source = write_checkpoint(tmp_path / "source", "qwen3", intermediate_size=600)
    low_precision, _ = write_fp8(tmp_path, source)
    told = told_bytes(low_precision)
    assert told == loaded_bytes(low_precision)
    assert told["model.layers.0.mlp.up_proj.weight"] == 600 * 64 + 5 * 1 * 4


def test_mxfp4_experts_are_half_a_byte_and_their_scales(checkpoint, tmp_path):
    low_precision, _ = write_mxfp4(tmp_path, checkpoint("gpt_oss"))
    assert told_bytes(low_precision) == loaded_bytes(low_precision)


def test_devices_share_what_their_number_divides(checkpoint):
    source = open_source(checkpoint("qwen3"))
    model = construct(source.config, source.config_path).model
    alone, shared = ({w.name: w for w in stored_weights(model, Layout(n).mesh())} for n in (1, 4))
    size = np.dtype(np.float32).itemsize
    assert alone["model.layers.0.self_attn.q_proj.weight"].device_bytes == 8 * 16 * 64 * size
    assert shared["model.layers.0.self_attn.q_proj.weight"].device_bytes == 8 * 16 * 64 * size // 4
    assert shared["model.layers.0.mlp.down_proj.weight"].device_elements == 64 * 96 // 4
    norm = "model.layers.0.input_layernorm.weight"
    assert shared[norm].device_bytes == alone[norm].device_bytes == 64 * size
    assert shared[norm].device_elements == 0, "a vector multiplies no matrix"


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_devices_share_tables_whose_rows_their_number_does_not_divide(checkpoint, quantization):
    source, layout = open_source(checkpoint("qwen3")), Layout(4)

    def told(vocab_size):
        rules = None if quantization is None else RuleQuantizationConfig(SHORT_NAMES[quantization], must_match=False)
        model = construct({**source.config, "vocab_size": vocab_size}, source.config_path, rules).model
        return stored_weights(model, layout.mesh()), weight_bytes(model, layout.mesh())

    assert told(515) == told(516)
    [table] = [weight for weight in told(513)[0] if weight.name == "model.embed_tokens.weight"]
    assert table.device_elements == 516 // 4 * 64
    assert table.device_bytes == 516 // 4 * 64 * (4 if quantization is None else 1 + 2 / 32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "num_devices", "projection", "heads"),
    [("qwen3-30b-a3b", 8, "k_proj", 1), ("qwen3-30b-a3b", 4, "k_proj", 1), ("phi-4", 20, "qkv_proj", 2 + 1 + 1)],
)
def test_devices_hold_whole_key_value_heads(name, num_devices, projection, heads):
    """4 heads on 8 devices and on 4; 40 query heads and 10 of keys and of values in one matrix, on 20."""
    source = published(name)
    model = construct(source.config, source.config_path).model
    sizes = {weight.name: weight for weight in stored_weights(model, Layout(num_devices).mesh())}
    held = sizes[f"model.layers.0.self_attn.{projection}.weight"]
    elements = heads * 128 * source.config["hidden_size"]
    assert (held.device_elements, held.device_bytes) == (elements, 2 * elements), "in bfloat16"
