"""The definition of a quantized product, in plain JAX, term by term: the oracle of the fast implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels.native_constants import ACTIVATION_GROUP
from jaxis.kernels.quantized_matmul.weight import INT4_OFFSET, QuantizedWeight


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    act_qtype: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """`x @ dequantize(weight).T`, with x quantized dynamically if requested.

    y[t, o] = sum over groups g of s_w[o, g] * (sum over k in g of x[t, k] * (q_w[o, k] - z_w[o, g])), where x[t, k] is
    s_x * q_x + m_x of `quantize_activations` if there is an `act_qtype`.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      act_qtype: "int8", or None for unquantized activations.
      preferred_element_type: Type of the result; None means x's.

    Returns:
      [..., out].
    """
    used = x.astype(jnp.float32) if act_qtype is None else round_activations(x, jnp.float32)
    tile = weight.group_size
    partial = jnp.einsum(
        "...gk,ogk->...og", _in_groups(used, tile), _in_groups(_integers(weight), tile), precision="highest"
    )
    y = jnp.einsum("...og,og->...o", partial, weight.scale.astype(jnp.float32), precision="highest")
    return y.astype(preferred_element_type or x.dtype)


def quantize_activations(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [..., in] -> int8 [..., in], and scales and midpoints, float32 [..., ceil(in / ACTIVATION_GROUP)].

    x ~ scale * q + midpoint. Of each group of ACTIVATION_GROUP features (the last may be shorter) the midpoint is
    (max + min) / 2, the scale (max - min) / 254, and q round-half-even((x - midpoint) / scale), from -127 to 127; 0
    where all features of a group are equal.
    """
    x = x.astype(jnp.float32)
    missing = -x.shape[-1] % ACTIVATION_GROUP
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], mode="edge" if x.shape[-1] else "constant")
    grouped = padded.reshape(*x.shape[:-1], -1, ACTIVATION_GROUP)
    highest, lowest = jnp.max(grouped, axis=-1), jnp.min(grouped, axis=-1)
    midpoint, scale = (highest + lowest) * 0.5, divide(highest - lowest, 254)
    q = (grouped - midpoint[..., None]) / jnp.where(scale > 0, scale, 1)[..., None]
    # Where the range is a few units in the last place the midpoint is off by a part of it.
    q = jnp.where(scale[..., None] > 0, jnp.clip(jnp.rint(q), -127, 127), 0)
    return q.astype(jnp.int8).reshape(padded.shape)[..., : x.shape[-1]], scale, midpoint


def round_activations(x: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """x [..., in] quantized and dequantized again, in `dtype`, or else its own type."""
    q, scale, midpoint = (a.astype(jnp.float32) for a in quantize_activations(x))
    wide = [jnp.repeat(a, ACTIVATION_GROUP, axis=-1)[..., : x.shape[-1]] for a in (scale, midpoint)]
    return (q * wide[0] + wide[1]).astype(dtype or x.dtype)


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
