"""sentence-transformers' Dense modules: linear layers on a pooled vector. They are never quantized."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels import native
from jaxis.kernels.materialize import in_whole_vectors
from jaxis.kernels.weights import pack
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule
from jaxis.loading.checkpoint import Checkpoint
from jaxis.pooling.score_head import tanh
from jaxis.pooling.settings import DenseActivation, DenseSettings

_ACTIVATIONS: Mapping[DenseActivation, Callable[[jax.Array], jax.Array]] = {
    "Identity": lambda x: x,
    "Tanh": tanh,
    "ReLU": jax.nn.relu,
    "GELU": functools.partial(in_whole_vectors, functools.partial(jax.nn.gelu, approximate=False)),
}


class Dense(JaxModule):
    """`act(linear(x))`, with its weights, in float32.

    Args:
      settings: What its folder says.

    Raises:
      CheckpointError: The weights are missing, or are others.
    """

    def __init__(self, settings: DenseSettings) -> None:
        folder = Path(settings.folder)
        self.act_fn = _ACTIVATIONS[settings.activation]
        self.linear = JaxLinear(
            settings.input_size, settings.output_size, nnx.Rngs(0), use_bias=settings.use_bias, dtype=jnp.float32
        )
        expected: dict[str, tuple[int, ...]] = {"linear.weight": (settings.output_size, settings.input_size)}
        if settings.use_bias:
            expected["linear.bias"] = (settings.output_size,)
        with Checkpoint(folder) as checkpoint:
            shapes = {name: checkpoint.info(name).shape for name in checkpoint.names()}
            if shapes != expected:
                raise CheckpointError(f"{folder} has the tensors {shapes}; its config.json asks for {expected}")
            # A copy: the file is closed.
            tensors = {name: np.array(checkpoint.tensor(name), np.float32) for name in expected}
        weight = tensors["linear.weight"]
        self.linear.weight.set_value(pack(weight) if native.usable() else jnp.asarray(weight))
        if self.linear.bias is not None:
            self.linear.bias.set_value(jnp.asarray(tensors["linear.bias"]))

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [R, in] -> [R, out]."""
        return self.act_fn(self.linear(x))


class DenseLayers(JaxModule):
    """Dense modules one after the other.

    Args:
      settings: One or more, of sizes that go together.

    Raises:
      CheckpointError: See `Dense`.
    """

    def __init__(self, settings: Sequence[DenseSettings]) -> None:
        self.layers = [Dense(each) for each in settings]

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [R, in] -> [R, out]."""
        for layer in self.layers:
            x = layer(x)
        return x
