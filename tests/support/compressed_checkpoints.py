"""Checkpoints in compressed-tensors' formats, made by the library, and what it makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.mxfp6.helpers import unpack_fp6_from_uint8
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.quantization.utils.helpers import generate_gparam
from safetensors.torch import load_file

from tests.support.block_checkpoints import replace_tensors

Encode = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""(module, weight [out, in]) -> its tensors by suffix, and what they stand for in float32."""

LINEAR_LAYERS = r"_proj(_with_mqa)?\.weight$"


def scheme_of(file_format: str, weights: Mapping[str, Any] | str, **group: Any) -> QuantizationScheme:
    """A scheme by its settings of weights, or by the name of a preset."""
    if isinstance(weights, str):
        return preset_name_to_scheme(weights, ["Linear"]).model_copy(update={"format": file_format, **group})
    return QuantizationScheme(targets=["Linear"], weights=dict(weights), format=file_format, **group)


def config_of(*schemes: QuantizationScheme, ignore: tuple[str, ...] = ("lm_head",), **keys: Any) -> dict[str, Any]:
    """config.json's `quantization_config`."""
    groups = {f"group_{i}": json.loads(scheme.model_dump_json()) for i, scheme in enumerate(schemes)}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
        **keys,
    }


def compress(
    weight: torch.Tensor, scheme: QuantizationScheme, scale_dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A weight's tensors, as the library stores them; scales are the library's for this weight."""
    args = scheme.weights
    groups = _groups(weight, scheme)
    smallest, largest = groups.amin(-1), groups.amax(-1)
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).reshape(1)
        scale, zero_point = calculate_qparams(smallest, largest, args, state["weight_global_scale"])
    else:
        scale, zero_point = calculate_qparams(smallest, largest, args)
        scale = scale.to(scale_dtype)
    state |= {"weight_scale": scale, "weight_zero_point": zero_point}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return {name: torch.as_tensor(t).contiguous() for name, t in compressor.compress(state, scheme).items()}


def decompress(tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """The library's decompression of them, in its data type."""
    state = dict(tensors)
    if "weight_shape" in state:
        state["weight_shape"] = torch.Size(state["weight_shape"].tolist())
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]


def decompress_wide(tensors: Mapping[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """The same in float32, by the library's arithmetic, which rounds floats of 4 and 6 bits to bfloat16 in the end."""
    if scheme.format not in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized"):
        return decompress(tensors, scheme).float()
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    unpack = unpack_fp6_from_uint8 if "fp6" in scheme.format else unpack_fp4_from_uint8
    columns = packed.shape[1] * 8 // scheme.weights.num_bits
    return dequantize(
        x_q=unpack(packed, packed.shape[0], columns, torch.float32),
        scale=(scale if scale.dtype == torch.float8_e4m3fn else decompress_mx_scale(scale)).float(),
        args=scheme.weights,
        dtype=torch.float32,
        global_scale=tensors.get("weight_global_scale"),
    )


def encoded_by(scheme: QuantizationScheme, scale_dtype: torch.dtype = torch.float32) -> Encode:
    """Stores every weight by this scheme."""

    def encode(_: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors = compress(weight, scheme, scale_dtype)
        return tensors, decompress_wide(tensors, scheme).contiguous()

    return encode


def write_stored(
    folder: Path,
    source: Path,
    encode: Encode,
    quantization_config: Mapping[str, Any],
    *,
    layers: str = LINEAR_LAYERS,
    extra: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Path, Path]:
    """(`folder`/stored, `folder`/wide): `source` with some weights encoded, and with what those stand for.

    Args:
      folder: Place to write to.
      source: An unquantized checkpoint.
      encode: Encodes a weight.
      quantization_config: For config.json.
      layers: Regular expression, searched for in the names of the weights to encode.
      extra: Further tensors of the stored checkpoint.
    """
    stored, wide = dict(extra or {}), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if re.search(layers, name):
            module = name.removesuffix(".weight")
            tensors, wide[name] = encode(module, tensor.float())
            stored |= {f"{module}.{suffix}": each.contiguous() for suffix, each in tensors.items()}
        else:
            stored[name] = wide[name] = tensor
    return (
        replace_tensors(folder / "stored", source, stored, quantization_config=dict(quantization_config)),
        replace_tensors(folder / "wide", source, wide),
    )


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as the checkpoint's reader returns it."""
    quantized = {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
        torch.float8_e8m0fnu: (torch.uint8, ml_dtypes.float8_e8m0fnu),
    }
    if tensor.dtype not in quantized:
        return tensor.numpy()
    view, dtype = quantized[tensor.dtype]
    return tensor.view(view).numpy().view(dtype)


def _groups(weight: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """[..., elements that share a scale], with the other axes those of the scales."""
    args = scheme.weights
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight[:, None]
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, args.group_size))
