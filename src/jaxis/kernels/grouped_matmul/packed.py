"""Stacks of experts' weights packed for the native kernels on CPU, and the kernel that applies a layer of experts.

Like all packed weights they are for inference: what comes out has no derivatives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native, native_memory
from jaxis.kernels.native_constants import ACTIVATIONS
from jaxis.kernels.quantized_matmul.packed import Allocate, PackedWeight, device_array


def pack_into(
    stack: PackedWeight | None, num_experts: int, expert: int, pack: Callable[[Allocate], PackedWeight]
) -> PackedWeight:
    """Packs one expert's weight into its place of a stack.

    Args:
      stack: What this function returned for the experts before it; None for the first.
      num_experts: X.
      expert: Which place.
      pack: Packs the weight in the memory that it is given the means to take.

    Returns:
      The stack: its data is a numpy array, uint8 [X, panels, panel's bytes].

    Raises:
      ValueError: The weight is packed in another format than those before it; the text goes after its name.
    """
    data = None if stack is None else np.asarray(stack.data)

    def allocate(shape: tuple[int, int]) -> np.ndarray:
        nonlocal data
        if data is None:
            data = native_memory.empty((num_experts, *shape))
        if data.shape[1:] != shape:
            raise ValueError("has a different type from those of the other experts")
        return data[expert]

    packed = pack(allocate)
    if stack is not None and packed.format != stack.format:
        raise ValueError("has a different type from those of the other experts")
    return dataclasses.replace(packed, data=data)


def on_device(stack: PackedWeight) -> PackedWeight:
    """A complete stack as one of a JAX array, in the same memory."""
    return dataclasses.replace(stack, data=device_array(np.asarray(stack.data)))


def experts(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate: PackedWeight,
    up: PackedWeight,
    down: PackedWeight,
    biases: Sequence[jax.Array] = (),
    *,
    activation: str,
    alpha: float = 0.0,
    limit: float = 0.0,
    act_qtype: str | None = None,
) -> jax.Array:
    """Sum over each token's slots of `weight * down(activation(gate(x), up(x)))`, with the slot's expert.

    Reads the weights of the experts hit only, each once. What a token gets does not depend on the other tokens, to the
    bit: the slots are summed in the order of their experts.

    Args:
      x: float32 [T, E].
      expert_ids: i32 [T, k]; one that is not in [0, X) adds nothing.
      expert_weights: float32 [T, k].
      gate: Stack of X weights [F, E].
      up: The same, in the same format.
      down: Stack of X weights [E, F].
      biases: Of gate [X, F], up [X, F] and down [X, E], float32; or none.
      activation: "silu" or "gelu_tanh": of the gate, times up; "clamped_swiglu":
        `g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1)` with `g = min(gate, limit)`.
      alpha: Of "clamped_swiglu".
      limit: Of "clamped_swiglu".
      act_qtype: "int8" quantizes the inputs of the products dynamically, as for `quantized_matmul`; None does not.

    Returns:
      float32 [T, E].
    """
    formats = [[int(value) for value in weight.attributes().values()] for weight in (gate, down)]
    return native.call(
        "experts",
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        x,
        expert_ids,
        expert_weights,
        gate.data,
        up.data,
        down.data,
        *biases,
        formats=np.asarray(formats, np.int64).reshape(-1),
        num_experts=np.int64(len(gate.data)),
        hidden_size=np.int64(gate.shape[0]),
        quantize_activations=act_qtype is not None,
        activation=np.int32(ACTIVATIONS[activation]),
        alpha=np.float32(alpha),
        limit=np.float32(limit),
    )
