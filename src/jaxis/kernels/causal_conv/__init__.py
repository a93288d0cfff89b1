"""Short causal convolution of each channel over time, used before a recurrence, and in LFM2 instead of one.

`reference.py` is the definition, `cpu.py` the native kernel; both take the same arguments.
"""

from __future__ import annotations

import functools

import jax

from jaxis.kernels.causal_conv import cpu, reference
from jaxis.kernels.model_axis import num_shards, split_over_model
from jaxis.kernels.native_constants import MAX_CONV_WIDTH
from jaxis.kernels.state_slots import StateSlots

__all__ = ["causal_conv"]

ACTIVATIONS = ("silu", None)


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
    """Computes `y[t] = activation(bias + sum(weight[:, j] * x[t - (W - 1 - j) D] for j in range(W)))` in each request.

    A request's bits do not depend on how its tokens are split into steps, because the state holds unchanged inputs.

    Args:
      x: [T, C], a flat batch. The tokens of request r are rows query_start_loc[r] to [r + 1]; later rows are padding.
      weight: [C, W] with W from 2 to 8 taps. The last tap multiplies the token itself.
      bias: [C].
      state: [num_slots, (W - 1) D, C] in x's type: the last inputs of each request, oldest first. It is updated in
        place if donated. None: the requests are whole sequences, and the function is differentiable.
      slots: State slots that the requests read and write; None without a state.
      query_start_loc: i32 [R + 1].
      num_requests: i32 [], the number of requests that are not padding.
      activation: "silu", or None.
      dilation: D, the distance of two taps in tokens.

    Returns:
      The updated state (None without one), and y [T, C] in x's type, zeros for padding.

    Raises:
      ValueError: The arguments do not fit together.
    """
    _check(x, weight, state, slots, activation)
    kernel = functools.partial(_causal_conv, activation=activation, dilation=dilation)
    operands = (x, weight, bias, state, slots, query_start_loc, num_requests)
    if num_shards(x.shape[1]) == 1:
        return kernel(*operands)
    return split_over_model(kernel, operands, (1, 0, 0, 2, None, None, None), (2, 1))


def _causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    activation: str | None,
    dilation: int,
) -> tuple[jax.Array | None, jax.Array]:
    operands = (x, weight, bias, state, slots, query_start_loc, num_requests)
    if dilation == 1 and cpu.supports(x):
        return cpu.causal_conv(*operands, activation=activation)
    return reference.causal_conv(*operands, activation=activation, dilation=dilation)


def _check(
    x: jax.Array, weight: jax.Array, state: jax.Array | None, slots: StateSlots | None, activation: str | None
) -> None:
    width = weight.shape[1]
    if not 2 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"a convolution of {width} taps; there are kernels for 2 to {MAX_CONV_WIDTH}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; expected one of {ACTIVATIONS}")
    if (state is None) != (slots is None):
        raise ValueError("a state and its slots are given together")
    if state is not None and state.dtype != x.dtype:
        raise ValueError(f"the state is {state.dtype}, its inputs are {x.dtype}; both have one type")
