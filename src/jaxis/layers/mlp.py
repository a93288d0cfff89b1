"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule

if TYPE_CHECKING:
    from jaxis.quantization.config import QuantizationConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


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
      use_bias: Whether the three projections have biases.
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
        dtype: Any,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        common = {"use_bias": use_bias, "dtype": dtype, "quant_config": quant_config}
        column, row = ("mlp", "embed"), ("embed", "mlp")
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
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
