from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.quantization import QuantizationConfig
from jaxis.kernels.native_constants import PANEL_ROWS
from jaxis.kernels.weights import PackedWeight, head_matmul
from jaxis.kernels.weights.packed_weight import device_array
from jaxis.kernels.weights.stack_packer import pack_stack
from jaxis.layers.addition import HeadwiseAddition
from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_loader import place_array

Matrix = TypeVar("Matrix", np.ndarray, jax.Array)


class LatentUpProjection(JaxLinear):
    """`kv_b_proj`: maps a latent (L elements) to the keys (N, without position) and values (V) of H heads.

    Its `weight` is the checkpoint's, [H * (N + V), L]. Attention over latents absorbs it into queries and outputs: it
    multiplies by it one head at a time, in both directions, which the kernels for whole layers cannot do. A quantized
    weight is therefore dequantized on loading: to the model's type, or, packed for the native kernels, to float32
    (bfloat16 where that is exact), unless it `keeps_panels`. Packed, it becomes `key_weight`, H matrices [L, N], and
    `value_weight`, H matrices [V, L].

    Attributes:
      head_addition: Addition of adapters to the absorbed projection; None for none.
    """

    head_addition: HeadwiseAddition | None = None

    def __init__(
        self,
        num_heads: int,
        latent_dim: int,
        key_dim: int,
        value_dim: int,
        rngs: nnx.Rngs,
        *,
        dtype: DTypeLike,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        self.num_heads = num_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.key_weight = self.value_weight = None
        super().__init__(
            latent_dim,
            num_heads * (key_dim + value_dim),
            rngs,
            use_bias=False,
            dtype=dtype,
            kernel_axes=("heads", None),
            quant_config=quant_config,
            prefix=prefix,
        )
        self.dtype = dtype

    @property
    def keeps_panels(self) -> bool:
        """True if a packed weight stays as it is: its panels are those of the heads, one after the other."""
        return self.key_dim == 0 and self.value_dim % PANEL_ROWS == 0

    def keys_and_values(self, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys [T, H, N] and values [T, H, V] of latents [T, L]."""
        if self.key_weight is None:
            out = self.product(latents).reshape(latents.shape[0], self.num_heads, -1)
            return out[..., : self.key_dim], out[..., self.key_dim :]
        # Multiplying by the identity yields the weight itself.
        numbers = jnp.eye(self.key_dim, dtype=latents.dtype)[:, None].repeat(self.num_heads, axis=1)
        keys = jnp.einsum("tl,nhl->thn", latents, self.absorb_into_queries(numbers))
        return keys, self.values_of(latents[:, None].repeat(self.num_heads, axis=1))

    def absorb_into_queries(self, queries: jax.Array) -> jax.Array:
        """Returns [T, H, L], whose products with latents are those of queries [T, H, N] with the latents' keys."""
        if self.head_addition is not None:
            queries = self.head_addition.scaled_queries(queries)
        if self.key_weight is not None:
            absorbed = head_matmul(queries, self.key_weight.get_value())
        else:
            absorbed = head_matmul(queries, self._of_heads()[:, : self.key_dim].swapaxes(1, 2))
        if self.head_addition is None:
            return absorbed
        return (absorbed.astype(jnp.float32) + self.head_addition.of_queries(queries)).astype(absorbed.dtype)

    def values_of(self, latents: jax.Array) -> jax.Array:
        """Returns values [T, H, V] of one latent per head [T, H, L]."""
        if self.value_weight is not None:
            values = head_matmul(latents, self.value_weight.get_value())
        else:
            values = head_matmul(latents, self._of_heads()[:, self.key_dim :])
        if self.head_addition is None:
            return values
        changed = values.astype(jnp.float32) + self.head_addition.of_latents(latents)
        return self.head_addition.scaled_values(changed).astype(values.dtype)

    def dequantized(self) -> jax.Array:
        if self.key_weight is None or self.value_weight is None:
            return self.weight[...].astype(jnp.float32)
        # Multiplying by the identity yields the weight itself.
        keys, values = (
            head_matmul(jnp.eye(size)[:, None].repeat(self.num_heads, axis=1), weight.get_value())
            for size, weight in ((self.key_dim, self.key_weight), (self.input_size, self.value_weight))
        )
        return jnp.concatenate([keys.swapaxes(0, 1), values.transpose(1, 2, 0)], axis=1).reshape(-1, self.input_size)

    def after_loading(self) -> None:
        """Dequantizes the weight, or packs it head by head."""
        weight = self.weight.get_value()
        if isinstance(weight, jax.Array):
            return
        if isinstance(weight, PackedWeight):
            self.take_packed(*self.packed_heads(weight))
            return
        floats = self.product(jnp.eye(self.input_size), preferred_element_type=jnp.float32).T
        self.weight.set_value(place_array(floats.astype(self.dtype), self.kernel_axes))

    def take_packed(self, key_weight: PackedWeight | jax.Array | None, value_weight: PackedWeight | None) -> None:
        """Replaces `weight` by these; None for weights that come later."""
        self.key_weight, self.value_weight = (nnx.Param(cast(Any, each)) for each in (key_weight, value_weight))
        del self.weight

    def packed_heads(
        self, weight: PackedWeight, dtype: DTypeLike | None = None
    ) -> tuple[PackedWeight | jax.Array, PackedWeight]:
        """Returns `key_weight` and `value_weight`: in `dtype`, or bfloat16 where that is exact, else float32."""
        if self.keeps_panels and weight.master is None:
            panels = np.asarray(weight.data).reshape(self.num_heads, -1, weight.data.shape[-1])
            no_keys = jnp.zeros((self.num_heads, self.input_size, 0))
            return no_keys, dataclasses.replace(weight, data=device_array(panels), out_size=self.value_dim)
        floats = np.asarray(weight.matmul(jnp.eye(self.input_size)).T)
        if dtype is None:
            rounded = floats.astype(ml_dtypes.bfloat16)
            dtype = rounded.dtype if np.array_equal(rounded.astype(np.float32), floats) else floats.dtype
        keys, values = self.by_heads(floats.astype(jnp.dtype(dtype)))
        return pack_stack(keys) if self.key_dim else jnp.asarray(keys), pack_stack(values)

    def by_heads(self, weight: Matrix) -> tuple[Matrix, Matrix]:
        """Splits a weight [H * (N + V), L] into [H, L, N] for keys and [H, V, L] for values."""
        heads = weight.reshape(self.num_heads, -1, self.input_size)
        return heads[:, : self.key_dim].swapaxes(1, 2), heads[:, self.key_dim :]

    def _of_heads(self) -> jax.Array:
        return self.weight[...].reshape(self.num_heads, -1, self.input_size)
