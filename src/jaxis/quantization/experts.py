"""How layers of experts store and apply their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.grouped_matmul import grouped_matmul
from jaxis.kernels.quantized_matmul import QuantizedWeight, quantize
from jaxis.layers.expert_stacks import fill_expert, load_expert
from jaxis.layers.module import initializers_are_skipped, make_parameter
from jaxis.quantization.methods import WeightScheme, place_quantized

if TYPE_CHECKING:
    from jaxis.layers.experts import JaxExperts
    from jaxis.quantization.config import ExpertsMethod

# Of each stack: the logical axes of its weights' (out, in).
STACK_AXES = {"gate_proj": ("mlp", "embed"), "up_proj": ("mlp", "embed"), "down_proj": ("embed", "mlp")}


def select_experts_method(layer: JaxExperts, scheme: WeightScheme | None) -> ExpertsMethod:
    """The method of every layer of experts: the one place that chooses among implementations.

    Args:
      layer: Whose sizes are set.
      scheme: How its weights are quantized; None is not at all.
    """
    del layer
    return UnquantizedExpertsMethod() if scheme is None else QuantizedExpertsMethod(scheme)


@dataclass(frozen=True)
class UnquantizedExpertsMethod:
    """The weights as they stand in the checkpoint, in the model's data type; dropless, in plain JAX."""

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        for name, axes in STACK_AXES.items():
            shape = stack_shape(layer, name)
            setattr(layer, name, make_parameter(rngs, layer.kernel_init, shape, dtype, axes=("expert", *axes)))

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        load_expert(getattr(layer, stack_name), expert, tensor)

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        return apply_stacks(layer, x, expert_ids, expert_weights)

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Nothing to repack."""


@dataclass(frozen=True)
class QuantizedExpertsMethod:
    """Each stack is a parameter whose value is a QuantizedWeight, quantized expert by expert as the file is read."""

    scheme: WeightScheme

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        for name, axes in STACK_AXES.items():
            shape = stack_shape(layer, name)
            if initializers_are_skipped():
                initial: Any = jnp.zeros(shape, dtype)  # of the shape that the loader is to find
            else:
                experts = np.asarray(layer.kernel_init(rngs.params(), shape, dtype))
                initial = jax.tree.map(lambda *arrays: np.stack(arrays), *map(self.quantize, experts))
            setattr(layer, name, nnx.Param(initial, logical_axes=("expert", *axes)))

    def quantize(self, weight: np.ndarray) -> QuantizedWeight:
        """A QuantizedWeight of numpy arrays. Raises CheckpointError if the weight is not finite."""
        scheme = self.scheme
        try:
            return quantize(weight, scheme.weight_qtype, scheme.tile_size, scheme.weight_calibration_method)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        param = getattr(layer, stack_name)

        def write(stack: QuantizedWeight | None, target: jax.ShapeDtypeStruct) -> QuantizedWeight:
            quantized = self.quantize(tensor)
            if stack is None:
                stack = jax.tree.map(lambda array: np.empty((target.shape[0], *array.shape), array.dtype), quantized)
            jax.tree.map(lambda whole, array: whole.__setitem__(expert, array), stack, quantized)
            return stack

        fill_expert(param, expert, tensor.shape, write)
        if isinstance(stack := param.get_value(), QuantizedWeight):  # complete
            param.set_value(place_quantized(stack, param.get_metadata()["logical_axes"]))

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        return apply_stacks(layer, x, expert_ids, expert_weights, self.scheme.act_qtype)

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Places what another method left on the host."""
        for name in STACK_AXES:
            param = getattr(layer, name)
            if isinstance(param.get_value().qvalue, np.ndarray):
                param.set_value(place_quantized(param.get_value(), param.get_metadata()["logical_axes"]))


def stack_shape(layer: JaxExperts, name: str) -> tuple[int, int, int]:
    """[X, out, in] of the weights of `gate_proj`, `up_proj` or `down_proj`."""
    sizes = {"embed": layer.hidden_size, "mlp": layer.intermediate_size}
    out_axis, in_axis = STACK_AXES[name]
    return layer.num_experts, sizes[out_axis], sizes[in_axis]


def apply_stacks(
    layer: JaxExperts,
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    act_qtype: str | None = None,
) -> jax.Array:
    """As `ExpertsMethod.apply`, in plain JAX, for stacks that `grouped_matmul` takes."""
    num_tokens, k = expert_ids.shape
    slot_experts = expert_ids.reshape(-1)
    # Slots sorted by expert; within an expert in the tokens' order.
    order = jnp.argsort(slot_experts, stable=True)
    group_sizes = jnp.bincount(slot_experts, length=layer.num_experts).astype(jnp.int32)
    rows, row_experts = x[order // k], slot_experts[order]

    def project(name: str, rows: jax.Array) -> jax.Array:
        bias = getattr(layer, f"{name}_bias")
        y = grouped_matmul(rows, getattr(layer, name).get_value(), group_sizes, act_qtype=act_qtype)
        return y if bias is None else y + bias[...][row_experts]

    if layer.scales_input:
        rows = rows * expert_weights.reshape(-1)[order, None].astype(rows.dtype)
    outputs = project("down_proj", layer.gated_unit(project("gate_proj", rows), project("up_proj", rows)))
    # Back to each token's own slots, which are summed in their order whatever else is in the batch.
    outputs = jnp.zeros_like(outputs).at[order].set(outputs).reshape(num_tokens, k, -1).astype(jnp.float32)
    if not layer.scales_input:
        outputs = outputs * expert_weights[:, :, None]
    return outputs.sum(1).astype(x.dtype)
