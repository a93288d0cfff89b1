"""Gradients of models of transformers, to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from jaxis.training.examples import Example
from tests.support import parity
from tests.support.parity import Family

LENGTHS = (23, 9)


def random_examples() -> list[Example]:
    """Two sequences, of which some tokens are learned."""
    rng = np.random.default_rng(0)
    return [
        Example(
            np.asarray(parity.prompt(length), np.int32), np.concatenate([[False], rng.random(length - 1) < 0.6]), ""
        )
        for length in LENGTHS
    ]


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, next to the largest element."""
    return np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)


def saved_gradients(family: Family, model: Any, folder: Path) -> dict[str, np.ndarray]:
    """The gradients under the names and in the shapes in which the model's weights are saved."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            mine.copy_(torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)
        for buffer in copied.buffers():
            buffer.zero_()
    copied.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return parity.RENAMED.get(family.architecture or family.config_class, dict)(tensors)


def check_gradients(
    errors: Mapping[str, float],
    found: Callable[[str], np.ndarray],
    expected: Mapping[str, np.ndarray],
    exact: Callable[[], Mapping[str, np.ndarray]],
) -> None:
    """Checks that gradients are within 1e-5 of torch's in float32; or else, where both round, as near as those to
    gradients in float64.

    Args:
      errors: By tensor, from torch's in float32.
      found: The gradient of a tensor.
      expected: Torch's in float32.
      exact: Computes torch's in float64.
    """
    far = [name for name, error in errors.items() if error >= 1e-5]
    if not far:
        return
    references = exact()
    mine = {name: largest_error(found(name), references[name]) for name in errors}
    theirs = {name: largest_error(expected[name], references[name]) for name in errors}
    worst, worst_of_torch = max(mine, key=mine.__getitem__), max(theirs, key=theirs.__getitem__)
    print(f"from float64: {mine[worst]:.1e} {worst}; torch in float32 {theirs[worst_of_torch]:.1e} {worst_of_torch}")
    assert mine[worst] < max(1e-5, 4 * theirs[worst_of_torch]), worst


def in_float64(model: Any) -> Any:
    """A copy that computes in float64."""
    copied = copy.deepcopy(model).double()
    if hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")  # the others are of small types only
    copied.zero_grad()
    return copied
