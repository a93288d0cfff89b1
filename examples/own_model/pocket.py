"""Pocket, a language model as one writes it in Flax NNX to try an idea: no cache, no batch, one sequence at a time.

Attention and MLP read the same normed input, side by side, and the MLP squares what ReLU leaves.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Config = dict[str, Any]


def matrix(rngs: nnx.Rngs, size_out: int, size_in: int) -> nnx.Param[jax.Array]:
    """A random weight [out, in]."""
    return nnx.Param(jax.random.normal(rngs.params(), (size_out, size_in)) * size_in**-0.5)


def norm(rngs: nnx.Rngs, size: int) -> nnx.Param[jax.Array]:
    """The random weight of a norm [size]."""
    return nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (size,)))


def normed(x: jax.Array, weight: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """RMSNorm over the last axis."""
    return weight * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """RoPE on [T, H, D]: the first half of each head with the second."""
    half = x.shape[-1] // 2
    angles = jnp.arange(len(x))[:, None, None] * theta ** (-jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nnx.Module):
    """`x + attention(norm(x)) + mlp(norm(x))`"""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        size, head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        self.norm = norm(rngs, size)
        self.q, self.k = matrix(rngs, heads, size), matrix(rngs, kv_heads, size)
        self.v, self.o = matrix(rngs, kv_heads, size), matrix(rngs, size, heads)
        self.q_norm, self.k_norm = norm(rngs, head_dim), norm(rngs, head_dim)
        self.up = matrix(rngs, config["intermediate_size"], size)
        self.down = matrix(rngs, size, config["intermediate_size"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, E] -> [T, E]."""
        y = normed(x, self.norm[...])
        mlp = jnp.square(jax.nn.relu(y @ self.up[...].T)) @ self.down[...].T
        return x + self._attention(y) + mlp

    def _attention(self, y: jax.Array) -> jax.Array:
        head_dim, theta = self.config["head_dim"], self.config["rope_theta"]
        q, k, v = ((y @ each[...].T).reshape(len(y), -1, head_dim) for each in (self.q, self.k, self.v))
        q, k = rotated(normed(q, self.q_norm[...]), theta), rotated(normed(k, self.k_norm[...]), theta)
        groups = q.shape[1] // k.shape[1]
        k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
        scores = jnp.einsum("thd,shd->hts", q, k) * head_dim**-0.5
        scores = jnp.where(jnp.tri(len(y), dtype=bool), scores, -jnp.inf)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v).reshape(len(y), -1) @ self.o[...].T


class Pocket(nnx.Module):
    """Embeddings, layers, and a head that is the embeddings."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embeddings = matrix(rngs, config["vocab_size"], config["hidden_size"])
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = norm(rngs, config["hidden_size"])

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Token ids [T] -> logits [T, V]."""
        x = self.embeddings[...][token_ids]
        for layer in self.layers:
            x = layer(x)
        return normed(x, self.norm[...]) @ self.embeddings[...].T
