"""Checkpoints of narrow floats, written as the published ones are, and the same with the weights they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from tiny_checkpoints import variant

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def quantize_fp8(
    weight: torch.Tensor, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] as float8_e4m3fn and a scale for each block, its largest value on the type's largest."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1]))
    scale = blocks.abs().amax(dim=(1, 3)) / 448.0
    if scale_dtype == torch.float8_e8m0fnu:
        scale = scale.log2().ceil().exp2()
    scale = scale.to(scale_dtype)
    values = blocks / scale.float()[:, None, :, None]
    return values.reshape(padded.shape)[:rows, :columns].contiguous().to(torch.float8_e4m3fn), scale


def write_fp8(
    folder: Path,
    source: Path,
    *,
    block: tuple[int, int] = (128, 128),
    scale_dtype: torch.dtype = torch.float32,
    **quantization: Any,
) -> tuple[Path, Path]:
    """(`folder`/fp8, `folder`/wide): `source` with its linear layers in fp8, and with what those stand for."""
    stored, narrow, wide = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in stored.items():
        if "_proj" in name and name.endswith(".weight"):
            value, scale = quantize_fp8(tensor.float(), block, scale_dtype)
            narrow |= {name: value, f"{name}_scale_inv": scale}
            # transformers' own, which its backward pass uses.
            wide[name] = _dequantize_fp8_weight(value, scale.float(), list(block), torch.float32)
        else:
            narrow[name] = wide[name] = tensor
    config = FP8 | {"weight_block_size": list(block)} | quantization
    return (
        replace_tensors(folder / "fp8", source, narrow, quantization_config=config),
        replace_tensors(folder / "wide", source, wide),
    )


def replace_tensors(folder: Path, source: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """A folder like `source` with other tensors, and keys of config.json changed."""
    variant(folder, source, files={"model.safetensors": None}, **config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
