"""Checkpoints of GPTQ and AWQ, packed step by step as AutoGPTQ and AutoAWQ do, and the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.block_checkpoints import replace_tensors


@dataclass(frozen=True)
class Integers:
    """A weight [N, K] as `scales[n, groups[k]] * (numbers[n, k] - zeros[n, groups[k]])`.

    Attributes:
      numbers: [N, K], below 2 ** bits.
      scales: float16 [N, G].
      zeros: [N, G].
      groups: [K].
    """

    bits: int
    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    @property
    def wide(self) -> np.ndarray:
        """float32 [N, K]; exact, since a float16 times such an integer fits."""
        difference = self.numbers.astype(np.int64) - self.zeros.astype(np.int64)[:, self.groups]
        return (self.scales.astype(np.float64)[:, self.groups] * difference).astype(np.float32)


def quantize(
    weight: np.ndarray, bits: int = 4, group_size: int = 32, *, symmetric: bool = True, reorders: bool = False
) -> Integers:
    """Rounds a weight to integers; with `reorders`, groups are of columns of about the same size, as in act-order."""
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    groups = np.arange(k) // size
    if reorders:
        order = np.argsort(-np.square(weight).sum(0), kind="stable")
        by_size, groups = groups, np.empty_like(groups)
        groups[order] = by_size
    scales, zeros = [], []
    for group in range(groups.max() + 1):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scale = np.float16(np.maximum((high - low) / ((1 << bits) - 1), 1e-4))
        scales.append(scale)
        zeros.append(np.full(n, 1 << (bits - 1)) if symmetric else np.rint(-low / scale.astype(np.float64)))
    scales, zeros = np.stack(scales, 1), np.clip(np.stack(zeros, 1), 0, (1 << bits) - 1).astype(np.int64)
    numbers = np.rint(weight / scales.astype(np.float64)[:, groups]) + zeros[:, groups]
    return Integers(bits, np.clip(numbers, 0, (1 << bits) - 1).astype(np.int64), scales, zeros, groups)


def gptq_tensors(integers: Integers, *, version: int = 1, has_order: bool = True) -> dict[str, np.ndarray]:
    """`qweight`, `qzeros`, `scales` and `g_idx`."""
    bits = integers.bits
    zeros = integers.zeros if version == 2 else (integers.zeros - 1) % (1 << bits)
    tensors = {
        "qweight": _pack_rows(integers.numbers.T, bits),
        "qzeros": _pack_rows(zeros, bits)[: -(-len(zeros) * bits // 32)].T,
        "scales": integers.scales.T,
    }
    return tensors | {"g_idx": integers.groups.astype(np.int32)} if has_order else tensors


def awq_gemm_tensors(integers: Integers) -> dict[str, np.ndarray]:
    """`qweight`, `qzeros` and `scales` of the version "gemm"."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _pack_columns(integers.numbers.T, order),
        "qzeros": _pack_columns(integers.zeros.T, order),
        "scales": integers.scales.T,
    }


def awq_gemv_tensors(integers: Integers) -> dict[str, np.ndarray]:
    """`qweight`, `qzeros` and `scales` of the version "gemv": zeros and scales are filled up."""
    n, groups = integers.zeros.shape
    words = -(-groups // 8)
    words += words % 2  # AutoAWQ fills up to a multiple that depends on the size of groups
    zeros, scales = np.zeros((n, 8 * words), np.int64), np.zeros((n, 8 * words), np.float16)
    zeros[:, :groups], scales[:, :groups] = integers.zeros, integers.scales
    order = tuple(range(8))
    return {
        "qweight": _pack_columns(integers.numbers, order),
        "qzeros": _pack_columns(zeros, order),
        "scales": scales,
    }


def write(
    folder: Path,
    source: Path,
    pack: Callable[[str, np.ndarray], tuple[dict[str, np.ndarray], np.ndarray] | None],
    config: dict[str, Any],
) -> tuple[Path, Path]:
    """(`folder`/packed, `folder`/wide): `source` as `pack` stores it, and with what that stands for.

    Args:
      folder: To be made.
      source: A checkpoint folder.
      pack: (module's name, weight [N, K]) -> its tensors and the weight that they stand for; None leaves it.
      config: The `quantization_config`.
    """
    stored, packed, wide = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        made = pack(module, tensor.float().numpy()) if name.endswith(".weight") and tensor.ndim == 2 else None
        if made is None:
            packed[name] = wide[name] = tensor
            continue
        packed |= {f"{module}.{key}": torch.from_numpy(np.ascontiguousarray(each)) for key, each in made[0].items()}
        wide[name] = torch.from_numpy(made[1])
    return (
        replace_tensors(folder / "packed", source, packed, quantization_config=config),
        replace_tensors(folder / "wide", source, wide),
    )


def _pack_rows(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[K, N] -> int32 [K * bits / 32, N], by the loops of AutoGPTQ's `QuantLinear.pack`."""
    numbers = numbers.astype(np.uint32)
    if len(numbers) % 32:  # the last words are partly empty
        numbers = np.concatenate([numbers, np.zeros((-len(numbers) % 32, numbers.shape[1]), np.uint32)])
    words = np.zeros((len(numbers) // 32 * bits, numbers.shape[1]), np.uint32)
    i = row = 0
    while row < len(words):
        if bits != 3:
            for j in range(32 // bits):
                words[row] |= numbers[i + j] << np.uint32(bits * j)
            i, row = i + 32 // bits, row + 1
            continue
        # 32 integers in three words: ten, a cut one, ten, a cut one, ten.
        for j in range(10):
            words[row] |= numbers[i + j] << np.uint32(3 * j)
        words[row] |= numbers[i + 10] << np.uint32(30)
        words[row + 1] |= (numbers[i + 10] >> np.uint32(2)) & np.uint32(1)
        for j in range(10):
            words[row + 1] |= numbers[i + 11 + j] << np.uint32(3 * j + 1)
        words[row + 1] |= numbers[i + 21] << np.uint32(31)
        words[row + 2] |= (numbers[i + 21] >> np.uint32(1)) & np.uint32(3)
        for j in range(10):
            words[row + 2] |= numbers[i + 22 + j] << np.uint32(3 * j + 2)
        i, row = i + 32, row + 3
    return words.view(np.int32)


def _pack_columns(numbers: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """[R, C] of 4 bits -> int32 [R, C / 8], by the loops of AutoAWQ's `from_linear`."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, column] |= numbers[:, 8 * column + place].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)
