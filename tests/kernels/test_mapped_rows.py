"""Rows of tables in mapped files, by the native kernel and by the host: the rows themselves, and memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.errors import CheckpointError
from jaxis.kernels import native
from jaxis.kernels.mapped_rows import TablePart, mapped_rows, table_operand
from jaxis.layers.mapped_table import MappedTable
from jaxis.loading.headers import HeaderTensor
from jaxis.loading.safetensors import SafetensorsFile
from jaxis.loading.safetensors_writer import write_tensors


@pytest.fixture(params=["native", "host"])
def way(request, monkeypatch):
    """The kernel, or what accelerators have."""
    if request.param == "host":
        monkeypatch.setattr(native, "usable", lambda: False)
    elif not native.usable():
        pytest.skip("no native kernels")


def table_of(folder, parts):
    """A table whose parts are tensors of one file."""
    file = folder / "table.safetensors"
    write_tensors(file, {f"part_{i}": part for i, part in enumerate(parts)})
    table = MappedTable(sum(map(len, parts)), parts[0].shape[1])
    with SafetensorsFile(file) as opened:
        for i in reversed(range(len(parts))):
            table.take(i, opened.tensor(f"part_{i}"))
    table.finish()
    return table


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu])
def test_rows_are_those_of_the_file(tmp_path, dtype):
    rng = np.random.default_rng(0)
    # The last part is shorter, and a row is no multiple of a word.
    parts = [rng.integers(1, 100, (rows, 7)).astype(dtype) for rows in (300, 300, 5)]
    table, whole = table_of(tmp_path, parts), np.concatenate(parts)
    for shape in ((0,), (1,), (3, 4), (20_000,)):
        ids = rng.integers(0, len(whole), shape).astype(np.int32)
        found = jax.jit(lambda ids: table(ids))(ids)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), whole[ids])
    outside = jnp.array([-1, len(whole), 604, 2**31 - 1])
    expected = np.where([[False], [False], [True], [False]], whole[604], np.zeros((), dtype))
    np.testing.assert_array_equal(np.asarray(table(outside)), expected)


@pytest.mark.usefixtures("way")
def test_rows_of_arrays_in_memory_and_of_no_checkpoint():
    part = TablePart(np.arange(12, dtype=np.float32).reshape(4, 3), None)
    ids = jnp.array([3, 0])
    for _ in range(2):  # nothing is dropped
        np.testing.assert_array_equal(mapped_rows(ids, table_operand([part]), 3, np.dtype("f4")), part.rows[[3, 0]])
    np.testing.assert_array_equal(MappedTable(4, 3)(ids), 0)


def filled(table, parts):
    for number, shape in parts:
        table.take(number, np.zeros(shape, np.float32))
    table.finish()


def test_parts_that_do_not_fit_are_refused():
    for parts, message in (
        ([(0, (4, 2))], r"has shape \[4, 2\] in the checkpoint, \[rows, 3\]"),
        ([(0, (4, 3))], "has 4 rows in 1 parts of the checkpoint, 8 in the model"),
        ([(0, (4, 3)), (2, (4, 3))], "has 8 rows in 2 parts"),
        ([(0, (3, 3)), (1, (5, 3))], "must have equally many rows"),
    ):
        with pytest.raises(CheckpointError, match=message):
            filled(MappedTable(8, 3), parts)
    table = MappedTable(8, 3)
    table.take(0, np.zeros((4, 3), np.float32))
    with pytest.raises(CheckpointError, match="bfloat16 in the checkpoint, and another part of the table float32"):
        table.take(1, np.zeros((4, 3), ml_dtypes.bfloat16))


def test_headers_alone_make_a_table():
    table = MappedTable(8, 3)
    table.take(0, HeaderTensor.of((8, 3), ml_dtypes.bfloat16))
    table.finish()
    assert table.row_dtype == ml_dtypes.bfloat16


def resident_kb():
    lines = Path("/proc/self/smaps").read_text().split("\n")
    starts = [i for i, line in enumerate(lines) if "table.safetensors" in line]
    return sum(int(next(x for x in lines[i:] if x.startswith("Rss:")).split()[1]) for i in starts)


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc")
def test_little_of_the_table_is_resident(tmp_path):
    """16 rows a token, 1,000 tokens: each page of this table is read about four times."""
    num_bytes, rng = 16 << 20, np.random.default_rng(1)
    table = table_of(tmp_path, [np.ones((num_bytes // 4 // 320, 320), np.uint8) for _ in range(4)])
    lookup = jax.jit(lambda ids: table(ids))
    assert resident_kb() * 1024 <= 0.05 * num_bytes
    for tokens in (480, *[1] * 40, 480):
        ids = rng.integers(0, table.num_rows, (tokens, 16)).astype(np.int32)
        assert np.asarray(lookup(ids)).min() == 1
        assert resident_kb() * 1024 <= 0.05 * num_bytes
