"""Checkpoints as other quantizers write them, made by those, and the same with the weights that they stand for."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import mlx.core as mx
import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from safetensors.torch import load_file, save_file

from tests.support.block_checkpoints import replace_tensors
from tests.support.tiny_checkpoints import variant

QLORA = {"quant_type": "nf4", "compress_statistics": True}
QUANTIZED = r"_proj\.weight$"
Quantized = dict[str, torch.Tensor]


def write_quantized(
    folder: Path,
    source: Path,
    quantize: Callable[[str, torch.Tensor], tuple[Quantized, torch.Tensor]],
    config: dict[str, Any],
    names: str = QUANTIZED,
    metadata: dict[str, str] | None = None,
) -> tuple[Path, Path]:
    """(`folder`/low_precision, `folder`/wide): `source` with some tensors quantized, and with what those stand for.

    Args:
      folder: To be made.
      source: An unquantized checkpoint.
      quantize: (Name, tensor) -> the tensors that stand for it by their full names, and it dequantized.
      config: `quantization_config`.
      names: Regular expression of the tensors to quantize.
      metadata: Metadata of the file.
    """
    low_precision, wide = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        low_precision[name] = wide[name] = tensor
        if re.search(names, name):
            del low_precision[name]
            tensors, wide[name] = quantize(name, tensor)
            low_precision |= tensors
    result = replace_tensors(folder / "low_precision", source, low_precision, quantization_config=config)
    if metadata is not None:
        save_file(low_precision, result / "model.safetensors", metadata=metadata)
    return result, replace_tensors(folder / "wide", source, wide)


def bitsandbytes_4bit(name: str, weight: torch.Tensor, **settings: Any) -> tuple[Quantized, torch.Tensor]:
    """A linear layer's weight in 4 bits, as bitsandbytes' own layer saves it."""
    layer = bitsandbytes.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = bitsandbytes.nn.Params4bit(weight.contiguous(), requires_grad=False, **(QLORA | settings)).to("cpu")
    stored = {name.removesuffix("weight") + key: tensor.clone() for key, tensor in layer.state_dict().items()}
    # As one row: its CPU kernel mistakes the blocks of later ones where they straddle rows.
    state = layer.weight.quant_state
    state.shape = torch.Size((1, weight.numel()))
    # As it is written: to compile it for large blocks takes longer than all else.
    with torch.compiler.set_stance("force_eager"):
        return stored, dequantize_4bit(layer.weight.data, state).float().reshape(weight.shape)


def bitsandbytes_8bit(name: str, weight: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
    """A linear layer's weight in 8 bits."""
    layer = bitsandbytes.nn.Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(weight.contiguous(), requires_grad=False).to("cpu")
    stored = {name.removesuffix("weight") + key: tensor.clone() for key, tensor in layer.state_dict().items()}
    return stored, int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)


def mlx_arrays(weight: np.ndarray, mode: str, bits: int, group_size: int, dtype: Any = mx.float32) -> dict[str, Any]:
    """`mlx.core.quantize` of a weight [..., out, in], by the names of its results in files; and `wide`, float32."""
    arrays = mx.quantize(mx.array(weight).astype(dtype), group_size=group_size, bits=bits, mode=mode)
    stored = dict(zip(("weight", "scales", "biases"), arrays, strict=False))
    exact = [a if a.dtype in (mx.uint8, mx.uint32) else a.astype(mx.float32) for a in arrays]
    wide = mx.dequantize(*exact, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32)
    return stored | {"wide": wide}


def write_mlx(
    folder: Path,
    source: Path,
    *,
    mode: str = "affine",
    bits: int | Callable[[str], int] = 4,
    group_size: int = 64,
    names: str = r"(_proj|embed_tokens|lm_head|mlp\.gate)\.weight$",
    dtype: Any = mx.float32,
    **config: Any,
) -> tuple[Path, Path]:
    """Writes as `write_quantized` does, with experts stacked and named as mlx-lm does; scales have type `dtype`."""
    stored = load_file(source / "model.safetensors")
    experts = sorted({name for name in stored if ".experts.0." in name})
    low_precision, wide = {}, dict(stored)
    for name in experts:
        numbers = range(sum(".".join(name.split(".experts.0.")) == re.sub(r"\.experts\.\d+\.", ".", n) for n in stored))
        parts = [stored.pop(name.replace(".experts.0.", f".experts.{number}.")) for number in numbers]
        stored[name.replace(".experts.0.", ".switch_mlp.")] = torch.stack(parts)
    quantization: dict[str, Any] = {"group_size": group_size, "bits": 4 if callable(bits) else bits, "mode": mode}
    for name, tensor in stored.items():
        if not re.search(names, name):
            low_precision[name] = mx.array(tensor.numpy())
            continue
        module = name.removesuffix(".weight")
        width = bits(module) if callable(bits) else bits
        if width != quantization["bits"]:
            quantization[module] = {"group_size": group_size, "bits": width}
        arrays = mlx_arrays(tensor.numpy(), mode, width, group_size, dtype)
        dense = torch.from_numpy(np.array(arrays.pop("wide")))
        low_precision |= {f"{module}.{key}": array for key, array in arrays.items()}
        if ".switch_mlp." in name:
            for number, part in enumerate(dense):
                wide[name.replace(".switch_mlp.", f".experts.{number}.")] = part.clone()
        else:
            wide[name] = dense
    config = {"quantization": quantization, "quantization_config": quantization} | config
    variant(folder / "low_precision", source, files={"model.safetensors": None}, **config)
    mx.save_safetensors(str(folder / "low_precision" / "model.safetensors"), low_precision, metadata={"format": "mlx"})
    return folder / "low_precision", replace_tensors(folder / "wide", source, wide)


@functools.cache
def random_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32 of normally distributed elements."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
