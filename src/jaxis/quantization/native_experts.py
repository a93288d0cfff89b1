"""Layers of experts computed by the native kernel on CPU: weights are packed as they are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.grouped_matmul import packed as packed_stacks
from jaxis.kernels.quantized_matmul import BlockScaledWeight, QuantizedWeight, packed
from jaxis.layers.expert_stacks import fill_expert
from jaxis.layers.glu import ClampedGLU, GatedUnit
from jaxis.layers.mlp import GATED_KERNELS
from jaxis.quantization.block_scaled_experts import BlockScaledExpertsMethod, StoredBlockExpertsMethod
from jaxis.quantization.compressed_tensors_experts import CompressedTensorsExpertsMethod
from jaxis.quantization.dequantized import DequantizedExpertsMethod
from jaxis.quantization.experts import STACK_AXES, QuantizedExpertsMethod, UnquantizedExpertsMethod

if TYPE_CHECKING:
    from jaxis.layers.experts import JaxExperts
    from jaxis.quantization.config import ExpertsMethod


def native_experts_method(layer: JaxExperts, method: ExpertsMethod | None) -> ExpertsMethod | None:
    """The native kernel's method for what `method` does in plain JAX (None: nothing special); `method` if it has none.

    Args:
      layer: Whose sizes and gated unit are set.
      method: What would be used otherwise.
    """
    if _kernel_activation(layer.gated_unit) is None:
        return method
    if method is None:
        return NativeExpertsMethod(None)
    if isinstance(method, CompressedTensorsExpertsMethod):
        return dataclasses.replace(method, method=native_experts_method(layer, method.method))
    if isinstance(method, StoredBlockExpertsMethod | DequantizedExpertsMethod):
        return dataclasses.replace(method, method=NativeExpertsMethod(None))
    if isinstance(method, QuantizedExpertsMethod) and _has_kernel(layer, method):
        return NativeExpertsMethod(method.scheme.act_qtype, source=method)
    return method


@dataclass(frozen=True)
class NativeExpertsMethod:
    """Each stack is a parameter whose value is a PackedWeight of X weights; bfloat16 stays bfloat16.

    Attributes:
      act_qtype: "int8" quantizes the inputs of the products as they come; None does not.
      source: How the weights are quantized as they are read; None leaves them as they are.
    """

    act_qtype: str | None
    source: QuantizedExpertsMethod | None = None

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        (self.source or UnquantizedExpertsMethod()).create_weights(layer, rngs, dtype)

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        """Straight from the mapped file into the expert's place among the packed panels."""
        source = self.source

        def write(stack: packed.PackedWeight | None, target: jax.ShapeDtypeStruct) -> packed.PackedWeight:
            def pack(allocate: packed.Allocate) -> packed.PackedWeight:
                if source is None:
                    return packed.pack(_in_type_of(stack, target, tensor), allocate)
                scheme = source.scheme
                quantized = packed.quantize_and_pack(
                    tensor, scheme.weight_qtype, scheme.tile_size, scheme.weight_calibration_method, allocate
                )
                return quantized or packed.pack_quantized(source.quantize(tensor), allocate)

            try:
                return packed_stacks.pack_into(stack, target.shape[0], expert, pack)
            except ValueError as error:
                raise CheckpointError(str(error)) from None

        fill_expert(getattr(layer, stack_name), expert, tensor.shape, write)

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        num_tokens, k = expert_ids.shape
        inputs = x.astype(jnp.float32)
        if layer.scales_input:
            # A row for each slot, so that the kernel need not know.
            inputs = (inputs[:, None] * expert_weights[:, :, None]).reshape(num_tokens * k, -1)
            expert_ids, expert_weights = expert_ids.reshape(-1, 1), jnp.ones((num_tokens * k, 1), jnp.float32)
        biases = [getattr(layer, f"{name}_bias") for name in STACK_AXES]
        activation = _kernel_activation(layer.gated_unit)
        assert activation is not None
        y = packed_stacks.experts(
            inputs,
            expert_ids,
            expert_weights,
            *(getattr(layer, name).get_value() for name in STACK_AXES),
            [bias[...].astype(jnp.float32) for bias in biases if bias is not None],
            act_qtype=self.act_qtype,
            **activation,
        )
        if layer.scales_input:
            y = y.reshape(num_tokens, k, -1).sum(1)
        return y.astype(x.dtype)

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Hands what was packed while it was read to JAX, and packs what was not; plain JAX takes what it cannot."""
        stacks = [getattr(layer, name).get_value() for name in STACK_AXES]
        if any(isinstance(stack, BlockScaledWeight) and not packed.can_pack(stack) for stack in stacks):
            layer.quant_method = BlockScaledExpertsMethod()
            return
        for name in STACK_AXES:
            param = getattr(layer, name)
            param.set_value(_on_device(param.get_value()))
        # Which way the weights came does not matter any more: layers alike are traced once.
        layer.quant_method = NativeExpertsMethod(self.act_qtype)


def _kernel_activation(unit: GatedUnit) -> dict[str, Any] | None:
    """The unit as the kernel's arguments; None if it has no such."""
    if isinstance(unit, ClampedGLU):
        return {"activation": "clamped_swiglu", "alpha": unit.alpha, "limit": unit.limit}
    name = GATED_KERNELS.get(unit.activation)
    return None if name is None else {"activation": name}


def _has_kernel(layer: JaxExperts, method: QuantizedExpertsMethod) -> bool:
    scheme = method.scheme
    return all(
        packed.has_kernel(scheme.weight_qtype, in_size, scheme.tile_size)
        for in_size in (layer.hidden_size, layer.intermediate_size)
    )


def _in_type_of(stack: packed.PackedWeight | None, target: jax.ShapeDtypeStruct, tensor: np.ndarray) -> np.ndarray:
    """The tensor in the type to pack it in: the model's where that is bfloat16, else float32 once one is."""
    if target.dtype == ml_dtypes.bfloat16:
        return tensor.astype(ml_dtypes.bfloat16, copy=False)
    return tensor.astype(np.float32, copy=False) if stack is not None and stack.qtype == "float32" else tensor


_PACKERS: dict[type, Callable[..., packed.PackedWeight]] = {
    QuantizedWeight: packed.pack_quantized,
    BlockScaledWeight: packed.pack_blocks,
}


def _on_device(stack: Any) -> packed.PackedWeight:
    """A complete stack, packed or not, as a PackedWeight of a JAX array."""
    if not isinstance(stack, packed.PackedWeight):
        num_experts, result = len(jax.tree.leaves(stack)[0]), None
        for expert in range(num_experts):
            weight = jax.tree.map(lambda array, expert=expert: np.asarray(array[expert]), stack)
            pack = _PACKERS.get(type(weight), packed.pack)
            result = packed_stacks.pack_into(
                result, num_experts, expert, lambda allocate, pack=pack, weight=weight: pack(weight, allocate)
            )
        stack = result
    return packed_stacks.on_device(stack)
