"""BitNet's checkpoints, packed, with floats -1, 0 and 1, and of training, against transformers' own linear layers."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

from jaxis.config import ModelConfig, VllmConfig
from jaxis.errors import ConfigError
from jaxis.kernels.weights import TokenQuantizedWeight, matmul, pack
from jaxis.loading.gguf_block_types import TYPE_OF_NAME
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from jaxis.quantization.checkpoints.bitnet import BitNetQuantizationConfig
from jaxis.quantization.formats.bitnet import BitNetFormat, ternary_weight
from jaxis.quantization.formats.gguf import GGUFFormat
from tests.support.block_checkpoints import replace_tensors, write_model
from tests.support.dequantized import dequantize
from tests.support.gguf_models import write_gguf
from tests.support.quantized_models import IDS, load, logits, values

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.BitNetConfig(**SIZES, num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True)
    return write_model(tmp_path_factory.mktemp("bitnet"), config)


def ternary_of(weight):
    return torch.clamp(torch.round(weight / weight.abs().mean()), -1, 1)


def is_linear(name):
    return name.endswith("_proj.weight")


def quantized(folder, source, kind):
    """A copy of the checkpoint, and the linear layer of transformers that computes with its tensors."""
    changed = load_file(source / "model.safetensors")
    for name, weight in [each for each in changed.items() if is_linear(each[0])]:
        scale = weight.abs().mean().reshape(1)
        if kind != "online":
            ternary = ternary_of(weight)
            changed[name] = ternary if kind == "floats" else pack_weights(ternary.clone())
            changed[f"{name}_scale"] = 1 / scale if kind == "bitlinear" else scale
    how = {
        "quant_method": "bitnet",
        "linear_class": "bitlinear" if kind == "bitlinear" else "autobitlinear",
        "quantization_mode": "online" if kind == "online" else "offline",
    }
    return replace_tensors(folder, source, changed, quantization_config=how)


def reference_logits(folder, source, kind):
    """The reference's model with its own linear layers; its loader needs another package."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            size = module.in_features, module.out_features
            if kind == "bitlinear":
                new = BitLinear(*size, False, dtype=torch.float32)
                new.weight = tensors[f"{name}.weight"]
            else:
                new = AutoBitLinear(*size, False, dtype=torch.float32, online_quant=kind == "online")
                weight = tensors[f"{name}.weight"]
                new.weight = torch.nn.Parameter(ternary_of(module.weight) if weight.dtype == torch.uint8 else weight)
            if kind != "online":
                new.weight_scale = tensors[f"{name}.weight_scale"]
            model.set_submodule(name, new)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear", "floats", "online"])
def test_logits_are_those_of_the_reference(kind, source, tmp_path):
    folder = quantized(tmp_path / kind, source, kind)
    expected = reference_logits(folder, source, kind)
    for native in (False, True):
        model = load(folder, native=native)
        weight = values(model)["model.layers.0.mlp.up_proj.weight"]
        assert isinstance(weight, TokenQuantizedWeight)
        assert weight.is_packed == native
        np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_dequantized_weights_are_ternary_times_the_scale(source, tmp_path):
    folder = quantized(tmp_path / "packed", source, "autobitlinear")
    tensors, stored = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    loaded = values(load(folder, "dequantize"))
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = ternary_of(tensors[name]) * stored[f"{name}_scale"]
    np.testing.assert_array_equal(np.asarray(loaded[name]), expected.numpy())


