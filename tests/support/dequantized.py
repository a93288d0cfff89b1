"""The floats that a stored weight stands for, computed in one program."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels import weights


def dequantize(weight: weights.WeightValue, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """`jaxis.kernels.weights.dequantize` in one program, of which each operation would be compiled alone."""
    return jax.jit(lambda weight: weights.dequantize(weight, dtype))(weight)
