"""Experts that a Hugging Face checkpoint holds in one tensor for all, with gate and up joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_gate_up(stack: np.ndarray, *, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs, on the last axis, of gate and of up."""
    if interleaved:
        return stack[..., ::2], stack[..., 1::2]
    half = stack.shape[-1] // 2
    return stack[..., :half], stack[..., half:]


def join_gate_up(gate: Sequence[np.ndarray], up: Sequence[np.ndarray], *, interleaved: bool) -> np.ndarray:
    """Stacks each expert's gate and up, whose outputs are on the last axis."""
    pairs = [np.stack(pair, -1 if interleaved else -2) for pair in zip(gate, up, strict=True)]
    return np.stack([pair.reshape(*pair.shape[:-2], -1) for pair in pairs])
