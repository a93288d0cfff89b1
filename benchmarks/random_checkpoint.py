"""Writes a checkpoint folder with random weights, so that a real-sized model can be measured without a download.

python benchmarks/random_checkpoint.py FOLDER
python benchmarks/random_checkpoint.py FOLDER --shape qwen3-1.7b
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import construct_model
from jaxis.models.registry import get_model_class

# The shapes of Qwen/Qwen3-0.6B and Qwen3-1.7B, as their config.json give them, and others in their manner.
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


# Of Qwen/Qwen3.5-0.8B, as far as they decide its speed.
_QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "hidden_act": "silu",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(24)],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "attn_output_gate": True,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _qwen3(
    num_hidden_layers: int, hidden_size: int, intermediate_size: int, num_attention_heads: int
) -> dict[str, Any]:
    return _QWEN3 | {
        "num_hidden_layers": num_hidden_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_attention_heads,
    }


SHAPES = {
    "qwen3-0.2b": _qwen3(14, 768, 2304, 8),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16),
    "qwen3.5-0.8b": _QWEN3_5,
    # Full attention in each layer, and per token as many bytes as qwen3.5-0.8b with its states, read and written.
    "qwen3-0.8b": _qwen3(24, 1024, 5120, 16) | {"vocab_size": 248_320},
    # In the manner of Qwen3-30B-A3B: 1.5 billion parameters, of which a token uses 0.5.
    "qwen3-moe-1.5b": _qwen3(24, 1024, 2048, 16)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # In the manner of DeepSeek V2 Lite, with all of its latent attention: 1.7 billion parameters, of which a token
    # uses 0.6.
    "deepseek-v2-1.7b": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102_400,
        "hidden_size": 1024,
        "intermediate_size": 5472,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "rope_theta": 10_000,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 512,
        "n_routed_experts": 32,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "torch_dtype": "bfloat16",
    },
}
WEIGHT_SCALE = 0.02
NOISE_ELEMENTS = 1 << 22


def write_random_checkpoint(folder: Path, config: dict[str, Any], *, seed: int = 0) -> None:
    """Writes config.json and model.safetensors, bfloat16, with the names and shapes of jaxis's own model class.

    Experts stand one by one, as `experts.3.gate_proj.weight`.

    Args:
      folder: Is made.
      config: What to write as config.json.
      seed: Of the weights.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    vllm_config = VllmConfig(ModelConfig(str(folder), HFConfig(config)))
    model_class = get_model_class(config["architectures"])
    model = nnx.eval_shape(lambda: construct_model(model_class, vllm_config))
    parameters = {name: param.get_value().shape for name, param in model.named_parameters()}
    shapes = {name: shape for stack in parameters.items() for name, shape in _tensors_of(*stack)}

    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    # Drawing each weight would take longer than the benchmark: tensors start at different places of one noise.
    random = np.random.default_rng(seed)
    noise = (random.standard_normal(NOISE_ELEMENTS, np.float32) * WEIGHT_SCALE).astype(ml_dtypes.bfloat16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            if name.endswith("norm.weight"):
                values = np.ones(size, ml_dtypes.bfloat16)
            else:
                values = np.resize(np.roll(noise, random.integers(NOISE_ELEMENTS)), size)
            file.write(values.tobytes())


def _tensors_of(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A checkpoint's names and shapes of what is in a parameter."""
    module, _, stack = name.rpartition(".")
    if module.endswith(".experts"):
        for expert in range(shape[0]):
            yield f"{module}.{expert}.{stack}.weight", shape[1:]
    else:
        yield name, shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists already: give another folder")
    write_random_checkpoint(arguments.folder, SHAPES[arguments.shape])


if __name__ == "__main__":
    main()
