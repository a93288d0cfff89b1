from __future__ import annotations

import jax
from jax.core import Tracer

from jaxis.kernels.platform import target_platform


def in_hbm(operand: jax.Array) -> jax.Array:
    """Keeps an operand of a TPU's Pallas kernel in HBM, to be read in the blocks that the kernel asks for.

    Otherwise XLA may fetch a whole operand into VMEM first, if it fits there: all experts of a stack for a step that
    uses few of them, or a cache, which it then also writes back.
    """
    # Interpreters do not know memories, and the constraint exists in traced programs only.
    if target_platform() != "tpu" or not isinstance(operand, Tracer):
        return operand
    from jax.experimental.pallas import tpu as pltpu  # here, since it takes a tenth of a second to import

    return pltpu.with_memory_space_constraint(operand, pltpu.HBM)
