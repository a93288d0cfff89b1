"""Residual streams: a token has S hidden states x [T, S, E], of which a block reads one mixture and writes into all.

Hyper-connections (arXiv:2409.19606), with coefficients that depend on the token. All are float32. Sums over streams go
one stream after the other, so that their order does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.gates import softmax
from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.kernels.norms import rms_norm
from jaxis.layers.leaves import float32_linear, linear
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import JaxRmsNorm, norm_each_group
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope, never_quantized


class StreamUpdate(NamedTuple):
    """Coefficients by which a block's output changes the streams.

    Attributes:
      factors: [T, S], factors of the output in each stream.
      mixing: [T, S, S]; the new stream k has stream j times `mixing[:, j, k]`. None: streams stay as they are.
    """

    factors: jax.Array
    mixing: jax.Array | None = None

    def into(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns the new streams, for x [T, S, E] and the block's output y [T, E]."""
        kept = states = x.astype(jnp.float32)
        if self.mixing is not None:
            kept = materialize(self.mixing[:, 0, :, None] * states[:, :1])
            for j in range(1, x.shape[1]):
                kept = kept + materialize(self.mixing[:, j, :, None] * states[:, j, None])
        return (kept + materialize(self.factors[..., None] * y.astype(jnp.float32)[:, None])).astype(x.dtype)


class StreamConnection(Protocol):
    """Connection of a block to the streams."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, StreamUpdate]:
        """Returns the block's input [T, E], and the update by its output, for x [T, S, E]."""
        ...


