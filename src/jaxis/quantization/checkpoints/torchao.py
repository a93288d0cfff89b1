"""Checkpoints quantized by torchao, in safetensors files.

Their metadata have JSON for each parameter: its class in torchao, and that class's attributes. config.json is not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.loading.safetensors import TensorInfo, TensorInfos
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.torchao import (
    TorchaoFloat8Format,
    TorchaoInt4Format,
    TorchaoIntegersFormat,
    TorchaoMicroscalingFormat,
)

_SUFFIXES = ("qdata", "scale", "zero_point", "per_tensor_scale")


def torchao_config(_config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """Reads the quantization of a checkpoint whose `quant_method` is "torchao"; without tensors, nothing is quantized.

    Raises ConfigError if a class of tensors, or its layout, is not supported.
    """
    if tensors is None:
        return FormatsByTensors(lambda *_: None)
    metadata = tensors.metadata if isinstance(tensors, TensorListing | TensorInfos) else {}
    formats: dict[str, WeightFormat] = {}
    for name, text in metadata.items():
        module, _, parameter = name.rpartition(".")
        if module and (weight_format := read_format(name, text)) is not None:
            if parameter != "weight":
                raise ConfigError(f"torchao quantized {name}, which is not a layer's weight: this is not supported")
            formats[module] = weight_format
    return FormatsByTensors(lambda module, _: formats.get(module))


def is_quantized(tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns whether any of these tensors is quantized by torchao."""
    return any("._weight_" in name for name in tensors)


def read_format(name: str, text: str) -> WeightFormat | None:
    """Returns the format of a parameter with this name, from its JSON; None for a plain tensor.

    Raises ConfigError if the format is not supported.
    """
    try:
        described = json.loads(text)
        kind, attributes, data = described["_type"], described.get("_data", {}), described.get("_tensor_data_names", [])
        if kind == "Tensor":
            return None
        reader = _READERS.get(kind)
        if reader is None:
            raise ConfigError(_unsupported(kind, name))
        unknown = set(data) - set(_SUFFIXES)
        if unknown:
            raise ConfigError(f"{name} is a {kind} of torchao with {min(unknown)!r}, which is not supported")
        return reader(attributes, data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name}: torchao's metadata in the file cannot be understood: {text[:200]}") from None


def _unsupported(kind: str, name: str) -> str:
    if kind in ("Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor"):
        return (
            f"{name} is a {kind} of torchao, whose elements are in the order of a GPU's kernels: quantize the model "
            "with torchao's 'plain' packing format, or use the unquantized checkpoint"
        )
    return f"{name} is a {kind} of torchao, which is not supported; known: {', '.join(_READERS)}"


def _block_shape(attributes: Mapping[str, Any]) -> tuple[int, int]:
    rows, columns = attributes["block_size"]
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise ValueError("block_size")
    return rows, columns


def _read_int8(attributes: Mapping[str, Any], data: list[str]) -> WeightFormat:
    return TorchaoIntegersFormat(_block_shape(attributes), has_zero_point="zero_point" in data)


def _read_intx(attributes: Mapping[str, Any], data: list[str]) -> WeightFormat:
    bits = int(attributes["target_dtype"]["_data"].removeprefix("int"))
    if not 1 <= bits <= 8:
        raise ValueError("target_dtype")
    return TorchaoIntegersFormat(_block_shape(attributes), bits, has_zero_point="zero_point" in data)


def _read_int4(attributes: Mapping[str, Any], _: list[str]) -> WeightFormat:
    rows, columns = _block_shape(attributes)
    if rows != 1:
        raise ValueError("block_size")
    return TorchaoInt4Format(columns)


def _read_float8(attributes: Mapping[str, Any], _: list[str]) -> WeightFormat:
    return TorchaoFloat8Format(_block_shape(attributes))


def _read_mx(attributes: Mapping[str, Any], _: list[str]) -> WeightFormat:
    element = attributes["elem_dtype"]["_data"]
    if attributes["block_size"] != 32 or element not in ("float8_e4m3fn", "float4_e2m1fn_x2"):
        raise ConfigError(f"torchao's MXTensor of {element} in blocks of {attributes['block_size']} is not supported")
    return TorchaoMicroscalingFormat(
        is_fp4=element == "float4_e2m1fn_x2", is_swizzled=bool(attributes.get("is_swizzled_scales"))
    )


def _read_nvfp4(attributes: Mapping[str, Any], data: list[str]) -> WeightFormat:
    if attributes["block_size"] != 16:
        raise ValueError("block_size")
    return TorchaoMicroscalingFormat(
        is_fp4=True,
        is_nvidia=True,
        is_swizzled=bool(attributes.get("is_swizzled_scales")),
        has_tensor_scale="per_tensor_scale" in data,
    )


_READERS: dict[str, Callable[[Mapping[str, Any], list[str]], WeightFormat]] = {
    "Int8Tensor": _read_int8,
    "IntxUnpackedToInt8Tensor": _read_intx,
    "Int4Tensor": _read_int4,
    "Float8Tensor": _read_float8,
    "MXTensor": _read_mx,
    "NVFP4Tensor": _read_nvfp4,
}


FORMATS = (CheckpointFormat(("torchao",), as_stored(torchao_config), is_quantized),)
