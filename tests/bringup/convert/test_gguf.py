"""Conversion to GGUF and back: against transformers, the `gguf` package and, where it is installed, llama.cpp."""

import dataclasses
import errno
import json

import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from jaxis.bringup.convert import gguf_file
from jaxis.bringup.convert.from_gguf import convert_from_gguf
from jaxis.bringup.convert.to_gguf import convert_to_gguf
from jaxis.config import ModelConfig, VllmConfig
from jaxis.errors import CheckpointError, ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint
from tests.support import parity
from tests.support.llama_cpp_runs import run_llama_cpp
from tests.support.quick_rows import quick_rows
from tests.support.tiny_checkpoints import CHAT_TEMPLATE, VOCAB_SIZE, write_checkpoint, write_tokenizer

IDS = np.random.default_rng(0).integers(1, 360, 30).tolist()
_TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}
# What files of llama.cpp can say of a family, where its row for parity has something else.
SAYABLE = {
    "Gemma 2": {"attention_bias": False, "query_pre_attn_scalar": 32},
    "Gemma 3": {
        **{"attention_bias": False, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "sliding_window_pattern": 6},
        **_TWO_ROPES,
    },
    "GPT-OSS": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, **parity.rope(theta=150_000.0)},
    "Cohere 2": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "Llama 4": {
        **{"num_hidden_layers": 4, "no_rope_layer_interval": 4},
        **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    },
    "OLMo 2": {"attention_bias": False},
    "DeepSeek V3": {"rms_norm_eps": 1e-6},
    "Mixtral": {"sliding_window": None},
    "StarCoder2, window": {"sliding_window": None},
}
# Largest difference to transformers of llama.cpp, which has GELU in a table of float16.
LLAMA_CPP_LIMITS = {"Gemma 2": 2e-2, "Gemma 3": 5e-2, "StarCoder2, window": 1e-2}
NAMES = [
    *(
        "Llama 3.1",
        "Llama, biases",
        "Qwen2, tied",
        "Qwen3",
        "Mixtral",
        "Qwen3 MoE",
        "Phi-4-mini, partial longrope, tied",
    ),
    *("OLMo 2", "Gemma 2", "Gemma 3", "GLM-4-0414", "GLM-4.5 MoE", "Granite", "StarCoder2, window", "Cohere 2"),
    *("GPT-OSS", "Llama 4", "DeepSeek V3"),
]


def write_family(folder, name):
    """A folder with the family's tiny model and a tokenizer; returns transformers' model."""
    family = next(family for family in parity.FAMILIES if family.name == name)
    config = {**family.config, "vocab_size": VOCAB_SIZE, **SAYABLE.get(name, {})}
    model = parity.reference_model(dataclasses.replace(family, name=f"{name} in GGUF", config=config))
    parity.reference_model.cache_clear()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def reference_logits(model):
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0].float().numpy()


def load_reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def jaxis_logits(path):
    config = read_hf_config(path)
    model_config = ModelConfig(str(path), config, dtype=jnp.float32, max_model_len=64)
    model = load_model(VllmConfig(model_config, quant_config=quantization_of_checkpoint(config, None)), make_mesh())
    _, hidden, _ = model(None, jnp.asarray(IDS, jnp.int32), AttentionMetadata.for_whole_sequences((len(IDS),)))
    return np.asarray(model.compute_logits(hidden))


def tensors_of(folder):
    with Checkpoint(folder) as checkpoint:
        return {name: checkpoint.tensor(name) for name in checkpoint.names()}


# Whose tensors and keys are written as those of others.
SLOW = {"Llama, biases", "Mixtral", "GLM-4.5 MoE", "Granite", "StarCoder2, window", "Llama 4"}


@pytest.fixture(scope="module", params=quick_rows(NAMES, set(NAMES) - SLOW))
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    model = write_family(folder / "hf", request.param)
    convert_to_gguf(folder / "hf", folder / "model.gguf", "f32")
    return request.param, folder, reference_logits(model)


@pytest.mark.sampled(6)
def test_jaxis_gives_the_logits_of_the_original(family):
    _, folder, expected = family
    np.testing.assert_allclose(jaxis_logits(folder / "model.gguf"), expected, atol=1e-4)


def test_llama_cpp_gives_the_logits_of_the_original(family):
    name, folder, expected = family
    logits, _, _ = run_llama_cpp(folder / "model.gguf", IDS)
    np.testing.assert_allclose(logits, expected, atol=LLAMA_CPP_LIMITS.get(name, 1e-4))


@pytest.mark.sampled(3)
def test_back_again_it_is_the_same_checkpoint(family):
    name, folder, expected = family
    convert_from_gguf(folder / "model.gguf", folder / "back")
    before, after = tensors_of(folder / "hf"), tensors_of(folder / "back")
    assert before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype
        if name.startswith("Gemma") and "norm" in tensor:  # the file has 1 added, which rounds
            np.testing.assert_allclose(before[tensor], after[tensor], atol=2e-7)
        else:
            assert before[tensor].tobytes() == after[tensor].tobytes(), tensor
    np.testing.assert_allclose(reference_logits(load_reference(folder / "back")), expected, atol=1e-4)


@pytest.fixture
def bfloat16_folder(tmp_path):
    """A Llama model as it is published: all of it bfloat16."""
    folder = write_checkpoint(tmp_path / "hf", "llama", intermediate_size=128)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def test_a_bfloat16_checkpoint_stays_one(bfloat16_folder, tmp_path):
    convert_to_gguf(bfloat16_folder, tmp_path / "model.gguf")
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert stored["blk.0.attn_q.weight"] == stored["token_embd.weight"] == "BF16"
    assert stored["blk.0.attn_norm.weight"] == stored["output_norm.weight"] == "F32"
    convert_from_gguf(tmp_path / "model.gguf", tmp_path / "back")
    before, after = tensors_of(bfloat16_folder), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype == ml_dtypes.bfloat16 for name in before)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.sampled
