"""What does not fit a native kernel is an error that says what, and is never read as something else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.native_constants import ACTIVATIONS, WEIGHT_TYPES
from jaxis.kernels.weights.packed_format import PackedFormat

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not built")

TOKENS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 3, 4, 2, 32, 16
F32 = jnp.float32


def floats(*shape):
    return jnp.zeros(shape, F32)


def ints(*values):
    return jnp.array(values, jnp.int32)


def call(name, outputs, *operands, **options):
    return jax.block_until_ready(native.call(name, outputs, *operands, **options))


def error(message):
    # JAX raises either, as the program runs in the caller's thread or in another.
    return pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"INVALID_ARGUMENT: .*{message}")


def paged_attention(**changes):
    operands = {
        "q": floats(TOKENS, HEADS, HEAD_DIM),
        "k": floats(TOKENS, KV_HEADS, HEAD_DIM),
        "v": floats(TOKENS, KV_HEADS, HEAD_DIM),
        "cache": jnp.zeros((5, KV_HEADS, 2 * BLOCK_SIZE * HEAD_DIM), jnp.bfloat16),
        "seq_lens": ints(3, 0),
        "block_tables": jnp.ones((2, 4), jnp.int32),
        "query_start_loc": ints(0, 3, 3),
        "request_distribution": ints(0, 1, 1),
        "sinks": floats(0),
        "bias": floats(0),
    }
    attributes = {"block_size": BLOCK_SIZE, "window": 1 << 40, "chunk_size": 1 << 40, "lookahead": 0}
    for name, value in changes.items():
        (attributes if name in attributes else operands)[name] = value
    cache, q = operands["cache"], operands["q"]
    return call(
        "paged_attention",
        (jax.ShapeDtypeStruct(cache.shape, cache.dtype), jax.ShapeDtypeStruct(q.shape, F32)),
        *operands.values(),
        aliases={3: 0},
        scale=np.float32(1),
        soft_cap=np.float32(0),
        **{name: np.int64(value) for name, value in attributes.items()},
    )


def latent_attention(value_dim=16, block_size=BLOCK_SIZE, **changes):
    operands = {
        "q": floats(TOKENS, HEADS, HEAD_DIM),
        "entries": floats(TOKENS, HEAD_DIM),
        "cache": jnp.zeros((5, 1, BLOCK_SIZE * HEAD_DIM), jnp.bfloat16),
        "seq_lens": ints(3, 0),
        "block_tables": jnp.ones((2, 4), jnp.int32),
        "query_start_loc": ints(0, 3, 3),
        "request_distribution": ints(0, 1, 1),
        "sinks": floats(0),
    } | changes
    cache, q = operands["cache"], operands["q"]
    outputs = (
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        jax.ShapeDtypeStruct((*q.shape[:2], value_dim), F32),
    )
    options = {"block_size": np.int64(block_size), "scale": np.float32(1)}
    return call("latent_attention", outputs, *operands.values(), aliases={2: 0}, **options)


@pytest.mark.parametrize("attention", [paged_attention, latent_attention])
def test_attention_takes_what_fits(attention):
    assert attention()[1].shape[:2] == (TOKENS, HEADS)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.uint8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("attention", [paged_attention, latent_attention])
def test_a_cache_of_another_type_is_not_read_as_int8(attention, dtype):
    shape = attention()[0].shape
    with error("the cache has dtype .*expected F32, BF16 or S8"):
        attention(cache=jnp.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": floats(TOKENS, KV_HEADS, 16)}, r"k has shape \[3, 2, 16\], expected \[3, any, 32\]"),
        ({"v": floats(TOKENS, 1, HEAD_DIM)}, r"v has shape \[3, 1, 32\], expected \[3, 2, 32\]"),
        # Without rows of keys, the cache has them already.
        ({"k": floats(0, KV_HEADS, HEAD_DIM)}, r"v has shape \[3, 2, 32\], expected \[0, 2, 32\]"),
        ({"q": floats(TOKENS, 3, HEAD_DIM)}, "do not divide the query heads"),
        ({"block_tables": jnp.ones((1, 4), jnp.int32)}, "block_tables has shape"),
        ({"query_start_loc": ints(0, 3)}, "query_start_loc has shape"),
        ({"request_distribution": ints(0, 3, 3)}, "more requests than seq_lens has"),
        ({"sinks": floats(3)}, "sinks has shape"),
        ({"sinks": floats(2, HEADS)}, "sinks has shape"),
        ({"bias": floats(TOKENS, 3, 8)}, "bias has shape"),
        ({"block_size": 8}, "block_size is not a multiple of 16"),
        ({"block_size": 32}, "the cache has shape"),
        ({"window": 0}, "not positive"),
        ({"cache": jnp.zeros((5, KV_HEADS, 2 * BLOCK_SIZE * HEAD_DIM), jnp.int8)}, "the cache has shape"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_paged_attention_checks_shapes(changes, message):
    with error(f"paged_attention: .*{message}"):
        paged_attention(**changes)


def test_paged_attention_checks_the_size_of_heads():
    wide = {"q": floats(1, 1, 528), "k": floats(1, 1, 528), "v": floats(1, 1, 528)}
    with error("head_dim is not a multiple of 16 up to 512"):
        paged_attention(**wide, cache=floats(5, 1, 2 * BLOCK_SIZE * 528))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entries": floats(TOKENS, 16)}, r"entries has shape \[3, 16\], expected \[3, 32\]"),
        ({"value_dim": 48}, "values are longer than entries"),
        ({"value_dim": 8}, "multiples of 16"),
        ({"block_size": 0}, "block_size is not positive"),
        ({"block_size": 8}, "the cache has shape"),
        ({"request_distribution": ints(0, 0, -1)}, "more requests than seq_lens has"),
        ({"query_start_loc": ints(0, 3)}, "query_start_loc has shape"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_latent_attention_checks_shapes(changes, message):
    with error(f"latent_attention: .*{message}"):
        latent_attention(**changes)


def encoded(type_number, **fields):
    """A format as the kernels take it, with a number that WEIGHT_TYPES may not have."""
    format = PackedFormat("float32", 64, **fields).encode()
    format[0] = type_number
    return format


def matmul(type_number, *, activation="none", num_matrices=1, panels=1, quantize=False, **fields):
    packed = jnp.zeros((panels, 32 * 64 * 4), jnp.uint8)
    return call(
        "matmul",
        [jax.ShapeDtypeStruct((2, 32), F32)],
        floats(2, 64),
        *[packed] * num_matrices,
        n=np.full(num_matrices, 32, np.int64),
        format=encoded(type_number, **fields),
        quantize_activations=quantize,
        x_is_integer=False,
        x_is_bfloat16=False,
        activation=np.int32(ACTIVATIONS.get(activation, activation)),
    )


def test_matmul_takes_what_fits():
    assert matmul(WEIGHT_TYPES["float32"])[0].shape == (2, 32)
    assert matmul(WEIGHT_TYPES["float32"], activation="silu", num_matrices=2)[0].shape == (2, 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"type_number": 99}, "unknown weight type"),
        ({"type_number": WEIGHT_TYPES["float32"], "activation": 9, "num_matrices": 2}, "unknown activation 9"),
        (
            {"type_number": WEIGHT_TYPES["float32"], "activation": "clamped_swiglu", "num_matrices": 2},
            "clamped_swiglu is an activation of experts only",
        ),
        (
            {"type_number": WEIGHT_TYPES["float32"], "activation": "relu2", "num_matrices": 2},
            "relu2 is an activation of experts only",
        ),
        (
            {"type_number": WEIGHT_TYPES["float32"], "activation": "capped_swiglu", "num_matrices": 2},
            "capped_swiglu is an activation of experts only",
        ),
        (
            {"type_number": WEIGHT_TYPES["float32"], "activation": "limited_swiglu", "num_matrices": 2},
            "limited_swiglu is an activation of experts only",
        ),
        ({"type_number": WEIGHT_TYPES["float32"], "activation": "silu"}, "an activation takes two matrices"),
        ({"type_number": WEIGHT_TYPES["float32"], "panels": 2}, "the packed weight's size does not fit"),
        ({"type_number": WEIGHT_TYPES["float32"], "quantize": True}, "quantized for integer weights only"),
        ({"type_number": WEIGHT_TYPES["float8_e4m3fn"]}, "fp8 weights have groups"),
        ({"type_number": WEIGHT_TYPES["float4_e2m1fn"], "group_size": 48}, "groups of mxfp4 weights divide"),
        ({"type_number": WEIGHT_TYPES["int8"], "group_size": 32}, "int8 weights have one scale a row"),
        ({"type_number": WEIGHT_TYPES["float32"], "group_size": -32}, "unknown weight type"),
        ({"type_number": 1 << 32}, "unknown weight type"),
    ],
)
def test_matmul_checks_formats_and_activations(arguments, message):
    with error(f"matmul: .*{message}"):
        matmul(**arguments)


CODES = {"group_size": 32, "bits": 4, "scale": "float16"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 0}, "groups of 16, 32"),
        ({"group_size": 8}, "groups of 16, 32"),
        ({"group_size": 48}, "groups of 16, 32"),
        ({"group_size": 256}, "groups of 16, 32"),
        ({"group_size": 128}, "groups of codes divide the columns"),
        ({"bits": 3}, "codes have 2, 4, 5, 6 or 8 bits"),
        ({"bits": 7}, "codes have 2, 4, 5, 6 or 8 bits"),
        ({"offset": 16}, "the offset of codes is one of them"),
        ({"scale": "none"}, "the type of the scales is unknown"),
        ({"minimum": "float16", "has_zero_points": True}, "minima or zero points, not both"),
        ({"super_scale": "bfloat16", "super_block": 64}, "super-scales are float16 or float32"),
        ({"super_scale": "float16"}, "super-blocks are of whole groups"),
        ({"super_scale": "float16", "super_block": 16}, "super-blocks are of whole groups"),
        ({"super_scale": "float16", "super_block": 256}, "super-blocks are of whole groups"),
        ({"levels": (1.0,), "bits": 5}, "levels are of 4 bits"),
        ({"levels": (1.0,), "offset": 8}, "levels are of 4 bits"),
        ({"levels": (float("nan"),)}, "levels are finite"),
        ({"levels": (0.5,), "quantize": True}, "quantized for integer weights only"),
        ({}, "the packed weight's size does not fit"),
    ],
    ids=str,
)
def test_matmul_checks_formats_of_codes(fields, message):
    with error(f"matmul: .*{message}"):
        matmul(WEIGHT_TYPES["codes"], **{**CODES, **fields})


@pytest.mark.parametrize("place", [4, 5, 7])
def test_an_unknown_type_of_scales_is_not_read_as_another(place):
    format = PackedFormat("codes", 64, **CODES).encode()
    format[place] = 99
    with error("the type of the scales is unknown|the type of the minima is unknown|super-scales are"):
        call(
            "packed_rows",
            jax.ShapeDtypeStruct((1, 64), F32),
            ints(0),
            jnp.zeros(4, jnp.uint8),
            format=format,
            n=np.int64(1),
        )


def test_a_format_of_another_size_is_not_read():
    operands = ints(0), jnp.zeros((1, 64 * 32 * 4), jnp.uint8)
    for format in (encoded(0)[:-1], np.append(encoded(0), 0)):
        with error("packed_rows: .*unknown weight type"):
            call("packed_rows", jax.ShapeDtypeStruct((1, 64), F32), *operands, format=format, n=np.int64(1))


def test_experts_and_heads_check_types():
    stack = jnp.zeros((2, 1, 32 * 32 * 4), jnp.uint8)
    options = {"num_experts": np.int64(2), "hidden_size": np.int64(32), "quantize_activations": False}
    options |= {"alpha": np.float32(0), "limit": np.float32(0)}
    operands = (floats(3, 32), jnp.zeros((3, 1), jnp.int32), floats(3, 1), stack, stack, stack)
    output = jax.ShapeDtypeStruct((3, 32), F32)

    def experts(type_number, activation):
        formats = {f"{name}_format": encoded(type_number) for name in ("gate", "up", "down")}
        return call("experts", output, *operands, activation=np.int32(activation), **formats, **options)

    assert experts(WEIGHT_TYPES["float32"], ACTIVATIONS["silu"]).shape == (3, 32)
    with error("experts: .*unknown weight type"):
        experts(99, ACTIVATIONS["silu"])
    with error("experts have an activation"):
        experts(WEIGHT_TYPES["float32"], ACTIVATIONS["none"])
    with error("unknown activation -1"):
        experts(WEIGHT_TYPES["float32"], -1)
    with error("head_matmul: .*fp8 weights have groups"):
        output = jax.ShapeDtypeStruct((3, 2, 32), F32)
        encoded_format = encoded(WEIGHT_TYPES["float8_e4m3fn"])
        call("head_matmul", output, floats(3, 2, 32), stack, quantize_activations=False, format=encoded_format)


def test_small_kernels_check_shapes():
    q, k = floats(3, 2, 16), floats(3, 1, 16)
    outputs = [jax.ShapeDtypeStruct(x.shape, F32) for x in (q, k)]
    with error(r"rotary_embedding: sin has shape \[3, 4\], expected \[3, 8\]"):
        call("rotary_embedding", outputs, q, k, floats(3, 8), floats(3, 4), interleaved=False)
    with error("more angles than pairs"):
        call("rotary_embedding", outputs, q, k, floats(3, 9), floats(3, 9), interleaved=False)
    with error("rms_norm: .*the size of x's rows"):
        call("rms_norm", jax.ShapeDtypeStruct((3, 8), F32), floats(3, 8), floats(6), epsilon=np.float32(1e-6))
    with error("token_ranks: chosen has shape"):
        call("token_ranks", jax.ShapeDtypeStruct((3,), jnp.int32), floats(3, 8), floats(2))


def test_sequence_attention_rejects_ranges_without_tokens():
    q, k = floats(HEADS, TOKENS, HEAD_DIM), floats(KV_HEADS, TOKENS, HEAD_DIM)
    outputs = (jax.ShapeDtypeStruct(q.shape, F32), jax.ShapeDtypeStruct(q.shape[:2], F32))
    for first, last in (((0, 2, 0), (0, 1, 2)), ((0, 0, 0), (0, 1, 3)), ((-1, 0, 0), (0, 1, 2))):
        with error("a token sees none, or tokens that are not there"):
            call("sequence_attention", outputs, q, k, k, ints(*first), ints(*last), scale=np.float32(1))