@pytest.mark.parametrize("size", [(64, 32), (96, 128), (2560, 40)])
def test_products_are_sums_of_whole_numbers_and_batch_invariant(size):
    """In the native kernels, which take two bits a weight, and in XLA, and for a row alone as among others."""
    columns, rows = size
    random = np.random.default_rng(0)
    ternary = random.integers(-1, 2, (rows, columns))
    x = random.normal(size=(33, columns)).astype(np.float32) * np.exp(random.normal(size=(33, 1))).astype(np.float32)
    x[7] = 0
    scale = np.float32(127) / np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-5))
    integers = np.rint(x * scale).astype(np.int64)
    expected = (integers @ ternary.T) / scale.astype(np.float64) * np.float32(0.37)
    weight = ternary_weight((ternary + 1).astype(np.uint8), 0.37)
    packed = pack(weight)
    assert isinstance(packed, TokenQuantizedWeight)
    assert packed.is_packed
    assert packed.nbytes < 2.6 * -(-rows // 32) * 32 * columns / 8 + 8 * rows
    for each in (weight, packed):
        np.testing.assert_allclose(np.asarray(jax.jit(matmul)(x, each)), expected, rtol=2e-6, atol=1e-30)
    together = np.asarray(jax.jit(matmul)(x, packed))
    for row in (0, 5, 7, 32):
        np.testing.assert_array_equal(np.asarray(jax.jit(matmul)(x[row : row + 1], packed))[0], together[row])


def test_derivatives_are_those_of_unrounded_inputs():
    ternary = np.random.default_rng(0).integers(-1, 2, (24, 32))
    weight, x = ternary_weight((ternary + 1).astype(np.uint8), 0.5), jnp.linspace(-1, 3, 32)[None]
    for each in (weight, pack(weight)):
        np.testing.assert_allclose(
            np.asarray(jax.grad(lambda x, each=each: matmul(x, each).sum())(x))[0], 0.5 * ternary.sum(0), atol=1e-6
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [({"use_rms_norm": True}, "use_rms_norm=True is not supported"), ({"group": 3}, "the key 'group'")],
)
def test_what_is_not_implemented_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        BitNetQuantizationConfig({"quant_method": "bitnet"} | change, None)


def test_values_that_are_not_ternary_are_refused():
    tensors = {"weight": np.full((1, 8), 255, np.uint8), "weight_scale": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match="values other than -1, 0 and 1"):
        BitNetFormat().assemble(tensors, (4, 8))


def test_i2_s_rows_are_the_ternary_numbers_of_the_file():
    """The layout of bitnet.cpp's converter: 128 numbers in 32 bytes, the first 32 of them in the highest bits."""
    ternary = np.random.default_rng(0).integers(-1, 2, (5, 256))
    numbers = (ternary + 1).astype(np.uint8).reshape(5, 2, 4, 32)
    rows = numbers[:, :, 0] << 6 | numbers[:, :, 1] << 4 | numbers[:, :, 2] << 2 | numbers[:, :, 3]
    tensors = {"weight": rows.reshape(5, -1), "scale": np.float32([0.25])}
    weight = GGUFFormat(TYPE_OF_NAME["I2_S"], has_scale=True).assemble(tensors, (5, 256))
    assert isinstance(weight, TokenQuantizedWeight)
    np.testing.assert_array_equal(np.asarray(dequantize(weight)), 0.25 * ternary)


@pytest.mark.parametrize("architecture", ["bitnet", "bitnet-b1.58"])
def test_a_file_of_bitnet_cpp_gives_the_logits_of_the_packed_checkpoint(architecture, tmp_path, monkeypatch):
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256}
    config = transformers.BitNetConfig(**sizes, num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True)
    source = write_model(tmp_path / "source", config)
    original = gguf.GGUFWriter.add_tensor

    def add_tensor(writer, name, tensor, raw_shape=None, raw_dtype=None):
        if tensor.ndim < 2 or "token_embd" in name:
            return original(writer, name, tensor, raw_shape, raw_dtype)
        four = (ternary_of(torch.tensor(tensor)).numpy() + 1).astype(np.uint8).reshape(-1, 4, 32)
        codes = four[:, 0] << 6 | four[:, 1] << 4 | four[:, 2] << 2 | four[:, 3]
        scale = np.zeros(8, np.float32)
        scale[0] = np.abs(tensor).mean()
        stored = np.concatenate([codes.ravel(), scale.view(np.uint8)]).view(np.int8)  # of no type of llama.cpp's
        return original(writer, name, stored, tensor.shape, 36)

    of_key = gguf.GGUFWriter.add_key_value

    def add_key_value(writer, key, value, *types, **more):
        value = architecture if value == "bitnet" else value
        return of_key(writer, key.replace("bitnet.", f"{architecture}."), value, *types, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", add_key_value)
    path = tmp_path / "model.gguf"
    write_gguf(source, path)
    hf_config = read_hf_config(path)
    assert hf_config["hidden_act"] == "relu2"
    model_config = ModelConfig(str(path), hf_config, dtype=jnp.float32, max_model_len=64)
    model = load_model(VllmConfig(model_config, quant_config=quantization_of_checkpoint(hf_config, None)), make_mesh())
    expected = logits(load(quantized(tmp_path / "packed", source, "autobitlinear")))
    np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
