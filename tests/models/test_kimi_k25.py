"""Kimi K2.5, which also sees, as transformers saves it: the text is Kimi K2."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxis import LLM
from jaxis.errors import ConfigError
from tests.support.parity import FAMILIES

SIZES = {
    **{"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
    **{"num_experts_per_tok": 3, "moe_intermediate_size": 40},
}
SETTINGS = {"dtype": "float32", "kv_cache_memory": "2MiB", "show_progress": False}


def kimi_k25() -> transformers.PreTrainedModel:
    latent = next(family for family in FAMILIES if family.name == "Kimi K2").config
    config = transformers.Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **SIZES, **latent, "num_hidden_layers": 2},
        vision_config={
            **{"patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4, "hidden_size": 16, "intermediate_size": 24},
            **{"num_attention_heads": 2, "num_hidden_layers": 1},
        },
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )
    return transformers.Kimi_K25ForConditionalGeneration(config)


def test_the_text_of_kimi_k25_equals_transformers(tmp_path):
    torch.manual_seed(0)
    model = kimi_k25().float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(tmp_path)
    # transformers 5.23 saves some names of its own: `blocks` also in the text, `model.` of the projector.
    saved = load_file(tmp_path / "model.safetensors")
    blocks, layers = "language_model.model.blocks.", "language_model.model.layers."
    tensors = {name.replace(blocks, layers): saved[name] for name in saved if not name.startswith("model.")}
    tensors["mm_projector.proj.0.weight"] = np.zeros((2, 2), np.float32)
    assert {"language_model", "vision_tower", "mm_projector"} == {name.split(".")[0] for name in tensors}
    save_file(tensors, tmp_path / "model.safetensors")
    prompt = np.random.default_rng(0).integers(1, 130, 70).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    with LLM(tmp_path, **SETTINGS) as llm:
        for path in ("whole", "paged"):
            logits = llm.compute_logits(prompt, path=path)
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["model_type"] = "llama"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="has model_type='llama', expected 'kimi_k2' or 'deepseek_v3'"):
        LLM(tmp_path, **SETTINGS)
