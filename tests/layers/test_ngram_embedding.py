"""Tables of n-grams as checkpoints have them: with fp8 rows and a factor, in GGUF's blocks, and with faults."""

from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.layers.ngram_embedding import NgramEmbedding
from jaxis.layers.ngram_hash import NgramHash
from jaxis.loading.safetensors import SafetensorsFile
from jaxis.loading.safetensors_writer import write_tensors
from jaxis.quantization.checkpoints.gguf import GGUFQuantizationConfig
from tests.kernels.test_mapped_rows import resident_kb
from tests.layers.layer_scopes import in_one_program, scope_of
from tests.support.gguf_blocks import QUANTIZED, random_rows

HASH = NgramHash(((3, 5), (7, 0)), (11, 13), (0, 11))
STORED = {"layer_multipliers": (3, 5), "ngram_heads_offsets": (0, 11)}
WINDOW = np.random.default_rng(0).integers(0, 100, (9, 2)).astype(np.int32)


def embedding():
    return NgramEmbedding(scope_of({}), HASH, num_rows=24, width=4, stored=STORED)


def tensors(dtype, scale=None):
    rows = np.random.default_rng(1).normal(size=(24, 4)).astype(dtype)
    named = {"ngram_embedding.shard_1.weight": rows[12:], "ngram_embedding.shard_0.weight": rows[:12]}
    named["layer_multipliers"] = np.array([3, 5], np.int64)
    if scale is not None:
        named["ngram_embedding.weight_scale"] = np.array(scale, ml_dtypes.bfloat16)
    return rows.astype(np.float32), named


@pytest.mark.parametrize("scale", [0.125, [0.37]])
def test_rows_of_fp8_are_multiplied_by_the_tables_factor(scale):
    rows, named = tensors(ml_dtypes.float8_e4m3fn, scale)
    module = embedding()
    assert set(module.load_weights(named.items())) == set(named)
    module.after_loading()
    ids = np.stack([(WINDOW[:, 0] * 3 ^ WINDOW[:, 1] * 5) % 11, WINDOW[:, 0] * 7 % 13 + 11], axis=1)
    expected = (rows[ids] * named["ngram_embedding.weight_scale"].astype(np.float32)).reshape(9, 8)
    np.testing.assert_array_equal(in_one_program(module, WINDOW), expected)