def read_streams(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns the sum [T, E] of streams x [T, S, E] times factors [T, S] or [T, S, E]."""
    wide = factors if factors.ndim == x.ndim else factors[..., None]
    products = materialize(wide * x.astype(jnp.float32))
    total = products[:, 0]
    for i in range(1, x.shape[1]):
        total = total + products[:, i]
    return total.astype(x.dtype)


class _Coefficients(JaxModule):
    """Numbers float32 [T, sum(sizes)] of a token: `fn norm(x) * scale + base`, with a norm of all streams together.

    Each of the groups of `sizes` has a scale of its own.
    """

    def __init__(self, scope: LayerScope, num_streams: int, sizes: tuple[int, ...]) -> None:
        self.num_streams, self.sizes = num_streams, sizes
        self.norm_epsilon: float = scope.config["rms_norm_eps"]
        size: int = num_streams * scope.config["hidden_size"]
        self.fn = float32_linear(never_quantized(scope) / "fn", size, sum(sizes))
        self.base = make_parameter(scope.rngs, nnx.initializers.zeros, (sum(sizes),), jnp.float32, axes=(None,))
        self.scale = make_parameter(scope.rngs, nnx.initializers.ones, (len(sizes),), jnp.float32, axes=(None,))

    def logits(self, x: jax.Array) -> jax.Array:
        flat = x.astype(jnp.float32).reshape(x.shape[0], -1)
        normed = rms_norm(flat, jnp.ones(flat.shape[-1], jnp.float32), epsilon=self.norm_epsilon)
        scale = jnp.repeat(self.scale[...], jnp.array(self.sizes), total_repeat_length=sum(self.sizes))
        return materialize(self.fn(normed) * scale) + self.base[...]


class HyperConnection(_Coefficients):
    """A connection whose coefficients are sigmoids of projections of all streams.

    `read = sigmoid(.) + epsilon`
    `write = magnitude * sigmoid(.) + write_epsilon`

    With `sinkhorn_iterations`, streams are mixed by a matrix whose rows and columns sum to about 1 (DeepSeek V4's
    manifold constraint, arXiv:2512.24880): a softmax of each row, then divisions by the sums of columns and rows in
    turn. With None, they stay as they are (Hy4).
    """

    def __init__(
        self,
        scope: LayerScope,
        num_streams: int,
        *,
        epsilon: float,
        sinkhorn_iterations: int | None,
        magnitude: float = 2.0,
        write_epsilon: float = 0.0,
    ) -> None:
        sizes = (num_streams, num_streams, num_streams**2)
        super().__init__(scope, num_streams, sizes if sinkhorn_iterations is not None else sizes[:2])
        self.epsilon, self.sinkhorn_iterations = epsilon, sinkhorn_iterations
        self.magnitude, self.write_epsilon = magnitude, write_epsilon

    def __call__(self, x: jax.Array) -> tuple[jax.Array, StreamUpdate]:
        read, update = self.coefficients(x)
        return read_streams(x, read), update

    def coefficients(self, x: jax.Array) -> tuple[jax.Array, StreamUpdate]:
        """Returns the factors [T, S] of what the block reads, and the update by its output."""
        logits, size = self.logits(x), self.num_streams
        gates = in_whole_vectors(jax.nn.sigmoid, logits[:, : 2 * size])
        write = materialize(self.magnitude * gates[:, size:]) + self.write_epsilon
        return gates[:, :size] + self.epsilon, StreamUpdate(write, self._mixing(logits[:, 2 * size :]))

    def _mixing(self, logits: jax.Array) -> jax.Array | None:
        if self.sinkhorn_iterations is None:
            return None
        shape = (-1, self.num_streams, self.num_streams)
        mixing = softmax(logits.reshape(-1, self.num_streams)).reshape(shape) + self.epsilon
        return jax.lax.fori_loop(
            1,
            self.sinkhorn_iterations,
            lambda _, mixing: self._over_sums(self._over_sums(mixing, axis=2), axis=1),
            self._over_sums(mixing, axis=1),
        )

    def _over_sums(self, mixing: jax.Array, *, axis: int) -> jax.Array:
        total = jax.lax.index_in_dim(mixing, 0, axis)
        for i in range(1, self.num_streams):
            total = total + jax.lax.index_in_dim(mixing, i, axis)
        # Rounded, so that no program divides by a product where another divides twice.
        return materialize(mixing / (total + self.epsilon))


class HyperMixer(_Coefficients):
    """The last mixture of streams, as a `HyperConnection` reads them: x [T, S, E] -> [T, E]."""

    def __init__(self, scope: LayerScope, num_streams: int, *, epsilon: float) -> None:
        super().__init__(scope, num_streams, (num_streams,))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return read_streams(x, in_whole_vectors(jax.nn.sigmoid, self.logits(x)) + self.epsilon)


class StreamMean(JaxModule):
    """The mean of streams: x [T, S, E] -> [T, E]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return read_streams(x, jnp.full(x.shape[:2], 1 / x.shape[1], jnp.float32))


class StreamsNorm(JaxRmsNorm):
    """Final norm, with config.json's `rms_norm_eps`, of a mixture of streams: x [T, S, E] -> [T, E]."""

    def __init__(self, scope: LayerScope, mixer: Callable[[jax.Array], jax.Array]) -> None:
        config = scope.config
        super().__init__(config["hidden_size"], scope.rngs, epsilon=config["rms_norm_eps"], dtype=scope.dtype)
        self.mixer = mixer

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(self.mixer(x), self.scale, epsilon=self.epsilon)


class AllStreamsNorm(JaxRmsNorm):
    """RMS norm of all streams of a token together, with weights minus one in files: x [T, S, E] -> [T, S, E]."""

    def __init__(self, scope: LayerScope, num_streams: int) -> None:
        config = scope.config
        size, epsilon = num_streams * config["hidden_size"], config["rms_norm_eps"]
        super().__init__(size, scope.rngs, epsilon=epsilon, dtype=scope.dtype, add_unit_offset=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x.reshape(x.shape[0], -1)).reshape(x.shape)


class GatedMixer(JaxModule):
    """The mean of normed streams times gates of each feature, which are projected with a low rank (Qwen4).

    The norm of streams is a norm of what is read, too: x [T, S, E] -> [T, E].
    """

    def __init__(self, scope: LayerScope, num_streams: int, rank: int) -> None:
        self.num_streams = num_streams
        size: int = num_streams * scope.config["hidden_size"]
        epsilon: float = scope.config["rms_norm_eps"]
        self.hc_norm = JaxRmsNorm(size, scope.rngs, epsilon=epsilon, dtype=scope.dtype, add_unit_offset=True)
        self.input_mix_weight_down = linear(scope / "input_mix_weight_down", size, rank, axes=(None, "embed"))
        self.input_mix_weight_up = linear(scope / "input_mix_weight_up", rank, size, axes=("embed", None))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.read(self.normed(x))

    def normed(self, x: jax.Array) -> jax.Array:
        """Returns the normed streams x [T, S, E]: [T, S E]."""
        return norm_each_group(x, self.hc_norm).reshape(x.shape[0], -1)

    def read(self, normed: jax.Array) -> jax.Array:
        """Returns what a block reads, [T, E], of normed streams [T, S E]."""
        shape = (normed.shape[0], self.num_streams, -1)
        reduced = scaled(self.input_mix_weight_down(normed), 1 / self.num_streams)
        reduced = in_whole_vectors(jax.nn.silu, reduced.astype(jnp.float32)).astype(normed.dtype)
        gates = in_whole_vectors(jax.nn.sigmoid, self.input_mix_weight_up(reduced).astype(jnp.float32))
        return read_streams(normed.reshape(shape), scaled(gates, 1 / self.num_streams).reshape(shape))


class GatedConnection(GatedMixer):
    """A connection that reads as `GatedMixer` does, and adds the output to stream k times `2 sigmoid(inject_k)`."""

    def __init__(self, scope: LayerScope, num_streams: int, rank: int) -> None:
        super().__init__(scope, num_streams, rank)
        inject = never_quantized(scope / "block_inject_weight")
        self.block_inject_weight = linear(inject, self.hc_norm.num_features, num_streams, axes=(None, "embed"))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, StreamUpdate]:
        normed = self.normed(x)
        logits = scaled(self.block_inject_weight(normed).astype(jnp.float32), 1 / self.num_streams)
        return self.read(normed), StreamUpdate(2 * in_whole_vectors(jax.nn.sigmoid, logits))
