"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.layers.linear import JaxLinear, apply_together
from jaxis.layers.module import JaxModule, calls_are_observed

if TYPE_CHECKING:
    from jaxis.quantization.config import QuantizationConfig


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
}
# Those that a method's `apply_gated` knows, by its names.
GATED_KERNELS = {jax.nn.silu: "silu", _gelu_tanh: "gelu_tanh"}


def activation_function(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation that config.json calls `name`.

    Raises:
      ConfigError: It is not known.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act={name!r} in config.json is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class GatedMLP(JaxModule):
    """`down_proj(act(gate_proj(x)) * up_proj(x))` (arXiv:2002.05202).

    Args:
      hidden_size: E.
      intermediate_size: F.
      rngs: For the initial weights.
      activation: Applied to the gate.
      use_bias: Whether the projections have biases.
      packed_gate_up: The checkpoint has one `gate_up_proj` [2 F, E], gates first, in place of two matrices.
      dtype, quant_config, prefix: As for `JaxLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        rngs: nnx.Rngs,
        *,
        activation: Callable[[jax.Array], jax.Array],
        use_bias: bool = False,
        packed_gate_up: bool = False,
        dtype: Any,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        common = {"use_bias": use_bias, "dtype": dtype, "quant_config": quant_config}
        column, row = ("mlp", "embed"), ("embed", "mlp")
        self.gate_up_proj = None
        if packed_gate_up:
            self.gate_up_proj = JaxLinear(
                hidden_size, 2 * intermediate_size, rngs, kernel_axes=column, prefix=f"{prefix}.gate_up_proj", **common
            )
        else:
            self.gate_proj = JaxLinear(
                hidden_size, intermediate_size, rngs, kernel_axes=column, prefix=f"{prefix}.gate_proj", **common
            )
            self.up_proj = JaxLinear(
                hidden_size, intermediate_size, rngs, kernel_axes=column, prefix=f"{prefix}.up_proj", **common
            )
        self.down_proj = JaxLinear(
            intermediate_size, hidden_size, rngs, kernel_axes=row, prefix=f"{prefix}.down_proj", **common
        )
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        if self.gate_up_proj is not None:
            gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
            return self.down_proj(self.activation(gate) * up)
        gated = self._gated_in_one_kernel(x)
        if gated is None:
            gate, up = apply_together(x, self.gate_proj, self.up_proj)
            gated = self.activation(gate) * up
        return self.down_proj(gated)

    def _gated_in_one_kernel(self, x: jax.Array) -> jax.Array | None:
        gate, up = self.gate_proj, self.up_proj
        apply_gated = getattr(gate.quant_method, "apply_gated", None)
        kernel = GATED_KERNELS.get(self.activation)
        if apply_gated is None or kernel is None or gate.quant_method != up.quant_method:
            return None
        if gate.bias is not None or up.bias is not None or calls_are_observed():
            return None
        return apply_gated(gate, up, x, kernel)
