"""The projection from latents to the keys and values of each head, and its absorption into what is around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import make_parameter
from jaxis.quantization.methods import UnquantizedLinearMethod

if TYPE_CHECKING:
    from jaxis.quantization.config import LinearMethod, QuantizationConfig


class LatentUpProjection(JaxLinear):
    """`kv_b_proj`: the H heads' keys (N numbers each, without position) and values (V) of a latent of L numbers.

    Its `weight` is the checkpoint's, [H * (N + V), L]. Attention over latents needs it one head at a time and in both
    directions, which is no product of a whole layer; so a checkpoint's quantized weight is widened to the model's type
    once it is loaded, to the numbers that its own method multiplies by.

    Args:
      num_heads: H.
      latent_dim: L.
      key_dim, value_dim: N, V.
      rngs, dtype, quant_config, prefix: As for `JaxLinear`.
    """

    def __init__(
        self,
        num_heads: int,
        latent_dim: int,
        key_dim: int,
        value_dim: int,
        rngs: nnx.Rngs,
        *,
        dtype: Any,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        self.num_heads = num_heads
        self.key_dim = key_dim
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
        self.quant_method = _WidenedMethod(self.quant_method, dtype)

    def keys_and_values(self, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """latents [T, L] -> [T, H, N] and [T, H, V]."""
        weight = self._of_heads()
        out = jnp.einsum("tl,hol->tho", latents, weight)
        return out[..., : self.key_dim], out[..., self.key_dim :]

    def absorb_into_queries(self, queries: jax.Array) -> jax.Array:
        """queries [T, H, N] -> [T, H, L], whose products with latents are the queries' with the latents' keys."""
        return jnp.einsum("thn,hnl->thl", queries, self._of_heads()[:, : self.key_dim])

    def values_of(self, latents: jax.Array) -> jax.Array:
        """A latent of each head [T, H, L] -> its value [T, H, V]."""
        return jnp.einsum("thl,hvl->thv", latents, self._of_heads()[:, self.key_dim :])

    def _of_heads(self) -> jax.Array:
        """[H, N + V, L]."""
        return self.weight[...].reshape(self.num_heads, -1, self.input_size)


@dataclass(frozen=True)
class _WidenedMethod:
    """Loads the weight as `source` does and keeps it as a plain array of type `dtype`."""

    source: LinearMethod
    dtype: Any

    def create_weights(self, layer: JaxLinear, rngs: nnx.Rngs, dtype: Any) -> None:
        self.source.create_weights(layer, rngs, dtype)

    def apply(self, layer: JaxLinear, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        return UnquantizedLinearMethod().apply(layer, x, preferred_element_type=preferred_element_type)

    def process_weights_after_loading(self, layer: JaxLinear) -> None:
        if isinstance(self.source, UnquantizedLinearMethod):
            return
        # It may put another method in its place.
        layer.quant_method = self.source
        self.source.process_weights_after_loading(layer)
        rows = layer.quant_method.apply(layer, jnp.eye(layer.input_size), preferred_element_type=jnp.float32)
        layer.weight = make_parameter(
            nnx.Rngs(0), lambda *_: rows.T.astype(self.dtype), rows.shape[::-1], self.dtype, axes=layer.kernel_axes
        )
        layer.quant_method = UnquantizedLinearMethod()
