from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.gates import gated
from jaxis.kernels.materialize import materialize
from jaxis.kernels.norms import rms_norm, row_moments
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import CausalConv
from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.ngram_embedding import NgramEmbedding
from jaxis.layers.ngram_hash import TokenWindow
from jaxis.layers.norm import JaxRmsNorm, norm_each_group
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import StateCacheSpec

State = tuple[jax.Array, jax.Array] | None
"""The last ids and the last inputs of the convolution; None without a cache."""

_LEAST_SCORE = 1e-6


class StreamNorm(JaxRmsNorm):
    """RMS norm of each of S streams x [T, S, E], with weights of its own for each."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return norm_each_group(x, self)


class NgramInjection(JaxModule):
    """Addition to each residual stream: a value of the token's n-grams, as far as their key fits the stream.

    `v_s = sigmoid(root(norm(key)_s . norm(x)_s / sqrt(E))) * value`
    `v + silu(conv(norm(v)))`

    where `root` is the signed square root. The convolution's taps are `window.size` tokens apart.

    Args:
      embedding: Embeddings [T, embed_size] of a token's n-grams.
    """

    def __init__(
        self, scope: LayerScope, embedding: NgramEmbedding, window: TokenWindow, *, embed_size: int, num_streams: int
    ) -> None:
        config = scope.config
        size: int = config["hidden_size"]
        all_streams, epsilon = num_streams * size, config["rms_norm_eps"]
        self.window, self.ple_embedding = window, embedding
        self.key_proj = linear(scope / "key_proj", embed_size, all_streams, axes=("embed", None))
        self.value_proj = linear(scope / "value_proj", embed_size, size, axes=("embed", None))
        self.norm_key, self.norm_query, self.norm_conv = (
            StreamNorm(all_streams, scope.rngs, epsilon=epsilon, dtype=scope.dtype, add_unit_offset=True)
            for _ in range(3)
        )
        width: int = config.get("ple_conv_kernel_size", 4)
        self.conv1d = CausalConv(
            scope / "conv1d", all_streams, width, use_bias=False, activation=None, dilation=window.size
        )

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec((self.window.state_array, self.conv1d.state_array))

    def __call__(
        self, state: State, x: jax.Array, metadata: AttentionMetadata, input_ids: jax.Array
    ) -> tuple[State, jax.Array]:
        """Returns the updated state and [T, S, E], to be added, for x [T, S, E] and input_ids i32 [T]."""
        of_ids, of_conv = (None, None) if state is None else state
        of_ids, window = self.window(of_ids, input_ids, metadata)
        embedded = self.ple_embedding(window)
        key = self.norm_key(self.key_proj(embedded).reshape(x.shape)).astype(jnp.float32)
        products = materialize(key * self.norm_query(x).astype(jnp.float32))
        gates = _gates(products)
        values = materialize(
            (gates[..., None] * self.value_proj(embedded)[:, None].astype(jnp.float32)).astype(x.dtype)
        )
        of_conv, mixed = self.conv1d(of_conv, self.norm_conv(values).reshape(x.shape[0], -1), metadata)
        out = values + gated(mixed, mixed, "sigmoid").reshape(x.shape)
        return None if of_ids is None or of_conv is None else (of_ids, of_conv), out


class Engram(JaxModule):
    """Adds to each residual stream a value of the token's n-grams, as far as their key fits the stream (V4.1).

    As `NgramInjection` without the convolution, with keys and value of one projection. Norms of keys and streams
    have weights `k_weight` and `q_weight` [S, E].
    """

    def __init__(
        self, scope: LayerScope, embedding: NgramEmbedding, window: TokenWindow, *, embed_size: int, num_streams: int
    ) -> None:
        config = scope.config
        self.window, self.ple_embedding = window, embedding
        self.norm_epsilon: float = config["rms_norm_eps"]
        shape = num_streams, config["hidden_size"]
        self.kv_proj = linear(scope / "kv_proj", embed_size, (num_streams + 1) * shape[1], axes=("embed", None))
        self.q_weight, self.k_weight = (
            make_parameter(scope.rngs, nnx.initializers.ones, shape, scope.dtype, axes=(None, None)) for _ in range(2)
        )

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec((self.window.state_array,))

    def __call__(
        self, state: tuple[jax.Array] | None, x: jax.Array, metadata: AttentionMetadata, input_ids: jax.Array
    ) -> tuple[tuple[jax.Array] | None, jax.Array]:
        """Returns the updated state and the streams [T, S, E] for x [T, S, E] and input_ids i32 [T]."""
        of_ids, window = self.window(None if state is None else state[0], input_ids, metadata)
        wide = x.astype(jnp.float32)
        found = self.kv_proj(self.ple_embedding(window)).astype(jnp.float32).reshape(len(x), -1, x.shape[-1])
        weight = self.q_weight[...].astype(jnp.float32) * self.k_weight[...].astype(jnp.float32)
        ones = jnp.ones(x.shape[-1], jnp.float32)
        key, query = (rms_norm(each, ones, epsilon=self.norm_epsilon) for each in (found[:, :-1], wide))
        gates = _gates(materialize(materialize(key * weight) * query))
        out = (wide + materialize(gates[..., None] * found[:, -1:])).astype(x.dtype)
        return None if of_ids is None else (of_ids,), out


def _gates(products: jax.Array) -> jax.Array:
    """Returns float32 [T, S] for the products [T, S, E] of normed keys and streams."""
    score = row_moments(products)[0][..., 0] * products.shape[-1] ** 0.5
    root = materialize(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), _LEAST_SCORE)))
    return gated(jnp.ones_like(root), root, "sigmoid")
