"""Writes a checkpoint's weights as a GGUF file, which is what llama.cpp reads, and quantizes such files."""

from __future__ import annotations

import ctypes
import json
import struct
from pathlib import Path

import gguf
import llama_cpp
import ml_dtypes
import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint import Checkpoint

ARCHITECTURES = {"Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3, "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35}
FILE_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q4_1": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "iq4_nl": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
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
    if architecture == gguf.MODEL_ARCH.QWEN35:
        _add_gated_delta_net(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    with Checkpoint(checkpoint) as tensors:
        for tensor_name, tensor in tensors.iterate():
            gguf_name = names.get_name(_name_for_gguf(tensor_name), try_suffixes=(".weight", ".bias"))
            if gguf_name is None:
                raise CheckpointError(f"{checkpoint}: tensor {tensor_name!r} has no name in GGUF")
            if tensor_name.endswith(".A_log"):
                tensor = -np.exp(tensor.astype(np.float32))
            if tensor.ndim == 1 or "conv1d" in tensor_name:
                writer.add_tensor(gguf_name, np.squeeze(tensor.astype(np.float32)))
            else:
                low_precision = np.ascontiguousarray(tensor.astype(ml_dtypes.bfloat16)).view(np.uint8)
                writer.add_tensor(gguf_name, low_precision, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _add_gated_delta_net(writer: gguf.GGUFWriter, config: dict) -> None:
    """Adds the sizes of Qwen3.5's linear layers and of its partial rope."""
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(value_heads)
    writer.add_ssm_inner_size(value_heads * value_dim)
    writer.add_full_attention_interval(config["full_attention_interval"])
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])


def _name_for_gguf(name: str) -> str:
    """A tensor's name as the table of the `gguf` package has it."""
    return name.replace(".dt_bias", ".dt_proj.bias")


def quantize_gguf(source: Path, target: Path, quantization: str, importance: Path | None = None) -> None:
    """Quantizes a GGUF file as llama.cpp's own tool does by default.

    Args:
      source: From `write_gguf`, or another whose weights are not quantized.
      target: Is made.
      quantization: One of FILE_TYPES.
      importance: An importance matrix in the format `dat` of llama.cpp's `llama-imatrix`.

    Raises:
      OSError: llama.cpp cannot.
    """
    llama_cpp.llama_log_set(_QUIET, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[quantization]
    if importance is not None:
        matrix = read_importance(importance)  # llama.cpp reads its memory
        entries = [
            llama_cpp.llama_model_imatrix_data(name, values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), values.size)
            for name, values in matrix.items()
        ]
        # An entry without a name ends the list.
        params.imatrix = (llama_cpp.llama_model_imatrix_data * (len(matrix) + 1))(*entries)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise OSError(f"llama.cpp cannot quantize {source} to {quantization}")


def read_importance(file: Path) -> dict[bytes, np.ndarray]:
    """Tensor name -> mean square of each input feature, float32, from a file of llama.cpp's `llama-imatrix`.

    The file has, in int32 unless noted: the number of entries; for each the length of its name, its name, the number of
    chunks, the number of values, and the values in float32, which are the means times the number of chunks.
    """
    data, place = file.read_bytes(), 4
    entries = {}
    for _ in range(int.from_bytes(data[:4], "little")):
        length = int.from_bytes(data[place : place + 4], "little")
        name, place = data[place + 4 : place + 4 + length], place + 4 + length
        num_chunks, num_values = struct.unpack_from("<ii", data, place)
        values = np.frombuffer(data, "<f4", num_values, place + 8)
        place += 8 + 4 * num_values
        entries[name] = np.ascontiguousarray(values / max(num_chunks, 1), np.float32)
    return entries


def _rope_theta(config: dict) -> float:
    return config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