@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
def test_llama_cpp_writes_the_same_answer(bfloat16_folder, tmp_path, outtype):
    convert_to_gguf(bfloat16_folder, tmp_path / "model.gguf", outtype)
    convert_from_gguf(tmp_path / "model.gguf", tmp_path / "back", "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    text = "the cat reads<|im_end|> the Straße 12"
    ids = tokenizer.encode(text)
    generated = load_reference(tmp_path / "back").generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    _, answer, tokens = run_llama_cpp(tmp_path / "model.gguf", ids, num_tokens=12, text=text)
    assert tokens == ids
    assert answer == generated[0, len(ids) :].tolist()


def test_q8_0_is_what_the_gguf_package_makes_of_it(bfloat16_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 640)
    convert_to_gguf(bfloat16_folder, tmp_path / "model.gguf", "q8_0")
    original = tensors_of(bfloat16_folder)["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = found["blk.1.ffn_down.weight"]
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(stored.data, gguf.quants.quantize(original, q8_0))
    notes = []
    convert_from_gguf(tmp_path / "model.gguf", tmp_path / "back", on_note=notes.append)
    back = tensors_of(tmp_path / "back")["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(back, gguf.quants.dequantize(stored.data, q8_0))
    assert any(
        "16 quantized tensors of 0.2 MB become float32, 0.6 MB; 0.6 MB will be written" in note for note in notes
    ), notes
    expected = reference_logits(load_reference(tmp_path / "back"))
    np.testing.assert_allclose(jaxis_logits(tmp_path / "model.gguf"), expected, atol=1e-3)


def test_rows_that_blocks_do_not_divide_are_float16(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", "llama", intermediate_size=72)
    convert_to_gguf(folder, tmp_path / "model.gguf", "q8_0")
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert (stored["blk.0.ffn_down.weight"], stored["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_type_can_be_chosen(bfloat16_folder, tmp_path, dtype):
    convert_to_gguf(bfloat16_folder, tmp_path / "model.gguf", "f16")
    convert_from_gguf(tmp_path / "model.gguf", tmp_path / "back", dtype)
    assert {tensor.dtype.name for tensor in tensors_of(tmp_path / "back").values()} == {dtype}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype


def test_settings_and_templates_survive(bfloat16_folder, tmp_path):
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [372, 370]}
    (bfloat16_folder / "generation_config.json").write_text(json.dumps(settings))
    (bfloat16_folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (bfloat16_folder / "additional_chat_templates").mkdir()
    (bfloat16_folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    convert_to_gguf(bfloat16_folder, tmp_path / "model.gguf")
    convert_from_gguf(tmp_path / "model.gguf", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert {key: back[key] for key in settings} == {**settings, "eos_token_id": [370, 372]}
    first, second = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "back"))
    messages = [{"role": "user", "content": "the cat"}]
    assert first.apply_chat_template(messages) == second.apply_chat_template(messages)
    assert (tmp_path / "back" / "additional_chat_templates" / "rag.jinja").read_text() == "{{ documents }}"
    assert (second.eos_token, second.pad_token) == (first.eos_token, first.pad_token)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "which has no key for all that the model has: sliding_window is 8",
        ),
        ("qwen3", {"attention_bias": True}, "of the architecture qwen3 have no biases"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type 'dynamic'"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path, name, config, message):
    folder = write_checkpoint(tmp_path / "hf", name, **config)
    with pytest.raises(ConfigError, match=message):
        convert_to_gguf(folder, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf"))


def test_what_llama_cpp_does_otherwise_is_said(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", "mistral", sliding_window=8)
    notes = []
    convert_to_gguf(folder, tmp_path / "model.gguf", on_note=notes.append)
    assert notes == ["llama.cpp does not apply the sliding window of 8 tokens to this model"]


def test_values_that_float16_cannot_hold_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = 1e6
    model.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"ffn_up.weight has a value of 999424, .*--outtype bf16 or f32"):
        convert_to_gguf(folder, tmp_path / "model.gguf", "f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("destination", "message"),
    [("hf", "already exists"), ("model.bin", "does not end in .gguf"), ("no/model.gguf", "make it first")],
)
def test_bad_destinations_are_refused(tmp_path, destination, message):
    folder = write_checkpoint(tmp_path / "hf", "llama")
    with pytest.raises(CheckpointError, match=message):
        convert_to_gguf(folder, tmp_path / destination)


def test_a_file_that_is_gguf_already_is_refused(bfloat16_folder, tmp_path):
    convert_to_gguf(bfloat16_folder, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="already a GGUF file"):
        convert_to_gguf(tmp_path / "model.gguf", tmp_path / "other.gguf")


def test_of_a_multimodal_checkpoint_the_text_model_is_written(tmp_path):
    text = write_family(tmp_path / "text", "Gemma 3")
    vision = {
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 14},
    }
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=500
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    convert_to_gguf(tmp_path / "hf", tmp_path / "model.gguf", "f32")
    np.testing.assert_allclose(jaxis_logits(tmp_path / "model.gguf"), reference_logits(text), atol=1e-4)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_half_written(bfloat16_folder, tmp_path, monkeypatch, error):
    written = []

    def write(self, tensor, *_):
        written.append(tensor)
        if len(written) > 5:
            raise error

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", write)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as raised:
        convert_to_gguf(bfloat16_folder, tmp_path / "model.gguf")
    if isinstance(error, OSError):
        assert str(raised.value) == f"{tmp_path / 'model.gguf'} cannot be written: No space left on device"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
