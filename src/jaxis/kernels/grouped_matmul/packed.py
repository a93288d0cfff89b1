"""Stacks of experts' weights packed for the native kernels on CPU, and the kernel that applies a layer of experts.

Like all packed weights, they are for inference only: results have no derivatives.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native, native_memory
from jaxis.kernels.native_constants import ACTIVATIONS
from jaxis.kernels.quantized_matmul.packed import Allocate, PackedWeight, device_array
from jaxis.kernels.quantized_matmul.packed_format import PackedFormat
from jaxis.kernels.quantized_matmul.wide_scales import can_widen, widen


class StackPacker:
    """Packs the weights of X experts, each straight into its place in one stack.

    Experts may be packed in any order, and in several threads at a time.

    Args:
      num_experts: X.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._lock = threading.Lock()
        self._data: np.ndarray | None = None
        self._packed: dict[int, PackedWeight] = {}
        self._formats: set[PackedFormat] = set()

    @property
    def experts(self) -> Iterable[int]:
        """Those that are packed."""
        return self._packed.keys()

    def pack(self, expert: int, pack: Callable[[Allocate], PackedWeight]) -> None:
        """Packs one expert's weight.

        Args:
          expert: Index of the expert.
          pack: Packs the weight, given an allocator for its memory.

        Raises:
          ValueError: The weight is packed in another format than an earlier one; the message follows its name.
        """
        packed = pack(lambda shape: self._place(expert, shape))
        with self._lock:
            if not all(_fit(packed.format, other) for other in self._formats):
                raise ValueError("has a different type from those of the other experts")
            self._formats.add(packed.format)
            self._packed[expert] = packed

    def stack(self) -> PackedWeight:
        """The stack, once every expert is packed: uint8 [X, panels, panel's bytes] as a JAX array."""
        assert self._data is not None
        assert len(self._packed) == self._num_experts
        # The scales of one expert may be 8-bit codes by chance, and those of another not: all become like the other's.
        wide = next(one for one in self._formats if not any(can_widen(one, other) for other in self._formats))
        data = self._data
        if len(self._formats) > 1:
            experts = [self._packed[expert] for expert in range(self._num_experts)]
            data = np.stack([np.asarray((e if e.format == wide else widen(e, wide)).data) for e in experts])
        return dataclasses.replace(self._packed[0], data=device_array(data), format=wide)

    def _place(self, expert: int, shape: tuple[int, int]) -> np.ndarray:
        with self._lock:
            if self._data is None:
                self._data = native_memory.empty((self._num_experts, *shape))
        return self._data[expert] if self._data.shape[1:] == shape else np.empty(shape, np.uint8)


def _fit(one: PackedFormat, other: PackedFormat) -> bool:
    """Whether weights of two formats can stand in one stack."""
    return one == other or can_widen(one, other) or can_widen(other, one)


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
        `g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1)` with `g = min(gate, limit)`; or "capped_swiglu":
        `min(silu(gate), limit) * clip(up, -limit, limit)`; or "relu2", `max(up, 0) ** 2`, for which `gate` is not
        read: it may be `up`.
      alpha: Parameter of "clamped_swiglu".
      limit: Parameter of "clamped_swiglu" and "capped_swiglu".
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
