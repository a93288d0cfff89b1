"""Norms over the last axis, in float32: native kernels on CPU, plain JAX on other platforms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    """Root-mean-square norm of x [..., N] (arXiv:1910.07467): `x / sqrt(mean(x ** 2) + epsilon) * weight`.

    The result has x's type; the weight is [N].
    """
    if not native.usable():
        return rms_norm_definition(x, weight, epsilon=epsilon)
    wide = x.astype(jnp.float32)
    if weight.dtype == jnp.float32:
        return _native_rms_norm(epsilon)(wide, weight).astype(x.dtype)
    # Rounded before the weight is applied, as in the definition.
    normalised = _native_rms_norm(epsilon)(wide, jnp.ones(weight.shape, jnp.float32)).astype(weight.dtype)
    return (normalised * weight).astype(x.dtype)


def rms_norm_definition(x: jax.Array, weight: jax.Array, *, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    # Rounded to the weight's type before the weight is applied, as published models were trained.
    return ((wide * scale).astype(weight.dtype) * weight).astype(x.dtype)


@functools.cache
def _native_rms_norm(epsilon: float):  # noqa: ANN202
    def kernel(x: jax.Array, weight: jax.Array) -> jax.Array:
        return native.call("rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype), x, weight, epsilon=np.float32(epsilon))

    return native.transformable(kernel, functools.partial(rms_norm_definition, epsilon=epsilon))


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    """Layer norm (arXiv:1607.06450): `(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias`, in x's type.

    x is [..., N]. The weight, and the bias if there is one, are [N], or [M, N] with separate weights for each row of x
    [..., M, N].
    """
    if not native.usable():
        return layer_norm_definition(x, weight, bias, epsilon=epsilon)
    bias = jnp.zeros_like(weight) if bias is None else bias
    return _native_layer_norm(epsilon)(*(array.astype(jnp.float32) for array in (x, weight, bias))).astype(x.dtype)


def layer_norm_definition(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    y = centred * scale * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)


@functools.cache
def _native_layer_norm(epsilon: float):  # noqa: ANN202
    def kernel(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        output = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return native.call("layer_norm", output, x, weight, bias, epsilon=np.float32(epsilon))

    return native.transformable(kernel, functools.partial(layer_norm_definition, epsilon=epsilon))


def row_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and variance of each row of x [..., N], N at least 1, each float32 [..., 1].

    The variance is the mean square of differences to the mean. Sums do not depend on the number of rows.
    """
    wide = x.astype(jnp.float32)
    return _native_row_moments(wide) if native.usable() else _row_moments_definition(wide)


def _row_moments_definition(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)


def _row_moments_kernel(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    output = jax.ShapeDtypeStruct(rows.shape[:1], jnp.float32)
    mean, variance = native.call("row_moments", (output, output), rows)
    return mean.reshape(*shape, 1), variance.reshape(*shape, 1)


_native_row_moments = native.transformable(_row_moments_kernel, _row_moments_definition)
