"""How layers of experts store and apply their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.layers.module import make_parameter
from jaxis.loading.expert_stacks import load_expert

if TYPE_CHECKING:
    from jaxis.layers.experts import JaxExperts
    from jaxis.quantization.config import ExpertsMethod
    from jaxis.quantization.methods import WeightScheme

# Weights are [X, out, in] and the rows of a group stand together: x [N, in] . weight [X, out, in] -> [N, out].
_ROWS_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def select_experts_method(layer: JaxExperts, scheme: WeightScheme | None) -> ExpertsMethod:
    """The method of every layer of experts: the one place that chooses among implementations.

    Args:
      layer: Whose sizes are set.
      scheme: How its weights are quantized; None is not at all.
    """
    del layer
    if scheme is not None:
        raise NotImplementedError("quantized experts")
    return UnquantizedExpertsMethod()


@dataclass(frozen=True)
class UnquantizedExpertsMethod:
    """The weights as they stand in the checkpoint, in the model's data type; dropless, in plain JAX."""

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        wide = (layer.num_experts, layer.intermediate_size, layer.hidden_size)
        narrow = (layer.num_experts, layer.hidden_size, layer.intermediate_size)
        column, row = ("expert", "mlp", "embed"), ("expert", "embed", "mlp")
        layer.gate_proj = make_parameter(rngs, layer.kernel_init, wide, dtype, axes=column)
        layer.up_proj = make_parameter(rngs, layer.kernel_init, wide, dtype, axes=column)
        layer.down_proj = make_parameter(rngs, layer.kernel_init, narrow, dtype, axes=row)

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        load_expert(getattr(layer, stack_name), expert, tensor)

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        num_tokens, k = expert_ids.shape
        slot_experts = expert_ids.reshape(-1)
        # Slots sorted by expert; within an expert in the tokens' order.
        order = jnp.argsort(slot_experts, stable=True)
        group_sizes = jnp.bincount(slot_experts, length=layer.num_experts).astype(jnp.int32)
        rows, row_experts = x[order // k], slot_experts[order]

        def project(name: str, rows: jax.Array) -> jax.Array:
            bias = getattr(layer, f"{name}_bias")
            y = jax.lax.ragged_dot_general(rows, getattr(layer, name)[...], group_sizes, _ROWS_BY_GROUP)
            return y if bias is None else y + bias[...][row_experts]

        if layer.scales_input:
            rows = rows * expert_weights.reshape(-1)[order, None].astype(rows.dtype)
        outputs = project("down_proj", layer.gated_unit(project("gate_proj", rows), project("up_proj", rows)))
        # Back to each token's own slots, which are summed in their order whatever else is in the batch.
        outputs = jnp.zeros_like(outputs).at[order].set(outputs).reshape(num_tokens, k, -1).astype(jnp.float32)
        if not layer.scales_input:
            outputs = outputs * expert_weights[:, :, None]
        return outputs.sum(1).astype(x.dtype)

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Nothing to repack."""