def test_rows_of_fp8_have_powers_of_two_for_parts_of_them_and_classes_are_hashed():
    module = NgramEmbedding(
        scope_of({}), HASH, num_rows=24, width=4, stored=STORED, read_classes=lambda: np.arange(100)[::-1] // 3
    )
    rows, named = tensors(ml_dtypes.float8_e4m3fn)
    exponents = np.random.default_rng(2).integers(120, 134, (24, 2)).astype(np.uint8)
    named["ngram_embedding.weight_scale_inv"] = exponents.view(ml_dtypes.float8_e8m0fnu)
    load(module, named)
    of_classes = (99 - WINDOW) // 3
    ids = np.stack([(of_classes[:, 0] * 3 ^ of_classes[:, 1] * 5) % 11, of_classes[:, 0] * 7 % 13 + 11], axis=1)
    expected = (rows * np.repeat(2.0 ** (exponents.astype(int) - 127), 2, axis=1))[ids].reshape(9, 8)
    np.testing.assert_array_equal(in_one_program(module, WINDOW), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer_multipliers": np.array([3, 7])}, r"layer_multipliers is \[3, 7\] in the checkpoint, but \[3, 5\] by"),
        ({"ngram_embedding.shard_0.weight": None}, "the table of n-grams has 12 rows in 1 parts of the checkpoint, 24"),
        ({"ngram_embedding.shard_0.scale": np.ones(3)}, r"ngram_embedding.shard_0.scale \[3\] is no part of a table"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    named = {name: x for name, x in (tensors(np.float32)[1] | changed).items() if x is not None}
    module = embedding()
    with pytest.raises(CheckpointError, match=message):
        load(module, named)


def load(module, named):
    list(module.load_weights(named.items()))
    module.after_loading()


def packed_tensors():
    """Rows [24, 16] in NVFP4 in two shards, and what they stand for."""
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (24, 16)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (24, 1)).astype(ml_dtypes.float8_e4m3fn)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    wide = levels[codes & 7] * np.where(codes > 7, -1, 1) * scales.astype(np.float32) * np.float32(0.25)
    named = {"layer_multipliers": np.array([3, 5], np.int64)}
    for shard, rows in (("1", slice(12, 24)), ("0", slice(0, 12))):
        named[f"ngram_embedding.shard_{shard}.weight_scale"] = scales[rows]
        named[f"ngram_embedding.shard_{shard}.weight"] = codes[rows, ::2] | codes[rows, 1::2] << 4
        named[f"ngram_embedding.shard_{shard}.weight_scale_2"] = np.array(0.25, np.float32)
    return wide, named


def test_packed_rows_are_multiplied_by_the_scales_of_their_blocks():
    wide, named = packed_tensors()
    module = NgramEmbedding(scope_of({}), HASH, num_rows=24, width=16, stored=STORED)
    load(module, named)
    ids = np.stack([(WINDOW[:, 0] * 3 ^ WINDOW[:, 1] * 5) % 11, WINDOW[:, 0] * 7 % 13 + 11], axis=1)
    np.testing.assert_array_equal(in_one_program(module, WINDOW), wide[ids].reshape(9, 32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shard_0.weight_scale_2": np.array(0.5, np.float32)}, "shard_0.weight_scale_2 is 0.5, but another part"),
        ({"shard_0.weight_scale": None}, "the table of n-grams has 12 rows in 1 parts of the checkpoint, 24"),
        ({"shard_0.weight_scale": None, "shard_1.weight_scale": None}, "has packed elements without scales"),
    ],
)
def test_packed_rows_that_do_not_fit_their_scales_are_refused(changed, message):
    named = packed_tensors()[1] | {f"ngram_embedding.{name}": x for name, x in changed.items()}
    module = NgramEmbedding(scope_of({}), HASH, num_rows=24, width=16, stored=STORED)
    with pytest.raises(CheckpointError, match=message):
        load(module, {name: x for name, x in named.items() if x is not None})


def of_blocks(kind, rows, width):
    """An embedding whose table has rows of blocks, as a GGUF file's."""
    config = GGUFQuantizationConfig({"block_types": {"model.table.ngram_embedding": kind}})
    scope = scope_of({}, quant_config=config, prefix="model.table")
    return NgramEmbedding(scope, HASH, num_rows=rows, width=width, stored=STORED)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_of_blocks_are_what_gguf_py_dequantizes(kind):
    blocks = random_rows(kind, 24, 256, scale=0.1)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    module = of_blocks(kind, 24, 256)
    load(module, {"layer_multipliers": np.array([3, 5], np.int64), "ngram_embedding.weight": blocks})
    ids = np.stack([(WINDOW[:, 0] * 3 ^ WINDOW[:, 1] * 5) % 11, WINDOW[:, 0] * 7 % 13 + 11], axis=1)
    found = in_one_program(module, WINDOW)
    np.testing.assert_allclose(found, expected[ids].reshape(9, 512), rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_rows_of_blocks_of_another_width_are_refused():
    with pytest.raises(CheckpointError, match=r"has shape \[24, 34\] in the checkpoint"):
        load(of_blocks("Q8_0", 24, 64), {"ngram_embedding.weight": random_rows("Q8_0", 24, 32)})


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc")
def test_little_of_a_table_of_blocks_is_resident(tmp_path):
    """Two rows a token, 1,000 tokens."""
    rows = random_rows("Q8_0", 200_000, 160, scale=0.1)
    write_tensors(tmp_path / "table.safetensors", {"rows": rows})
    hashes = NgramHash(((3, 5), (7, 0)), (99_991, 100_003), (0, 99_991), "sum")
    module = of_blocks("Q8_0", len(rows), 160)
    module.hashes = hashes
    with SafetensorsFile(tmp_path / "table.safetensors") as opened:
        load(module, {"ngram_embedding.weight": opened.tensor("rows")})
    graph, state = nnx.split(module)
    lookup = jax.jit(lambda state, window: nnx.merge(graph, state)(window))
    for tokens in (480, *[1] * 40, 480):
        window = np.random.default_rng(tokens).integers(0, 100_000, (tokens, 2)).astype(np.int32)
        assert np.isfinite(np.asarray(lookup(state, window))).all()
        assert resident_kb() * 1024 <= 0.05 * rows.nbytes
