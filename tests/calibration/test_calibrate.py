"""Calibrated checkpoints load, and are closer to their sources than those that were only rounded."""

import json

import numpy as np
import pytest
import torch
import transformers

from jaxis.calibration.calibrate import calibrate
from jaxis.errors import RequestError
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from jaxis.tokenizer import Tokenizer
from tests.support.quantized_models import load, logits, values
from tests.support.tiny_checkpoints import write_tokenizer

SIZES = {
    **{"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
# Experts that each have a tensor of its own, under two names, and experts in one tensor, with biases.
FAMILIES = {
    "dense, tied": ("Qwen3Config", {"num_hidden_layers": 1, "intermediate_size": 96, "tie_word_embeddings": True}),
    "Qwen3 MoE": (
        "Qwen3MoeConfig",
        {"num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 96, "num_experts_per_tok": 2},
    ),
    "Mixtral": (
        "MixtralConfig",
        {"num_hidden_layers": 1, "num_local_experts": 4, "intermediate_size": 96, "num_experts_per_tok": 2},
    ),
    "GPT-OSS": (
        "GptOssConfig",
        {"num_hidden_layers": 1, "num_local_experts": 4, "intermediate_size": 96, "num_experts_per_tok": 2},
    ),
}
# Embeddings of layers, and keys and values that layers share.
LAYER_EMBEDDINGS = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"sliding_window": 11, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 500},
    **{"intermediate_size": 96, "tie_word_embeddings": True},
}
FAMILIES |= {
    "Gemma 3n": (
        "Gemma3nTextConfig",
        LAYER_EMBEDDINGS
        | {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "altup_num_inputs": 2, "laurel_rank": 32},
    ),
    "Gemma 4": ("Gemma4TextConfig", LAYER_EMBEDDINGS | {"global_head_dim": 32, "vocab_size_per_layer_input": 512}),
}
RULES = [
    {
        "module_path": r".*(_proj|\.experts)",
        "weight_qtype": "int4",
        "tile_size": 32,
        "weight_calibration_method": "affine",
    }
]


def write_model(folder, family):
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def letters(seed, count):
    rng = np.random.default_rng(seed)
    return "".join(rng.choice([*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789.,"], count))


def write_text(path):
    path.write_text("".join(json.dumps({"text": letters(seed, 1500)}) + "\n" for seed in range(4)))
    return path


def divergence(source, folder):
    ids = Tokenizer.from_path(source).encode(letters(100, 300))
    p, q = (np.asarray(logits(load(each), ids), np.float64) for each in (source, folder))
    p, q = (x - np.logaddexp.reduce(x, axis=-1)[:, None] for x in (p, q))
    return (np.exp(p) * (p - q)).sum(-1).mean()


# Experts, whose calibration test_sensitivity.py has too; and much to compile.
SLOW = ("Gemma 3n", "Gemma 4", "Mixtral", "Qwen3 MoE", "GPT-OSS")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.slow] * (family in SLOW)) for family in FAMILIES]
)
def test_a_calibrated_checkpoint_is_closer_to_its_source(family, tmp_path):
    source = write_model(tmp_path / "source", family)
    rules = parse_quantization(RULES)
    weights = calibrate(source, write_text(tmp_path / "text.jsonl"), rules, num_tokens=2048)
    quantize_checkpoint(source, tmp_path / "plain", rules)
    quantize_checkpoint(source, tmp_path / "calibrated", rules, calibrated=weights)
    assert divergence(source, tmp_path / "calibrated") < 0.75 * divergence(source, tmp_path / "plain")
    plain, calibrated = (values(load(tmp_path / name)) for name in ("plain", "calibrated"))
    assert {name: type(value) for name, value in plain.items()} == {n: type(v) for n, v in calibrated.items()}
    for name, value in plain.items():
        if "_proj" in name and hasattr(value, "codes"):
            assert not np.array_equal(value.codes, calibrated[name].codes), name


def test_each_module_is_calibrated_at_its_own_width(tmp_path):
    source = write_model(tmp_path / "source", "dense, tied")
    rules = parse_quantization(
        [
            {"module_path": r".*\.q_proj"},
            {"module_path": r".*\.k_proj", "weight_qtype": "int8", "tile_size": 32},
            {"module_path": r".*_proj", "weight_qtype": "int6", "tile_size": 32, "weight_calibration_method": "affine"},
        ]
    )
    weights = calibrate(source, write_text(tmp_path / "text.jsonl"), rules, num_tokens=2048)
    layer = "model.layers.0.self_attn."
    assert f"{layer}q_proj" not in weights
    assert weights[f"{layer}k_proj"].qtype == "int8"
    assert weights[f"{layer}v_proj"].bits == 6


def test_text_that_cannot_be_used_is_an_error_before_the_model_is_read(tmp_path):
    source = write_model(tmp_path / "source", "dense, tied")
    (source / "model.safetensors").unlink()
    (tmp_path / "text.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(RequestError, match="tokens; it needs 2048 or more"):
        calibrate(source, tmp_path / "text.jsonl", parse_quantization("int4"))
