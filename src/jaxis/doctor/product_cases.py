"""Checks of products with weights of each width, of mixtures of experts, and of the small kernels, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxis.doctor.check import Case, CheckFailed, compare
from jaxis.kernels import native
from jaxis.kernels.norms import rms_norm
from jaxis.kernels.rotary_embedding import rotary_embedding
from jaxis.kernels.sampling import argmax, logsumexp, top_tokens
from jaxis.kernels.weights import (
    Allocate,
    BlockScaledWeight,
    ExpertStacks,
    PackedWeight,
    WeightScheme,
    WeightValue,
    dequantize,
    experts,
    matmul,
    pack,
    quantize,
)
from jaxis.kernels.weights.stack_packer import StackPacker
from jaxis.layers.glu import GLU

_OUT, _IN, _NUM_EXPERTS, _PER_TOKEN = 512, 1024, 8, 2
# Quantized activations round the inputs of products, so results are further from those of exact inputs.
_ROUNDED_INPUT = 3e-2


def product_cases(dtype: DTypeLike, tolerance: float) -> Iterator[Case]:
    """Yields checks of products and small kernels, with activations of this type."""
    schemes = {
        "int8": WeightScheme("int8"),
        "int8, int8 activations": WeightScheme("int8", act_qtype="int8"),
        "int4 in groups of 32": WeightScheme("int4", 32, "affine"),
        "int4 in groups of 32, int8 activations": WeightScheme("int4", 32, "affine", "int8"),
    }
    kinds: dict[str, tuple[Callable[[np.ndarray], WeightValue], float]] = {
        "floats": (lambda array: array, tolerance),
        "fp8 in blocks": (_fp8_blocks, tolerance),
    }
    for name, scheme in schemes.items():
        allowed = tolerance if scheme.act_qtype is None else _ROUNDED_INPUT
        kinds[name] = (functools.partial(quantize, scheme=scheme), allowed)
    for name, (make, allowed) in kinds.items():
        for num_rows in (1, 64):
            run = functools.partial(_check_product, make, num_rows, dtype, allowed)
            yield Case("kernels", f"product, {num_rows} x {_IN} x {_OUT}, {name}", run)
    for name in ("floats", "int8", "fp8 in blocks", "int4 in groups of 32"):
        make, allowed = kinds[name]
        for num_tokens in (1, 48):
            run = functools.partial(_check_experts, make, num_tokens, dtype, max(allowed, 2 * tolerance))
            yield Case("kernels", f"experts, {num_tokens} token{'s' if num_tokens > 1 else ''}, {name}", run)
    yield Case("kernels", "RMS norm", functools.partial(_check_norm, dtype, tolerance))
    yield Case("kernels", "rotary embedding", functools.partial(_check_rope, dtype, tolerance))
    yield Case("kernels", "arg-max, top tokens and log-sum-exp of 32,000 logits", _check_sampling)


def _fp8_blocks(array: np.ndarray) -> BlockScaledWeight:
    """Quantizes float32 [out, in] to fp8 with a scale for each 128 x 128 block."""
    rows, columns = array.shape
    blocks = array.reshape(rows // 128, 128, columns // 128, 128)
    scale = np.abs(blocks).max((1, 3)) / float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    value = (blocks / scale[:, None, :, None]).reshape(rows, columns).astype(ml_dtypes.float8_e4m3fn)
    return BlockScaledWeight(value, scale.astype(np.float32), (128, 128))


def _as_loaded(weight: WeightValue, dtype: DTypeLike) -> WeightValue:
    if native.usable():
        return jax.tree.map(jnp.asarray, pack(weight, dtype=dtype))
    if isinstance(weight, np.ndarray):
        return jnp.asarray(weight, dtype)
    return jax.tree.map(jnp.asarray, weight)


def _exact(weight: WeightValue, dtype: DTypeLike) -> np.ndarray:
    """Dequantizes a weight to float64."""
    if isinstance(weight, np.ndarray):
        return weight.astype(jnp.dtype(dtype)).astype(np.float64)
    host = _host()
    # The caller's mesh may have other devices.
    with jax.set_mesh(jax.sharding.Mesh([host], "host")):
        return np.asarray(dequantize(jax.device_put(weight, host)), np.float64)


def _host() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return jax.local_devices()[0]


def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _check_product(make: Callable[[np.ndarray], WeightValue], num_rows: int, dtype: DTypeLike, tolerance: float) -> str:
    rng = np.random.default_rng(0)
    stored = make(_draw(rng, _OUT, _IN))
    x = jnp.asarray(_draw(rng, num_rows, _IN), dtype)
    y = jax.jit(matmul)(x, _as_loaded(stored, dtype))
    return compare(y, np.asarray(x, np.float64) @ _exact(stored, dtype).T, tolerance)


def _check_experts(
    make: Callable[[np.ndarray], WeightValue], num_tokens: int, dtype: DTypeLike, tolerance: float
) -> str:
    rng = np.random.default_rng(0)
    hidden, inner = 512, 256
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    each = [[make(_draw(rng, *shape) / shape[1] ** 0.5) for _ in range(_NUM_EXPERTS)] for shape in shapes]
    x = jnp.asarray(_draw(rng, num_tokens, hidden), dtype)
    ids = np.stack([rng.permutation(_NUM_EXPERTS)[:_PER_TOKEN] for _ in range(num_tokens)]).astype(np.int32)
    shares = rng.dirichlet(np.ones(_PER_TOKEN), num_tokens).astype(np.float32)

    def layer(x: jax.Array, gate: WeightValue, up: WeightValue, down: WeightValue) -> jax.Array:
        unit = GLU(jax.nn.silu)
        stacks = ExpertStacks(gate, up, down, None, None, None, _NUM_EXPERTS, unit, scales_input=False)
        return experts(x, jnp.asarray(ids), jnp.asarray(shares), stacks)

    y = jax.jit(layer)(x, *(_stack(weights, dtype) for weights in each))
    gates, ups, downs = ([_exact(weight, dtype) for weight in weights] for weights in each)
    expected = np.zeros((num_tokens, hidden))
    rows = np.asarray(x, np.float64)
    for token, slot in np.ndindex(ids.shape):
        expert = ids[token, slot]
        gate = gates[expert] @ rows[token]
        middle = gate / (1 + np.exp(-gate)) * (ups[expert] @ rows[token])
        expected[token] += shares[token, slot] * (downs[expert] @ middle)
    return compare(y, expected, tolerance)


def _stack(weights: list[WeightValue], dtype: DTypeLike) -> WeightValue:
    """Stacks the weights of all experts, as the engine has them on this platform."""
    if native.usable():
        packer = StackPacker(len(weights))
        for expert, weight in enumerate(weights):

            def pack_one(allocate: Allocate, weight: WeightValue = weight) -> PackedWeight:
                return cast(PackedWeight, pack(weight, dtype=dtype, allocate=allocate))

            packer.pack(expert, pack_one)
        return packer.stack()
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *(_as_loaded(weight, dtype) for weight in weights))


def _check_norm(dtype: DTypeLike, tolerance: float) -> str:
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(_draw(rng, 33, 1024), dtype), jnp.asarray(_draw(rng, 1024), dtype)
    exact, scale = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * scale
    return compare(jax.jit(functools.partial(rms_norm, epsilon=1e-6))(x, weight), expected, tolerance)


def _check_rope(dtype: DTypeLike, tolerance: float) -> str:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(_draw(rng, 33, heads, 128), dtype) for heads in (8, 2))
    angles = np.arange(33)[:, None] * 10000.0 ** (-np.arange(64) / 64)
    cos, sin = np.cos(angles), np.sin(angles)
    rotated = jax.jit(rotary_embedding)(q, k, jnp.asarray(cos, jnp.float32), jnp.asarray(sin, jnp.float32))
    for given, found in zip((q, k), rotated, strict=True):
        first, second = np.split(np.asarray(given, np.float64), 2, axis=-1)
        pairs = first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]
        line = compare(found, np.concatenate(pairs, axis=-1), tolerance)
    return line


def _check_sampling() -> str:
    logits = _draw(np.random.default_rng(0), 5, 32_000) * 4
    order = np.argsort(-logits, axis=1, kind="stable")
    given = jnp.asarray(logits)
    if np.asarray(jax.jit(argmax)(given)[0]).tolist() != order[:, 0].tolist():
        raise CheckFailed("arg-max is not the most likely token")
    if np.asarray(jax.jit(top_tokens, static_argnums=1)(given, 20)[1]).tolist() != order[:, :20].tolist():
        raise CheckFailed("top tokens are not the most likely ones in their order")
    exact = np.log(np.exp(logits.astype(np.float64)).sum(1))
    return f"exact tokens; log-sum-exp: {compare(jax.jit(logsumexp)(given), exact, 1e-5)}"
