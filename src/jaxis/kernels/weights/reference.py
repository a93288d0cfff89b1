"""Definition of a quantized product, in plain JAX, term by term: the oracle of the fast implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels.weights.quantized_activations import round_activations
from jaxis.kernels.weights.quantized_weight import QuantizedWeight


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    act_qtype: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Returns `x @ dequantize(weight).T`, [..., out], of x [..., in], quantized dynamically if `act_qtype` is "int8".

    y[t, o] = sum over groups g of s_w[o, g] * (sum over k in g of x[t, k] * (q_w[o, k] - z_w[o, g])) for a weight [out,
    in], where x[t, k] is s_x * q_x + m_x of `quantize_activations` if there is an `act_qtype`. The default type is x's.
    """
    used = x.astype(jnp.float32) if act_qtype is None else round_activations(x, jnp.float32)
    tile = weight.group_size
    partial = jnp.einsum(
        "...gk,ogk->...og", _in_groups(used, tile), _in_groups(weight.integers(), tile), precision="highest"
    )
    y = jnp.einsum("...og,og->...o", partial, weight.scale.astype(jnp.float32), precision="highest")
    return y.astype(preferred_element_type or x.dtype)


def _in_groups(x: jax.Array, tile: int) -> jax.Array:
    missing = -x.shape[-1] % tile
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], -1, tile)
