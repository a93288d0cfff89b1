"""Quantization of float weights to QuantizedWeight or CodedWeight on the host, some rows at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxis.kernels.grouped_matmul.stored import INT4_OFFSET
from jaxis.kernels.weights import quantize_native
from jaxis.kernels.weights.affine import affine_weight, quantize_affine
from jaxis.kernels.weights.coded_weight import CodedWeight
from jaxis.kernels.weights.quantized_activations import divide
from jaxis.kernels.weights.quantized_weight import QuantizedWeight
from jaxis.kernels.weights.scale_codes import SCALE_BITS, unit_of
from jaxis.kernels.weights.scheme import BITS, NOT_FINITE, WeightScheme, check_quantizable

_ELEMENTS_AT_ONCE = 1 << 22
# For "mse": values that a group's extreme maps to before rounding. -8 is the end of the range without a positive
# counterpart; with -8.8 the extreme is clipped, which pays off if it is an outlier.
_INT4_EXTREMES = (-8.0, -8.8)


def quantize(weight: np.ndarray, scheme: WeightScheme) -> QuantizedWeight | CodedWeight:
    """Quantizes a weight [out, in] of floats, always on the CPU, so that every device gets the same bits.

    Grouped scales are rounded first, and integers are chosen for the rounded scales, so that rounding the scales costs
    almost no accuracy. The scales of int8 and "affine" are codes of 8 bits times a power of two of the row, all others
    bfloat16.

    The scheme's `weight_calibration_method` determines the scales. "absmax": from the largest magnitude; "minmax": from
    the smallest and the largest value, with a zero point (int4 only); "mse": the one of a few candidates with the least
    squared error (int4 only); "affine": with a minimum, both of the least squared error (int4, int5 and int6). int8
    scales are rounded up, so that no value is clipped.

    The weight is float32, float16 or bfloat16. Returns numpy arrays: a CodedWeight if the method is "affine", else a
    QuantizedWeight. Raises ValueError if the weight has values that are not finite, or the scheme does not fit it.
    """
    if scheme.weight_calibration_method == "affine":
        return affine_weight(_arrays(weight, scheme), BITS[scheme.weight_qtype], scheme.act_qtype)
    return quantize_to_integers(weight, scheme)


def quantize_to_integers(weight: np.ndarray, scheme: WeightScheme) -> QuantizedWeight:
    """Computes `quantize` for schemes with a method other than "affine"."""
    qvalue, scale, *zero_point = _arrays(weight, scheme)
    return QuantizedWeight(qvalue, scale, *zero_point, act_qtype=scheme.act_qtype)


def _arrays(weight: np.ndarray, scheme: WeightScheme) -> tuple[np.ndarray, ...]:
    check_quantizable(weight.shape[1], scheme)
    if weight.size == 0:
        raise ValueError("has no rows")
    function = quantize_native.quantize if quantize_native.usable(weight) else quantize_by_definition
    arrays = function(weight, scheme)
    if arrays is None:
        raise ValueError(NOT_FINITE)
    return arrays


def quantize_by_definition(weight: np.ndarray, scheme: WeightScheme) -> tuple[np.ndarray, ...] | None:
    """Returns the arrays of `quantize`'s result, or of `quantize_affine`; None if a value is not finite."""
    out_size, in_size = weight.shape
    if scheme.weight_calibration_method == "affine" and not np.isfinite(weight).all():
        return None
    num_rows = min(out_size, max(1, _ELEMENTS_AT_ONCE // in_size))
    result: list[np.ndarray] = []
    for first in range(0, out_size, num_rows):
        # The last part overlaps the one before, so that all have the same shape and share a program.
        rows = slice(min(first, out_size - num_rows), min(first, out_size - num_rows) + num_rows)
        part = _quantize_on_cpu(weight[rows], scheme)
        result = result or [np.empty((out_size, *array.shape[1:]), array.dtype) for array in part]
        for whole, array in zip(result, part, strict=True):
            whole[rows] = array
    return tuple(result) if np.isfinite(result[1]).all() else None


def _quantize_on_cpu(weight: np.ndarray, scheme: WeightScheme) -> tuple[np.ndarray, ...]:
    if scheme.weight_calibration_method == "affine":
        wide = weight.astype(np.float32)
        wide[np.abs(wide) < np.finfo(np.float32).tiny] = 0
        return quantize_affine(wide, scheme.group_size or weight.shape[1], BITS[scheme.weight_qtype])
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        device = jax.local_devices()[0]
    # A view, because only the first axis of a contiguous array was sliced.
    grouped = weight.reshape(len(weight), -1, scheme.group_size or weight.shape[1])
    scale_dtype = np.dtype(np.float32 if scheme.group_size is None else ml_dtypes.bfloat16)
    quantizer = _QUANTIZERS[scheme.weight_qtype, scheme.weight_calibration_method]
    # The caller's mesh may have other devices.
    with jax.set_mesh(jax.sharding.Mesh([device], "host")):
        arrays = quantizer(jax.device_put(grouped, device), scale_dtype)
    return tuple(np.asarray(array) for array in arrays)


@functools.partial(jax.jit, static_argnums=1)
def _int8_absmax(weight: jax.Array, scale_dtype: np.dtype) -> tuple[jax.Array, ...]:
    weight = _flushed(weight.astype(jnp.float32))
    scale = _flushed(divide(jnp.max(jnp.abs(weight), axis=-1, keepdims=True), 127))
    if scale_dtype != np.float32:
        scale = _rounded_up_to_codes(scale)
    q = _divide_and_round(weight, scale, -127, 127)
    return q.astype(jnp.int8).reshape(len(q), -1), scale[..., 0].astype(scale_dtype)


@functools.partial(jax.jit, static_argnums=1)
def _int4_absmax(weight: jax.Array, scale_dtype: np.dtype) -> tuple[jax.Array, ...]:
    weight = _flushed(weight.astype(jnp.float32))
    scale = _rounded(divide(jnp.max(jnp.abs(weight), axis=-1, keepdims=True), 7), scale_dtype)
    return _pack(_divide_and_round(weight, scale, -8, 7) + INT4_OFFSET), scale[..., 0].astype(scale_dtype)


@functools.partial(jax.jit, static_argnums=1)
def _int4_mse(weight: jax.Array, scale_dtype: np.dtype) -> tuple[jax.Array, ...]:
    weight = _flushed(weight.astype(jnp.float32))
    low, high = jnp.min(weight, axis=-1, keepdims=True), jnp.max(weight, axis=-1, keepdims=True)
    extreme = jnp.where(-low > high, low, high)
    scales = [_rounded(divide(extreme, target), scale_dtype) for target in _INT4_EXTREMES]
    errors = [_squared_error(weight, scale) for scale in scales]
    scale, least_error = scales[0], errors[0]
    for candidate, error in zip(scales[1:], errors[1:], strict=True):
        scale = jnp.where(error < least_error, candidate, scale)
        least_error = jnp.minimum(error, least_error)
    return _pack(_divide_and_round(weight, scale, -8, 7) + INT4_OFFSET), scale[..., 0].astype(scale_dtype)


def _squared_error(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the squared error of each int4 group, [out, groups, 1].

    Each product is rounded separately, and sums have a fixed order: the second half (zero-padded to a power of two) is
    added to the first, repeatedly. Barriers keep XLA from reordering or fusing them.
    """
    barrier = jax.lax.optimization_barrier
    q = _divide_and_round(weight, scale, -8, 7)
    squares = _flushed(barrier(jnp.square(barrier(barrier(q * scale) - weight))))
    size = 1 << (weight.shape[-1] - 1).bit_length()
    squares = jnp.pad(squares, ((0, 0), (0, 0), (0, size - weight.shape[-1])))
    while size > 1:
        size //= 2
        squares = barrier(squares[..., :size] + squares[..., size:])
    return squares


@functools.partial(jax.jit, static_argnums=1)
def _int4_minmax(weight: jax.Array, scale_dtype: np.dtype) -> tuple[jax.Array, ...]:
    weight = _flushed(weight.astype(jnp.float32))
    # The range includes 0, so that 0 is exact and the zero point fits.
    low = jnp.minimum(jnp.min(weight, axis=-1, keepdims=True), 0)
    high = jnp.maximum(jnp.max(weight, axis=-1, keepdims=True), 0)
    scale = _rounded(divide(high - low, 15), scale_dtype)
    zero_point = _divide_and_round(-low, scale, 0, 15)
    q = jnp.clip(_divide_and_round(weight, scale, -15, 15) + zero_point, 0, 15)
    return _pack(q), scale[..., 0].astype(scale_dtype), zero_point[..., 0].astype(jnp.uint8)


_QUANTIZERS = {
    ("int8", "absmax"): _int8_absmax,
    ("int4", "absmax"): _int4_absmax,
    ("int4", "mse"): _int4_mse,
    ("int4", "minmax"): _int4_minmax,
}


def _rounded_up_to_codes(scale: jax.Array) -> jax.Array:
    """Rounds scales [out, groups, 1] up to products of 0 to 255 and a power of two of the row, as in `scale_codes`."""
    unit = unit_of(jnp.max(scale, axis=1, keepdims=True), SCALE_BITS)
    codes = jnp.where(scale == 0, 0, jnp.maximum(jnp.ceil(scale / unit), 1))
    # The unit of a row with a NaN would be a number.
    return jnp.where(jnp.isfinite(scale), codes * unit, scale)


def _rounded(scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to float32 values that `dtype` (float32 or bfloat16) can hold; zeros are positive."""
    scale = _flushed(scale)
    # XLA may elide a round-trip cast; reduce_precision is not elided.
    return scale if dtype == np.float32 else jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)


def _flushed(x: jax.Array) -> jax.Array:
    """Returns x with denormals set to 0: XLA's CPU threads may or may not flush them."""
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0, x)


def _divide_and_round(weight: jax.Array, scale: jax.Array, low: int, high: int) -> jax.Array:
    """Returns round-half-even(weight / scale), clipped; 0 where the scale is 0."""
    divisor = jnp.broadcast_to(jnp.where(scale == 0, jnp.inf, scale), weight.shape)
    # If XLA saw that a group shares the divisor, it would multiply by its reciprocal, which rounds twice.
    return jnp.clip(jnp.rint(weight / jax.lax.optimization_barrier(divisor)), low, high)


def _pack(q: jax.Array) -> jax.Array:
    pairs = q.astype(jnp.uint8).reshape(len(q), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
