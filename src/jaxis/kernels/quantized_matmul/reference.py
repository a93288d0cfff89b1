"""The definition of a quantized product, in plain JAX, term by term: the oracle of the fast implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels import native_constants
from jaxis.kernels.quantized_matmul.weight import INT4_OFFSET, QuantizedWeight

DEFAULT_ACT_TILE = native_constants.ACTIVATION_GROUP
"""Features of an activation that share a scale, where the weight has one group a row."""


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    act_qtype: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """`x @ dequantize(weight).T`, with x quantized dynamically if requested.

    y[t, o] = sum over groups g of s_x[t, g] * s_w[o, g] * (sum over k in g of q_x[t, k] * (q_w[o, k] - z_w[o, g])),
    where s_x and q_x are `quantize_activations(x, activation_tile(weight))`; without `act_qtype`, s_x is 1 and
    q_x is x.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      act_qtype: "int8", or None for unquantized activations.
      preferred_element_type: Type of the result; None means x's.

    Returns:
      [..., out].
    """
    tile = activation_tile(weight)
    q_w = _in_groups(_integers(weight), tile)
    s_w = weight.scale.astype(jnp.float32)
    if act_qtype is None:
        q_x, s_x = x.astype(jnp.float32), jnp.ones(())
    else:
        q_x, s_x = quantize_activations(x, tile)
        q_x = q_x.astype(jnp.float32)
    # A group's integers and their sums are exact in float32.
    partial = jnp.einsum("...gk,ogk->...og", _in_groups(q_x, tile), q_w, precision="highest")
    s_x = jnp.broadcast_to(s_x, partial.shape[:-2] + partial.shape[-1:])
    y = jnp.einsum("...og,...g,og->...o", partial, s_x, jnp.broadcast_to(s_w, q_w.shape[:2]), precision="highest")
    return y.astype(preferred_element_type or x.dtype)


def activation_tile(weight: QuantizedWeight) -> int:
    """Features of an activation that share a scale: the weight's group size, or 64 if a row is one group."""
    return weight.group_size if weight.scale.shape[-1] > 1 else DEFAULT_ACT_TILE


def quantize_activations(x: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """x [..., in] -> int8 [..., in] and float32 scales [..., ceil(in / tile)].

    The scale is the group's largest magnitude / 127, and the integers are round-half-even(x / scale), 0 in a group of
    zeros. The last group may be shorter than the tile.
    """
    grouped = _in_groups(x.astype(jnp.float32), tile)
    scale = divide(jnp.max(jnp.abs(grouped), axis=-1), 127)
    q = jnp.where(scale[..., None] > 0, jnp.rint(grouped / scale[..., None]), 0)
    return q.astype(jnp.int8).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scale


def divide(x: jax.Array, divisor: float) -> jax.Array:
    """x / divisor, correctly rounded: XLA would multiply by a constant's reciprocal, which rounds once more."""
    return x / jax.lax.optimization_barrier(jnp.full_like(x, divisor))


def dequantize(weight: QuantizedWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The weight as an array [..., out, in]."""
    q = _integers(weight)
    grouped = q.reshape(*weight.scale.shape, -1) * weight.scale.astype(jnp.float32)[..., None]
    return grouped.reshape(q.shape).astype(dtype)


def _integers(weight: QuantizedWeight) -> jax.Array:
    """qvalue - zero_point as float32 [..., out, in]."""
    q = jnp.asarray(weight.qvalue)
    if weight.qtype == "int8":
        return q.astype(jnp.float32)
    q = jnp.stack([q & 0xF, q >> 4], axis=-1).astype(jnp.float32)
    zero_point = INT4_OFFSET if weight.zero_point is None else weight.zero_point.astype(jnp.float32)[..., None]
    return (q.reshape(*weight.scale.shape, -1) - zero_point).reshape(weight.shape)


def _in_groups(x: jax.Array, tile: int) -> jax.Array:
    """[..., in] -> [..., ceil(in / tile), tile], padded with zeros."""
    missing = -x.shape[-1] % tile
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], -1, tile)
