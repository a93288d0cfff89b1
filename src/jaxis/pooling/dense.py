"""sentence-transformers' Dense modules: linear layers on a pooled vector. They are never quantized."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels import native
from jaxis.kernels.materialize import in_whole_vectors
from jaxis.kernels.weights import dequantize, pack
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.pooling.pooling_config import DenseActivation, DenseSettings
from jaxis.pooling.score_head import tanh
from jaxis.quantization.formats.gguf import read_blocks

if TYPE_CHECKING:
    from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint

_ACTIVATIONS: Mapping[DenseActivation, Callable[[jax.Array], jax.Array]] = {
    "Identity": lambda x: x,
    "Tanh": tanh,
    "ReLU": jax.nn.relu,
    "GELU": functools.partial(in_whole_vectors, functools.partial(jax.nn.gelu, approximate=False)),
}


class Dense(JaxModule):
    """`act(linear(x))` with loaded weights, in float32.

    Args:
      settings: Settings from the module's folder, or from the GGUF file with its weights.

    Raises:
      CheckpointError: The weights are missing or do not match the settings.
    """

    def __init__(self, settings: DenseSettings) -> None:
        path = Path(settings.folder)
        self.act_fn = _ACTIVATIONS[settings.activation]
        self.linear = JaxLinear(
            settings.input_size, settings.output_size, nnx.Rngs(0), use_bias=settings.use_bias, dtype=jnp.float32
        )
        shape = (settings.output_size, settings.input_size)
        expected: dict[str, tuple[int, ...]] = {f"{settings.name}.weight": shape}
        if settings.use_bias:
            expected[f"{settings.name}.bias"] = (settings.output_size,)
        with open_checkpoint(path) as checkpoint:
            of_gguf = None if path.is_dir() else cast("GGUFCheckpoint", checkpoint)
            # A GGUF file contains the whole model.
            names = [each for each in checkpoint.names() if of_gguf is None or each.startswith(f"{settings.name}.")]
            if of_gguf and names == [*expected] and of_gguf.block_type(names[0]).dtype is None:
                blocks = read_blocks(of_gguf.block_type(names[0]), of_gguf.tensor(names[0]), shape)
                tensors = {names[0]: np.asarray(dequantize(blocks), np.float32)}
            else:
                shapes = {each: checkpoint.info(each).shape for each in names}
                if shapes != expected:
                    raise CheckpointError(f"{path} has the tensors {shapes}; its settings ask for {expected}")
                # A copy: the file is closed.
                tensors = {each: np.array(checkpoint.tensor(each), np.float32) for each in expected}
        weight = tensors[f"{settings.name}.weight"]
        self.linear.weight.set_value(pack(weight) if native.usable() else jnp.asarray(weight))
        if self.linear.bias is not None:
            self.linear.bias.set_value(jnp.asarray(tensors[f"{settings.name}.bias"]))

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [R, in] -> [R, out]."""
        return self.act_fn(self.linear(x))


class DenseLayers(JaxModule):
    """Dense modules in sequence. Raises CheckpointError as `Dense` does."""

    def __init__(self, settings: Sequence[DenseSettings]) -> None:
        self.layers = [Dense(each) for each in settings]

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 [R, in] -> [R, out]."""
        for layer in self.layers:
            x = layer(x)
        return x
