"""Keeps the operands of a TPU kernel where they are."""

from __future__ import annotations

import jax
from jax.core import Tracer
from jax.experimental.pallas import tpu as pltpu

from jaxis.kernels.platform import target_platform


def in_hbm(operand: jax.Array) -> jax.Array:
    """The operand of a Pallas kernel, to be read from HBM in the blocks that the kernel asks for.

    Without it, XLA may fetch a whole operand into VMEM before the kernel begins, if it fits there: all experts of a
    stack for a step that hits few of them, or a cache, which it then also writes back.
    """
    # Interpreters do not know memories, and the constraint exists in traced programs only.
    if target_platform() != "tpu" or not isinstance(operand, Tracer):
        return operand
    return pltpu.with_memory_space_constraint(operand, pltpu.HBM)
