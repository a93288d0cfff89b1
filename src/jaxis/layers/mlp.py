"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.errors import ConfigError
from jaxis.kernels.activations import gelu_tanh
from jaxis.kernels.weights import gated_matmul
from jaxis.layers.leaves import linear
from jaxis.layers.linear import apply_together, can_be_fused
from jaxis.layers.module import JaxModule
from jaxis.layers.row_order import RowOrder, has_movable_rows, put_in_order
from jaxis.layers.scope import LayerScope
from jaxis.parallel.mesh import devices_of_layer


class FeedForward(Protocol):
    """The position-wise part of a decoder layer."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        ...


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": jax.nn.relu,
}


def activation_function(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation that config.json calls `name`.

    Raises:
      ConfigError: The activation is unknown.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act={name!r} in config.json is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class GatedMLP(JaxModule):
    """`down_proj(act(gate_proj(x)) * up_proj(x))` (arXiv:2002.05202).

    Args:
      scope: The layer's scope.
      intermediate_size: F; None means config.json's `intermediate_size`.
      activation: Name of the gate's activation; None means config.json's `hidden_act`.
      use_bias: Whether the projections have biases.
      packed_gate_up: Whether the checkpoint has one `gate_up_proj` [2 F, E], gates first, instead of two matrices.

    Raises:
      ConfigError: The activation is unknown.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        intermediate_size: int | None = None,
        activation: str | None = None,
        use_bias: bool = False,
        packed_gate_up: bool = False,
    ) -> None:
        size_in: int = scope.config["hidden_size"]
        size: int = scope.config["intermediate_size"] if intermediate_size is None else intermediate_size
        column, row = ("mlp", "embed"), ("embed", "mlp")
        self.gate_up_proj = None
        # Parts of the packed projection's output, each with gates and as many ups.
        self.num_parts = 1
        if packed_gate_up:
            self.gate_up_proj = linear(scope / "gate_up_proj", size_in, 2 * size, axes=column, use_bias=use_bias)
        else:
            self.gate_proj = linear(scope / "gate_proj", size_in, size, axes=column, use_bias=use_bias)
            self.up_proj = linear(scope / "up_proj", size_in, size, axes=column, use_bias=use_bias)
        self.down_proj = linear(scope / "down_proj", size, size_in, axes=row, use_bias=use_bias)
        self.activation = activation_function(activation or scope.config.get("hidden_act", "silu"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        if self.gate_up_proj is not None:
            packed = self.gate_up_proj(x)
            parts = packed.reshape(*packed.shape[:-1], self.num_parts, -1)
            gate, up = jnp.split(parts, 2, axis=-1)
            return self.down_proj((self.activation(gate) * up).reshape(*x.shape[:-1], -1))
        gated = self._gated_in_one_kernel(x)
        if gated is None:
            gate, up = apply_together(x, self.gate_proj, self.up_proj)
            gated = self.activation(gate) * up
        return self.down_proj(gated)

    def after_loading(self) -> None:
        """Puts the rows of a packed projection in the order of the devices, each with its gates before its ups."""
        num_devices = devices_of_layer()
        packed = self.gate_up_proj
        if num_devices == 1 or packed is None or not has_movable_rows(packed):
            return
        if packed.output_size % (2 * num_devices) == 0:
            rows = np.arange(packed.output_size).reshape(2, num_devices, -1).swapaxes(0, 1)
            put_in_order(RowOrder(packed, rows.ravel()))
            self.num_parts = num_devices

    def _gated_in_one_kernel(self, x: jax.Array) -> jax.Array | None:
        gate, up = self.gate_proj, self.up_proj
        if gate.bias is not None or up.bias is not None or not can_be_fused(gate, up):
            return None
        return gated_matmul(x, gate.weight.get_value(), up.weight.get_value(), self.activation)
