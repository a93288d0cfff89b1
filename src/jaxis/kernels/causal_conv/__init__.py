"""Short causal convolution of each channel over time, used before a recurrence, and in LFM2 instead of one.

`reference.py` is the definition, `cpu.py` the native kernel; both take the same arguments.
"""

from __future__ import annotations

import functools

import jax

from jaxis.kernels.causal_conv import cpu, reference
from jaxis.kernels.causal_conv.reference import ConvOperands
from jaxis.kernels.model_axis import num_shards, split_over_model
from jaxis.kernels.native_constants import MAX_CONV_WIDTH

__all__ = ["ConvOperands", "causal_conv"]

ACTIVATIONS = ("silu", None)


def causal_conv(
    operands: ConvOperands, *, activation: str | None, dilation: int = 1
) -> tuple[jax.Array | None, jax.Array]:
    """Computes `y[t] = activation(bias + sum(weight[:, j] * x[t - (W - 1 - j) D] for j in range(W)))` in each request.

    A request's bits do not depend on how its tokens are split into steps, because the state holds unchanged inputs.

    Args:
      operands: Inputs, weights and states.
      activation: "silu", or None.
      dilation: D, the distance of two taps in tokens.

    Returns:
      The updated states (None without any), and y [T, C] in x's type, zeros for padding.

    Raises:
      ValueError: The operands do not fit together.
    """
    _check(operands, activation)
    kernel = functools.partial(_causal_conv, activation=activation, dilation=dilation)
    if num_shards(operands.x.shape[1]) == 1:
        return kernel(operands)
    return split_over_model(kernel, operands, (1, 0, 0, 2), (2, 1))


def _causal_conv(
    operands: ConvOperands, *, activation: str | None, dilation: int
) -> tuple[jax.Array | None, jax.Array]:
    if dilation == 1 and cpu.supports(operands.x):
        return cpu.causal_conv(operands, activation=activation)
    return reference.causal_conv(operands, activation=activation, dilation=dilation)


def _check(operands: ConvOperands, activation: str | None) -> None:
    width, array = operands.weight.shape[1], operands.states.array
    if not 2 <= width <= MAX_CONV_WIDTH:
        raise ValueError(f"a convolution of {width} taps; there are kernels for 2 to {MAX_CONV_WIDTH}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; expected one of {ACTIVATIONS}")
    operands.states.check()
    if array is not None and array.dtype != operands.x.dtype:
        raise ValueError(f"the state is {array.dtype}, its inputs are {operands.x.dtype}; both have one type")
