"""Definition of the short causal convolution in plain JAX, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import materialize
from jaxis.kernels.ragged_paged_attention.layout import request_of_token
from jaxis.kernels.state_slots import StateSlots
from jaxis.kernels.token_window import earlier_rows, kept_rows


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    activation: str | None,
    dilation: int = 1,
) -> tuple[jax.Array | None, jax.Array]:
    num_tokens, num_channels = x.shape
    requests = query_start_loc, num_requests
    y = jnp.zeros((num_tokens, num_channels), jnp.float32) if bias is None else bias.astype(jnp.float32)
    distances = range((weight.shape[1] - 1) * dilation, -1, -dilation)
    for tap, inputs in enumerate(earlier_rows(x, state, slots, *requests, distances)):
        product = weight[:, tap].astype(jnp.float32) * inputs.astype(jnp.float32)
        # Rounded where no native kernel takes the place of this definition, so that no program fuses it with the sum.
        y = y + (product if dilation == 1 else materialize(product))
    if activation == "silu":
        y = jax.nn.silu(y)
    _, valid = request_of_token(*requests, num_tokens)
    y = jnp.where(valid[:, None], y, 0).astype(x.dtype)
    if state is None or slots is None:
        return None, y
    return kept_rows(x, state, slots, *requests), y
