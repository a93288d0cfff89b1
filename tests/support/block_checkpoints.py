"""Checkpoints of low-precision floats, written as the published ones are, and with the weights they stand for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from jaxis.layers.module import JaxModule
from tests.support.quantized_models import IDS, load, logits
from tests.support.tiny_checkpoints import variant

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
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
    block: tuple[int, int | None] = (128, 128),
    scale_dtype: torch.dtype = torch.float32,
    scale_name: str = "weight_scale_inv",
    config: dict[str, Any] = FP8,
    **quantization: Any,
) -> tuple[Path, Path]:
    """(`folder`/fp8, `folder`/wide): `source` with its linear layers in fp8, and with what those stand for.

    A block of None columns has all of them.
    """
    stored, quantized, wide = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in stored.items():
        if re.search(r"_proj(_with_mqa)?\.weight$", name):
            blocks = (block[0], block[1] or tensor.shape[1])
            value, scale = quantize_fp8(tensor.float(), blocks, scale_dtype)
            quantized |= {name: value, name.removesuffix("weight") + scale_name: scale}
            # transformers' own, which its backward pass uses.
            wide[name] = _dequantize_fp8_weight(value, scale.float(), list(blocks), torch.float32)
        else:
            quantized[name] = wide[name] = tensor
    if config is FP8:
        quantization["weight_block_size"] = list(block)
    return (
        replace_tensors(folder / "fp8", source, quantized, quantization_config=config | quantization),
        replace_tensors(folder / "wide", source, wide),
    )


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [..., in] as blocks uint8 [..., in / 32, 16] and scales uint8 [..., in / 32]."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1).log2().floor() - 2).clamp(-127, 127)
    distances = groups[..., None] / exponent.exp2()[..., None, None] - torch.tensor(FP4_VALUES)
    codes = distances.abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def write_mxfp4(folder: Path, source: Path, **quantization: Any) -> tuple[Path, Path]:
    """(`folder`/mxfp4, `folder`/wide): a GPT-OSS `source` with its experts in MXFP4, and with what those stand for."""
    stored, quantized, wide = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in stored.items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            blocks, scales = quantize_mxfp4(tensor.mT)
            quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            wide[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            quantized[name] = wide[name] = tensor
    return (
        replace_tensors(folder / "mxfp4", source, quantized, quantization_config=MXFP4 | quantization),
        replace_tensors(folder / "wide", source, wide),
    )


def write_model(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    """A random model of this config, biases and selection biases included."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(float("norm" in name) + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    """float32 [T, V]."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].numpy()


def assert_logits(quantized: Path, wide: Path, **options: Any) -> JaxModule:
    """Checks that a checkpoint gives transformers' logits of another; returns its model for plain JAX.

    For plain JAX and for the native kernels in one: the reference takes longer than either.

    Args:
      quantized: The checkpoint.
      wide: The same with the weights that its own stand for.
      options: Options of `load`.
    """
    expected = transformers_logits(wide, IDS)
    models = [load(quantized, native=native, **options) for native in (False, True)]
    for model in models:
        np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    return models[0]


def replace_tensors(folder: Path, source: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """A folder like `source` with other tensors, and keys of config.json changed."""
    variant(folder, source, files={"model.safetensors": None}, **config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
