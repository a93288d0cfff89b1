"""The writer against the safetensors library, and what it refuses."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxis.loading.safetensors import SafetensorsFile
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader

RNG = np.random.default_rng(0)
TENSORS = {
    "a": RNG.standard_normal((3, 5)).astype(np.float32),
    "empty": np.empty((0, 4), np.float16),
    "scalar": np.array(7, np.int64),
    "b": RNG.integers(-128, 128, (4, 3), np.int8),
    "words": RNG.integers(0, 99, (2, 2)).astype("<i4"),
    "low_precision": RNG.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
}
SPECS = {name: TensorHeader(tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}


def write(path, tensors):
    with SafetensorsWriter(path, SPECS) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def test_the_library_and_our_reader_read_it(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, TENSORS)
    theirs = load_file(path)
    with SafetensorsFile(path) as ours:
        assert ours.names == tuple(TENSORS)
        assert ours.info("a").offset % 8 == 0
        for name, tensor in TENSORS.items():
            assert theirs[name].dtype == ours.tensor(name).dtype == tensor.dtype
            np.testing.assert_array_equal(theirs[name], tensor)
            np.testing.assert_array_equal(ours.tensor(name), tensor)


def test_a_transposed_view_is_written_as_it_reads(tmp_path):
    spec = {"t": TensorHeader(np.dtype(np.float32), (5, 3))}
    with SafetensorsWriter(tmp_path / "x.safetensors", spec) as writer:
        writer.write("t", TENSORS["a"].T)
    np.testing.assert_array_equal(load_file(tmp_path / "x.safetensors")["t"], TENSORS["a"].T)


def test_what_was_not_announced_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="b int8"):
        write(path, {"b": TENSORS["b"]})
    with pytest.raises(ValueError, match=r"a float64 \(3, 5\) was written where a"):
        write(path, {"a": TENSORS["a"].astype(np.float64)})
    with pytest.raises(ValueError, match="empty was announced but never written"):
        write(path, {"a": TENSORS["a"]})
