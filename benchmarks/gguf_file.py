"""Writes a checkpoint's weights as a GGUF file, which is what llama.cpp reads, and quantizes such files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import llama_cpp
import ml_dtypes
import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint import Checkpoint

ARCHITECTURES = {"Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3}
FILE_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
_QUIET = llama_cpp.llama_log_callback(lambda *_: None)


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Writes a checkpoint as it is, matrices in bfloat16 and vectors in float32, without a tokenizer.

    Args:
      checkpoint: Folder in Hugging Face format.
      file: Is made.

    Raises:
      CheckpointError: The family, or a tensor, is not known here.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    [name] = config["architectures"]
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{checkpoint} is a {name}, and llama.cpp is compared on {', '.join(ARCHITECTURES)} only: leave it out"
        )
    architecture = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    head_dim = config["head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    with Checkpoint(checkpoint) as tensors:
        for tensor_name, tensor in tensors.iterate():
            gguf_name = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
            if gguf_name is None:
                raise CheckpointError(f"{checkpoint}: tensor {tensor_name!r} has no name in GGUF")
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name, tensor.astype(np.float32))
            else:
                narrow = np.ascontiguousarray(tensor.astype(ml_dtypes.bfloat16)).view(np.uint8)
                writer.add_tensor(gguf_name, narrow, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def quantize_gguf(source: Path, target: Path, quantization: str) -> None:
    """Quantizes a GGUF file as llama.cpp's own tool does by default.

    Args:
      source: From `write_gguf`.
      target: Is made.
      quantization: One of FILE_TYPES.

    Raises:
      OSError: llama.cpp cannot.
    """
    llama_cpp.llama_log_set(_QUIET, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[quantization]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise OSError(f"llama.cpp cannot quantize {source} to {quantization}")


def _rope_theta(config: dict) -> float:
    return config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
