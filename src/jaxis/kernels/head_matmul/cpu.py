"""The product on CPU: the native kernel, with weights packed for it. It has no derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.grouped_matmul.packed import StackPacker
from jaxis.kernels.quantized_matmul import packed


def pack(weight: np.ndarray) -> packed.PackedWeight:
    """Packs a stack [H, out, in]: bfloat16 stays so, every other type becomes float32."""
    stack = StackPacker(len(weight))
    for head, matrix in enumerate(weight):
        rows = np.ascontiguousarray(matrix)
        stack.pack(head, lambda allocate, rows=rows: packed.pack(rows, allocate))
    return stack.stack()


def head_matmul(x: jax.Array, weight: packed.PackedWeight) -> jax.Array:
    """Same arguments and result as `jaxis.kernels.head_matmul.head_matmul`."""
    output = jax.ShapeDtypeStruct((*x.shape[:2], weight.shape[0]), jnp.float32)
    operands = x.astype(jnp.float32), weight.data
    return native.call("head_matmul", output, *operands, format=weight.format.encode()).astype(x.dtype)
