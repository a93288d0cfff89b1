"""Definition of the short causal convolution in plain JAX, computed in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import materialize
from jaxis.kernels.state_slots import RecurrentStates
from jaxis.kernels.token_window import earlier_rows, kept_rows


class ConvOperands(NamedTuple):
    """Operands of `causal_conv`, for a flat batch of T tokens.

    Attributes:
      x: [T, C].
      weight: [C, W] with W from 2 to 8 taps. The last tap multiplies the token itself.
      bias: [C]; None for none.
      states: States [(W - 1) D, C] in x's type: the last inputs of each request, oldest first.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    states: RecurrentStates


def causal_conv(
    operands: ConvOperands, *, activation: str | None, dilation: int = 1
) -> tuple[jax.Array | None, jax.Array]:
    x, weight, bias, (state, slots, *_) = operands
    requests = operands.states.query_start_loc, operands.states.num_requests
    num_tokens, num_channels = x.shape
    y = jnp.zeros((num_tokens, num_channels), jnp.float32) if bias is None else bias.astype(jnp.float32)
    distances = range((weight.shape[1] - 1) * dilation, -1, -dilation)
    for tap, inputs in enumerate(earlier_rows(x, state, slots, *requests, distances)):
        product = weight[:, tap].astype(jnp.float32) * inputs.astype(jnp.float32)
        # Rounded where no native kernel takes the place of this definition, so that no program fuses it with the sum.
        y = y + (product if dilation == 1 else materialize(product))
    if activation == "silu":
        y = jax.nn.silu(y)
    y = jnp.where(operands.states.valid(num_tokens)[:, None], y, 0).astype(x.dtype)
    if state is None or slots is None:
        return None, y
    return kept_rows(x, state, slots, *requests), y
