"""Stacks of experts' weights packed for the native kernels on CPU, and the kernel that applies a layer of experts.

Like all packed weights, they are for inference only: results have no derivatives.
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
from jaxis.kernels.quantized_matmul.wide_scales import can_widen, widen


def pack_into(
    stack: PackedWeight | None, num_experts: int, expert: int, pack: Callable[[Allocate], PackedWeight]
) -> PackedWeight:
    """Packs one expert's weight into its place in a stack.

    Args:
      stack: The stack that this function returned for the previous expert; None for the first.
      num_experts: X.
      expert: Index of the expert.
      pack: Packs the weight, given an allocator for its memory.

    Returns:
      The stack: its data is a numpy array, uint8 [X, panels, panel's bytes].

    Raises:
      ValueError: The weight is packed in another format than the earlier ones; the message follows its name.
    """
    data = None if stack is None else np.asarray(stack.data)

    def allocate(shape: tuple[int, int]) -> np.ndarray:
        nonlocal data
        if data is None:
            data = native_memory.empty((num_experts, *shape))
        return data[expert] if data.shape[1:] == shape else np.empty(shape, np.uint8)

    packed = pack(allocate)
    if stack is None or packed.format == stack.format:
        return dataclasses.replace(packed, data=data)
    # The scales of one expert may be 8-bit codes by chance, and those of another not.
    if can_widen(packed.format, stack.format):
        packed = widen(packed, stack.format)
    elif can_widen(stack.format, packed.format):
        stack = widen(stack, packed.format)
    else:
        raise ValueError("has a different type from those of the other experts")
    np.asarray(stack.data)[expert] = packed.data
    return stack


def on_device(stack: PackedWeight) -> PackedWeight:
    """The complete stack with its data as a JAX array that shares the memory."""
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

    Reads each used expert's weights once, and no others. Results are batch-invariant, bit for bit: a token's slots are
    summed in the order of their experts.

    Args:
      x: float32 [T, E].
      expert_ids: i32 [T, k]; ids outside [0, X) contribute nothing.
      expert_weights: float32 [T, k].
      gate: Stack of X weights [F, E].
      up: Stack of X weights [F, E].
      down: Stack of X weights [E, F].
      biases: float32 biases of gate [X, F], up [X, F] and down [X, E]; empty for none.
      activation: "silu" or "gelu_tanh", applied to the gate, which is then multiplied by up; or "clamped_swiglu":
        `g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1)` with `g = min(gate, limit)`.
      alpha: Parameter of "clamped_swiglu".
      limit: Parameter of "clamped_swiglu".
      act_qtype: "int8" quantizes the inputs of the products dynamically, as for `quantized_matmul`; None does not.

    Returns:
      float32 [T, E].
    """
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
        gate_format=gate.format.encode(),
        up_format=up.format.encode(),
        down_format=down.format.encode(),
        num_experts=np.int64(len(gate.data)),
        hidden_size=np.int64(gate.shape[0]),
        quantize_activations=act_qtype is not None,
        activation=np.int32(ACTIVATIONS[activation]),
        alpha=np.float32(alpha),
        limit=np.float32(limit),
    )
