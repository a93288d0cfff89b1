"""Feed-forward blocks, with a gate and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.errors import ConfigError
from jaxis.kernels.activations import gelu_tanh, relu_squared
from jaxis.kernels.gates import gated
from jaxis.kernels.materialize import materialize
from jaxis.kernels.weights import GatedUnit, gated_matmul
from jaxis.layers.addition import changes_of
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.glu import GLU
from jaxis.layers.leaves import linear
from jaxis.layers.linear import apply_together, can_be_fused
from jaxis.layers.module import JaxModule
from jaxis.layers.row_order import RowOrder, has_movable_rows, put_in_order
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.parallel.mesh import devices_of_layer


class FeedForward(Protocol):
    def __call__(self, x: jax.Array, metadata: AttentionMetadata | None, /) -> jax.Array:
        """Returns [T, E] for x [T, E]; the step's batch tells padding (None: no row is padding)."""
        ...


def _gelu(x: jax.Array) -> jax.Array:
    return gated(x.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]), "normal_cdf").reshape(x.shape)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": relu_squared,
}


def activation_function(name: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation that config.json calls `name`. Raises ConfigError if the activation is unknown."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act={name!r} in config.json is not supported; known: {', '.join(ACTIVATIONS)}", keys=["hidden_act"]
        )
    return ACTIVATIONS[name]


class GatedMLP(JaxModule):
    """`down_proj(act(gate_proj(x)) * up_proj(x))` (arXiv:2002.05202).

    Args:
      intermediate_size: F; None means config.json's `intermediate_size`.
      activation: Name of the gate's activation; None means config.json's `hidden_act`.
      gated_unit: Combination of gate and up that replaces `act(gate) * up`; None for that.
      use_bias: True if the projections have biases.
      down_bias: True if `down_proj` has a bias; None means `use_bias`.
      packed_gate_up: True if the checkpoint has one matrix `gate_up_proj` [2 F, E], gates first, instead of two.
      interleaved: True if the rows of that matrix alternate between gate and up.
      multipliers: Multipliers of the gate before its activation, and of the output.

    Raises:
      ConfigError: The activation is unknown.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        intermediate_size: int | None = None,
        activation: str | None = None,
        gated_unit: GatedUnit | None = None,
        use_bias: bool = False,
        down_bias: bool | None = None,
        packed_gate_up: bool = False,
        interleaved: bool = False,
        multipliers: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        size_in: int = scope.config["hidden_size"]
        size: int = scope.config["intermediate_size"] if intermediate_size is None else intermediate_size
        column, row = ("mlp", "embed"), ("embed", "mlp")
        # The number of parts of the packed projection's output, each with gates and as many ups.
        self.num_parts = size if interleaved else 1
        self.gate_up_proj = None
        if packed_gate_up:
            self.gate_up_proj = linear(scope / "gate_up_proj", size_in, 2 * size, axes=column, use_bias=use_bias)
        else:
            self.gate_proj = linear(scope / "gate_proj", size_in, size, axes=column, use_bias=use_bias)
            self.up_proj = linear(scope / "up_proj", size_in, size, axes=column, use_bias=use_bias)
        down_bias = use_bias if down_bias is None else down_bias
        self.down_proj = linear(scope / "down_proj", size, size_in, axes=row, use_bias=down_bias)
        name: str = activation or scope.config.get("hidden_act", "silu")
        self.gated_unit: GatedUnit = gated_unit or GLU(activation_function(name))
        self.gate_multiplier, self.output_multiplier = multipliers

    def __call__(self, x: jax.Array, _metadata: AttentionMetadata | None = None) -> jax.Array:
        gated = self._gated_in_one_kernel(x)
        if gated is None:
            gate, up = self._gate_and_up(x)
            # Rounded, so that no product is fused with the activation.
            gate = gate if self.gate_multiplier == 1 else materialize(scaled(gate, self.gate_multiplier))
            gated = self.gated_unit(gate, up).reshape(*x.shape[:-1], -1)
        return scaled(self.down_proj(gated), self.output_multiplier)

    def _gate_and_up(self, x: jax.Array) -> list[jax.Array]:
        """Returns gate and up, [..., F] or [..., parts, F / parts], for x [..., E]."""
        if self.gate_up_proj is None:
            return apply_together(x, self.gate_proj, self.up_proj)
        packed = self.gate_up_proj(x)
        return jnp.split(packed.reshape(*packed.shape[:-1], self.num_parts, -1), 2, axis=-1)

    def after_loading(self) -> None:
        """Puts the rows of a packed projection in the order of the devices, each with its gates before its ups."""
        num_devices, packed = devices_of_layer(), self.gate_up_proj
        if num_devices == 1 or packed is None or self.num_parts > 1 or not has_movable_rows(packed):
            return
        if packed.output_size % (2 * num_devices) == 0:
            rows = np.arange(packed.output_size).reshape(2, num_devices, -1).swapaxes(0, 1)
            put_in_order(RowOrder(packed, rows.ravel()))
            self.num_parts = num_devices

    def _gated_in_one_kernel(self, x: jax.Array) -> jax.Array | None:
        unit = self.gated_unit
        if self.gate_up_proj is not None or self.gate_multiplier != 1 or not isinstance(unit, GLU):
            return None
        gate, up = self.gate_proj, self.up_proj
        if gate.bias is not None or up.bias is not None or not can_be_fused(gate, up):
            return None
        weights = gate.weight.get_value(), up.weight.get_value()
        return gated_matmul(x, *weights, unit.activation, *changes_of(x, [gate, up]))


class UngatedMLP(JaxModule):
    """`down_proj(act_fn(up_proj(x)))`; the activation is a function, or a module with parameters.

    `intermediate_size` F is config.json's by default. With `use_bias`, the projections have biases.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        activation: Callable[[jax.Array], jax.Array],
        intermediate_size: int | None = None,
        use_bias: bool = False,
    ) -> None:
        size_in: int = scope.config["hidden_size"]
        size: int = scope.config["intermediate_size"] if intermediate_size is None else intermediate_size
        self.up_proj = linear(scope / "up_proj", size_in, size, axes=("mlp", "embed"), use_bias=use_bias)
        self.act_fn = activation
        self.down_proj = linear(scope / "down_proj", size, size_in, axes=("embed", "mlp"), use_bias=use_bias)

    def __call__(self, x: jax.Array, _metadata: AttentionMetadata | None = None) -> jax.Array:
        return self.down_proj(self.act_fn(self.up_proj(x)))
