"""Mamba2's recurrence, a selective state space with one decay per head (arXiv:2405.21060).

`reference.py` is the definition, `cpu.py` the native kernel, `chunked.py` for GPU and TPU; all take the same arguments.
"""

from __future__ import annotations

import jax

from jaxis.kernels import native_states
from jaxis.kernels.model_axis import num_shards, repeat_groups, split_over_model
from jaxis.kernels.platform import target_platform
from jaxis.kernels.ssd import chunked, cpu, reference
from jaxis.kernels.ssd.reference import SsdOperands

__all__ = ["SsdOperands", "ssd"]


def ssd(operands: SsdOperands) -> tuple[jax.Array | None, jax.Array]:
    """Computes, for each token and head: `S = exp(dt * a) * S + (dt * x) b^T; y = S c + d * x`, in float32.

    Returns:
      The updated states (None without any), and y [T, H, P] in x's type, zeros for padding.

    Raises:
      ValueError: The operands do not fit together.
    """
    num_heads, num_groups = operands.x.shape[1], operands.b.shape[1]
    if num_heads % num_groups:
        raise ValueError(f"{num_groups} groups do not divide {num_heads} heads")
    operands.states.check()
    shards = num_shards(num_heads)
    if shards == 1:
        return _ssd(operands)
    b, c = repeat_groups(operands.b, shards), repeat_groups(operands.c, shards)
    return split_over_model(_ssd, operands._replace(b=b, c=c), (1, 1, 0, 1, 1, 0, 1), (1, 1))


def _ssd(operands: SsdOperands) -> tuple[jax.Array | None, jax.Array]:
    if native_states.supports(operands.states):
        return cpu.ssd(operands)
    chosen = reference if target_platform() == "cpu" else chunked
    return chosen.ssd(operands)
