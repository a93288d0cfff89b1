"""Linear layers. Weights keep the checkpoint's layout: `[out, in]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.module import Initializer, JaxModule, calls_are_observed, make_parameter
from jaxis.quantization.methods import select_method

if TYPE_CHECKING:
    from jaxis.quantization.config import QuantizationConfig

DEFAULT_INIT: Initializer = nnx.initializers.normal(stddev=0.02)


class JaxLinear(JaxModule):
    """`y = x weight^T + bias`.

    Args:
      input_size: Features in.
      output_size: Features out.
      rngs: For the initial weights.
      use_bias: Whether there is a `bias` [out].
      dtype: Data type of the weights.
      kernel_axes: Logical axes of the weight's (out, in).
      kernel_init: Initializer of the weight.
      quant_config: Decides how the weight is stored and applied.
      prefix: The layer's dotted name, by which `quant_config` finds it.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = True,
        dtype: Any = jnp.float32,
        kernel_axes: tuple[str | None, str | None] = (None, None),
        kernel_init: Initializer = DEFAULT_INIT,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        self.input_size = input_size
        self.output_size = output_size
        self.kernel_axes = kernel_axes
        self.kernel_init = kernel_init
        method = quant_config.get_quant_method(self, prefix) if quant_config is not None else None
        self.quant_method = method or select_method(self, None)
        self.quant_method.create_weights(self, rngs, dtype)
        self.bias = None
        if use_bias:
            self.bias = make_parameter(rngs, nnx.initializers.zeros, (output_size,), dtype, axes=kernel_axes[:1])

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] -> [..., out]."""
        y = self.quant_method.apply(self, x)
        return y if self.bias is None else y + self.bias[...]


def apply_together(x: jax.Array, *layers: JaxLinear) -> list[jax.Array]:
    """What each of the layers makes of x [..., in]; in one kernel where their method has one for that."""
    methods = [layer.quant_method for layer in layers]
    together = getattr(methods[0], "apply_together", None)
    if together is None or any(method != methods[0] for method in methods) or calls_are_observed():
        return [layer(x) for layer in layers]
    results = together(layers, x)
    if results is None:
        return [layer(x) for layer in layers]
    biased = zip(layers, results, strict=True)
    return [y if layer.bias is None else y + layer.bias[...] for layer, y in biased]


class JaxEinsum(JaxModule):
    """`y = einsum(einsum_str, x, weight) + bias`, for weights with more than two axes, such as [heads, head_dim, in].

    The checkpoint may hold the weight with neighbouring axes merged ([heads * head_dim, in]): that is the same
    memory, so it is reshaped while loading. Any other shape is an error.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        rngs: nnx.Rngs,
        *,
        bias_shape: tuple[int, ...] | None = None,
        dtype: Any = jnp.float32,
        kernel_axes: tuple[str | None, ...] | None = None,
        kernel_init: Initializer = DEFAULT_INIT,
    ) -> None:
        self.einsum_str = einsum_str
        axes = kernel_axes or (None,) * len(kernel_shape)
        self.weight = make_parameter(rngs, kernel_init, kernel_shape, dtype, axes=axes, weight_loader=load_reshaped)
        self.bias = None
        if bias_shape is not None:
            bias_axes = axes[: len(bias_shape)]
            self.bias = make_parameter(
                rngs, nnx.initializers.zeros, bias_shape, dtype, axes=bias_axes, weight_loader=load_reshaped
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        """x in the first operand's shape -> the einsum's output."""
        y = jnp.einsum(self.einsum_str, x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


def load_reshaped(param: nnx.Param, tensor: Any, shard_id: str | int | None = None) -> None:
    """A `weight_loader` that splits or merges neighbouring axes of the checkpoint's tensor to the parameter's shape."""
    from jaxis.layers.weight_loader import default_weight_loader

    shape = param.get_value().shape
    if _merges(shape, tensor.shape) or _merges(tensor.shape, shape):
        tensor = tensor.reshape(shape)
    default_weight_loader(param, tensor, shard_id)


def _merges(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Whether `coarse` is `fine` with runs of neighbouring axes multiplied together."""
    sizes = iter(fine)
    for target in coarse:
        product = next(sizes, None)
        while product is not None and product < target:
            size = next(sizes, None)
            product = None if size is None else product * size
        if product != target:
            return False
    return next(sizes, None) is None
