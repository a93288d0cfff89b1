"""Linear layers. Weights keep the checkpoint's layout: `[out, in]`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.quantization import ApplyingQuantMethod, QuantizationConfig
from jaxis.kernels.weights import fused_matmul, matmul
from jaxis.layers.addition import LowRankAddition, changes_of
from jaxis.layers.module import Initializer, JaxModule, calls_are_observed, make_parameter
from jaxis.layers.weight_format import WeightSlot
from jaxis.layers.weight_loader import default_weight_loader
from jaxis.layers.weight_method import create_weights

DEFAULT_INIT: Initializer = nnx.initializers.normal(stddev=0.02)


class JaxLinear(JaxModule):
    """`y = x weight^T + bias`.

    Args:
      use_bias: True for a `bias` [out].
      kernel_axes: Logical axes of the weight's (out, in).
      quant_config: Configuration that decides how the weight is stored.
      prefix: Dotted name of the layer, which `quant_config` looks up.

    Attributes:
      addition: Addition of adapters to the product; None for none.
      has_moved_rows: True if devices have the outputs in another order than the checkpoint, or repeated.
    """

    weight: nnx.Param
    addition: LowRankAddition | None = None
    has_moved_rows = False
    can_be_packed = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = True,
        dtype: DTypeLike = jnp.float32,
        kernel_axes: tuple[str | None, str | None] = (None, None),
        kernel_init: Initializer = DEFAULT_INIT,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        self.input_size = input_size
        self.output_size = output_size
        self.kernel_axes = kernel_axes
        self.kernel_init = kernel_init
        self.quant_method = create_weights(self, quant_config, prefix, rngs, dtype)
        self.bias = None
        if use_bias:
            self.bias = make_parameter(rngs, nnx.initializers.zeros, (output_size,), dtype, axes=kernel_axes[:1])

    @property
    def weight_slots(self) -> Sequence[WeightSlot]:
        return [WeightSlot("weight", (self.output_size, self.input_size), self.kernel_axes)]

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...]

    def product(self, x: jax.Array, *, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        """Returns the product [..., out] of x [..., in], without the bias, in `preferred_element_type` or x's type."""
        if self.addition is not None:
            return self.addition.changed_product(x, self.weight.get_value(), preferred_element_type, self.kernel_axes)
        if isinstance(self.quant_method, ApplyingQuantMethod):
            return self.quant_method.apply(self, x, preferred_element_type=preferred_element_type)
        return matmul(x, self.weight.get_value(), preferred_element_type=preferred_element_type, axes=self.kernel_axes)


def apply_together(x: jax.Array, *layers: JaxLinear) -> list[jax.Array]:
    """Returns the output of each layer for x [..., in], computed in one kernel if there is one for their weights."""
    results = None
    if can_be_fused(*layers):
        results = fused_matmul(x, [layer.weight.get_value() for layer in layers], *changes_of(x, layers))
    if results is None:
        return [layer(x) for layer in layers]
    biased = zip(layers, results, strict=True)
    return [y if layer.bias is None else y + layer.bias[...] for layer, y in biased]


def can_be_fused(*layers: JaxLinear) -> bool:
    """Returns whether one kernel may compute all layers: nothing observes calls, and no layer overrides `product`."""
    return not calls_are_observed() and not any(isinstance(each.quant_method, ApplyingQuantMethod) for each in layers)


class JaxEinsum(JaxModule):
    """`y = einsum(einsum_str, x, weight) + bias`, for weights with more than two axes, such as [heads, head_dim, in].

    The checkpoint may have the weight with neighbouring axes merged ([heads * head_dim, in]). Any other shape is an
    error.
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        rngs: nnx.Rngs,
        *,
        bias_shape: tuple[int, ...] | None = None,
        dtype: DTypeLike = jnp.float32,
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
        y = jnp.einsum(self.einsum_str, x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


def load_reshaped(param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
    """Loads a tensor after splitting or merging neighbouring axes to the parameter's shape: a `weight_loader`."""
    shape = param.get_value().shape
    if _merges(shape, tensor.shape) or _merges(tensor.shape, shape):
        tensor = tensor.reshape(shape)
    default_weight_loader(param, tensor, shard_id)


def _merges(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Returns whether `coarse` is `fine` with runs of neighbouring axes multiplied together."""
    sizes = iter(fine)
    for target in coarse:
        product = next(sizes, None)
        while product is not None and product < target:
            size = next(sizes, None)
            product = None if size is None else product * size
        if product != target:
            return False
    return all(size == 1 for size in sizes)
