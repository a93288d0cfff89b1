"""Choice of tokens from logits on the device: arg-max, top tokens, filtered categorical sampling, log-probabilities.

`cpu.py` has the reductions as native kernels, `tiles.py` for other platforms, with the same arguments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.sampling import cpu, tiles
from jaxis.kernels.sampling.categorical import draw, sample_categorical, tempered, weights_of
from jaxis.kernels.sampling.filters import TokenFilters
from jaxis.parallel.mesh import devices_of_layer

__all__ = [
    "TokenFilters",
    "argmax",
    "draw",
    "logsumexp",
    "mask_tokens",
    "sample_categorical",
    "tempered",
    "token_ranks",
    "top_tokens",
    "weights_of",
]


def argmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first most likely token of each row, int32 [R], and its logit, float32 [R].

    A row of logits float32 [R, V] that holds a NaN has the logit NaN and a meaningless token. If several devices share
    the model, each reads the part of the vocabulary that it computed, unless logits were gathered before.
    """
    if devices_of_layer() > 1:
        return tiles.argmax_on_shards(logits)
    return (cpu if cpu.supports(logits) else tiles).argmax(logits)


def logsumexp(logits: jax.Array) -> jax.Array:
    """Returns the logarithm of the sum of exponentials of each row: float32 [R, V] -> [R]."""
    return (cpu if cpu.supports(logits) else tiles).logsumexp(logits)


def mask_tokens(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Sets logits float32 [R, V] to -inf where a token's bit is 0.

    The mask is int32 [R, ceil(V / 32)]; bit i % 32 of word i / 32 is token i's.
    """
    bits = mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1
    return jnp.where(bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]] != 0, logits, -jnp.inf)


def top_tokens(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns logits float32 [R, min(k, V)] and ids int32 [R, min(k, V)] of the most likely tokens of logits [R, V].

    The most likely token comes first, and of equal ones the lowest id, like `lax.top_k`.
    """
    return (cpu if cpu.supports(logits) else tiles).top_tokens(logits, k)


def token_ranks(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns 1 + the number of likelier tokens: logits float32 [R, V], a chosen logit per row [R] -> int32 [R]."""
    return (cpu if cpu.supports(logits) else tiles).token_ranks(logits, chosen)
