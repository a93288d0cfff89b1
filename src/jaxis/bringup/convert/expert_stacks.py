"""Experts that a Hugging Face checkpoint holds in one tensor for all, with gate and up joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GateUpOrder:
    """The order in which a tensor of all experts joins the outputs of gate and up.

    Attributes:
      interleaved: True if they alternate, instead of all of gate's coming first.
      outputs_first: True if the tensors of all experts are [X, out, in], instead of [X, in, out].
      gate_up, down: Names of the tensors beside the experts' own.
    """

    interleaved: bool
    outputs_first: bool = False
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"


_GRANITE = GateUpOrder(False, outputs_first=True, gate_up="input_linear.weight", down="output_linear.weight")

# By architecture, as llama.cpp names it; others have a tensor for each expert.
GATE_UP_ORDERS: Mapping[str, GateUpOrder] = {
    "gpt-oss": GateUpOrder(True),
    "llama4": GateUpOrder(False),
    "gemma4": GateUpOrder(False, outputs_first=True),
    **dict.fromkeys(("granitemoe", "granitehybrid"), _GRANITE),
}


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
