"""Mamba's selective scan, a state space with a decay for each channel and element of its state (arXiv:2312.00752).

`reference.py` is the definition, `cpu.py` the native kernel, `chunked.py` for GPU and TPU; all take the same arguments.
"""

from __future__ import annotations

import jax

from jaxis.kernels import native_states
from jaxis.kernels.model_axis import num_shards, split_over_model
from jaxis.kernels.platform import target_platform
from jaxis.kernels.selective_scan import chunked, cpu, reference
from jaxis.kernels.selective_scan.reference import ScanOperands

__all__ = ["ScanOperands", "selective_scan"]


def selective_scan(operands: ScanOperands) -> tuple[jax.Array | None, jax.Array]:
    """Computes, for each token and channel: `S = exp(dt * a) * S + dt * x * b; y = sum(S * c) + d * x`, in float32.

    Returns:
      The updated states (None without any), and y [T, I] in x's type, zeros for padding.

    Raises:
      ValueError: The operands do not fit together.
    """
    operands.states.check()
    if num_shards(operands.x.shape[1]) == 1:
        return _selective_scan(operands)
    return split_over_model(_selective_scan, operands, (1, 1, 0, None, None, 0, 2), (2, 1))


def _selective_scan(operands: ScanOperands) -> tuple[jax.Array | None, jax.Array]:
    if native_states.supports(operands.states):
        return cpu.selective_scan(operands)
    chosen = reference if target_platform() == "cpu" else chunked
    return chosen.selective_scan(operands)
