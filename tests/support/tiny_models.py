"""Tiny model classes and checkpoint folders for the loader's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxis.config import LoadConfig, ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.module import JaxModule
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.parallel.stages import WHOLE, Stage

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of LLAMA as its checkpoint holds them."""
    shapes = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {
            f"{layer}.input_layernorm.weight": (8,),
            f"{layer}.post_attention_layernorm.weight": (8,),
            f"{layer}.self_attn.q_proj.weight": (8, 8),
            f"{layer}.self_attn.k_proj.weight": (4, 8),
            f"{layer}.self_attn.v_proj.weight": (4, 8),
            f"{layer}.self_attn.o_proj.weight": (8, 8),
            f"{layer}.mlp.gate_proj.weight": (12, 8),
            f"{layer}.mlp.up_proj.weight": (12, 8),
            f"{layer}.mlp.down_proj.weight": (8, 12),
        }
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    write_config(folder, config)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(
    folder: Path,
    *,
    dtype: Any = jnp.float32,
    hf_overrides: dict[str, Any] | None = None,
    load_format: str = "auto",
    seed: int = 0,
    quant_config: Any = None,
    stage: Stage = WHOLE,
) -> JaxModule:
    model_config = ModelConfig(
        str(folder), HFConfig.from_folder(folder, hf_overrides), dtype=dtype, max_model_len=64, seed=seed
    )
    vllm_config = VllmConfig(model_config, load_config=LoadConfig(load_format=load_format), quant_config=quant_config)
    return load_model(vllm_config, make_mesh(), stage=stage)
