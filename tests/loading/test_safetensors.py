import json
import mmap
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.errors import CheckpointError
from jaxis.loading.safetensors import SafetensorsFile


def write(path, header, data=b"", *, header_bytes=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if header_bytes is None else header_bytes).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


TORCH_DTYPES = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.int8: np.int8,
    torch.uint16: np.uint16,
    torch.int16: np.int16,
    torch.uint32: np.uint32,
    torch.int32: np.int32,
    torch.uint64: np.uint64,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu,
}


def test_every_dtype_that_torch_saves_is_read_with_the_same_values(tmp_path):
    values = torch.tensor([[1, 0, 2], [4, 8, 0.5]])
    tensors = {str(dtype): values.to(dtype) for dtype in TORCH_DTYPES}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert set(file.names) == set(tensors)
        assert file.metadata == {"format": "pt"}
        for dtype, numpy_dtype in TORCH_DTYPES.items():
            array = file.tensor(str(dtype))
            assert array.dtype == np.dtype(numpy_dtype)
            wide = np.complex128 if dtype.is_complex else np.float64
            expected = tensors[str(dtype)].to(torch.complex128 if dtype.is_complex else torch.float64).numpy()
            np.testing.assert_array_equal(array.astype(wide), expected)


def test_f4_unpacks_two_elements_from_each_byte_low_half_first(tmp_path):
    write(tmp_path / "a", {"w": entry("F4", (1, 4), 0, 2)}, bytes([0x21, 0xF7]))
    array = SafetensorsFile(tmp_path / "a").tensor("w")
    np.testing.assert_array_equal(array.astype(np.float32), [[0.5, 1.0, 6.0, -6.0]])


def test_info_gives_shape_size_and_place_in_the_file(tmp_path):
    path = write(tmp_path / "a", {"w": entry("BF16", (2, 3), 0, 12), "b": entry("F32", (), 12, 16)}, bytes(16))
    info = SafetensorsFile(path).info("w")
    assert (info.dtype, info.shape, info.nbytes) == (np.dtype(ml_dtypes.bfloat16), (2, 3), 12)
    assert info.offset == path.stat().st_size - 16
    assert SafetensorsFile(path).info("b").shape == ()


def test_tensor_is_a_view_of_the_file_that_cannot_be_written(tmp_path):
    safetensors.numpy.save_file({"w": np.arange(6, dtype=np.float32)}, tmp_path / "a")
    file = SafetensorsFile(tmp_path / "a")
    array = file.tensor("w")
    assert isinstance(array.base, mmap.mmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_view_outlives_release_and_close(tmp_path):
    values = np.arange(10_000, dtype=np.float32)
    safetensors.numpy.save_file({"v": values, "w": values + 1}, tmp_path / "a")
    file = SafetensorsFile(tmp_path / "a")
    array = file.tensor("w")
    file.release("w")
    file.release("v")
    file.close()
    np.testing.assert_array_equal(array, values + 1)
    with pytest.raises(CheckpointError, match="was closed"):
        file.tensor("w")


def test_misaligned_tensor_is_read(tmp_path):
    header = {"a": entry("U8", (1,), 0, 1), "b": entry("F32", (2,), 1, 9)}
    path = write(tmp_path / "a", header, b"\7" + np.array([1.5, -2], "<f4").tobytes())
    np.testing.assert_array_equal(SafetensorsFile(path).tensor("b"), [1.5, -2])


def test_file_without_tensors_and_tensor_without_elements_are_read(tmp_path):
    assert SafetensorsFile(write(tmp_path / "a", {})).names == ()
    path = write(tmp_path / "b", {"x": entry("F32", (0, 4), 0, 0), "y": entry("F32", (1,), 0, 4)}, bytes(4))
    with SafetensorsFile(path) as file:
        assert file.tensor("x").shape == (0, 4)
        assert file.tensor("y").shape == (1,)


def test_names_come_in_the_order_of_their_bytes(tmp_path):
    path = write(tmp_path / "a", {"late": entry(begin=8, end=16), "early": entry()}, bytes(16))
    assert SafetensorsFile(path).names == ("early", "late")


BROKEN = {
    "empty": (b"", "0 bytes, fewer than the 8"),
    "shorter than the header's length": (b"1234", "4 bytes, fewer than the 8"),
    "huge header": ((2**62).to_bytes(8, "little") + b"{}", "more than the 100000000 allowed"),
    "header longer than the file": ((12).to_bytes(8, "little") + b"{}", "truncated: 10 of 20 bytes are missing"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer.*git lfs pull"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_start_of_file_is_named(tmp_path, case):
    content, message = BROKEN[case]
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsFile(tmp_path / "a.safetensors")
    assert "a.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


W = entry()
BROKEN_HEADERS = {
    "not json": (b"{not json", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', "not valid JSON"),
    "not an object": (b"[1]", "does not start with"),
    "deep nesting": (b'{"w":' + b"[" * 100_000, "not valid JSON"),
    "same name twice": (b'{"w": {}, "w": {}}', "'w' appears twice"),
    "metadata not text": ({"__metadata__": {"a": 1}, "w": W}, "__metadata__"),
    "entry not an object": ({"w": 3}, "tensor 'w' lacks"),
    "entry without shape": ({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, "tensor 'w' lacks"),
    "unknown dtype": ({"w": entry("F7")}, "unknown dtype 'F7'.*BF16"),
    "dtype not text": ({"w": entry(["F32"])}, "unknown dtype"),
    "negative size": ({"w": entry(shape=(-1, -2))}, "non-negative"),
    "size not whole": ({"w": entry(shape=(2.0,))}, "non-negative"),
    "size a boolean": ({"w": entry(shape=(True, 2))}, "non-negative"),
    "shape not a list": ({"w": {**W, "shape": 2}}, "non-negative"),
    "three offsets": ({"w": {**W, "data_offsets": [0, 4, 8]}}, "expected .begin, end."),
    "offsets reversed": ({"w": entry(begin=8, end=0)}, "span -8"),
    "negative offset": ({"w": entry(begin=-8, end=0)}, "expected .begin, end."),
    "size of 2**70": ({"w": entry(shape=(2**70,))}, "too large to address"),
    "size of 2**70 beside 0": ({"w": entry(shape=(0, 2**70), end=0)}, "too large to address"),
    "100 dimensions": ({"w": entry(shape=(1,) * 99 + (2,))}, "100 dimensions"),
    "shape larger than offsets": ({"w": entry(shape=(3,))}, r"takes 12 bytes, but its data_offsets \[0, 8\] span 8"),
    "beyond the file": ({"w": entry(shape=(4,), end=16)}, r"truncated: 8 of \d+ bytes are missing \(within tensor 'w'"),
    "bytes of no tensor": ({"w": entry(shape=(1,), end=4)}, "4 bytes after byte .* belong to no tensor"),
    "hole": ({"w": entry("U8", (2,), 0, 2), "x": entry("F32", (1,), 4, 8)}, "leaves a hole"),
    "hole at the start": ({"w": entry("F32", (1,), 4, 8)}, "leaves a hole"),
    "overlap": ({"w": entry(), "x": entry("F32", (1,), 4, 8)}, "overlaps"),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_broken_header_is_named(tmp_path, case):
    header, message = BROKEN_HEADERS[case]
    path = write(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsFile(path)
    assert "a.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_missing_tensor_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors cannot be read: No such file"):
        SafetensorsFile(tmp_path / "nowhere.safetensors")
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        SafetensorsFile(write(tmp_path / "a", {"w": W}, bytes(8))).tensor("v")


@pytest.mark.parametrize("keep", [0, 7, 8, 9, 100, -1])
def test_any_truncation_of_a_real_file_is_refused(tmp_path, keep):
    safetensors.numpy.save_file({"a": np.ones((3, 4)), "b": np.ones(5)}, tmp_path / "a")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:keep])
    with pytest.raises(CheckpointError):
        SafetensorsFile(tmp_path / "a")


REAL = safetensors.numpy.save({"a": np.ones((3, 4), np.float32), "b": np.arange(5)}, {"format": "pt"})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_file_with_changed_bytes_is_read_in_bounds_or_refused(tmp_path_factory, changes):
    content = bytearray(REAL)
    for position, byte in changes:
        content[position] = byte
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    total_bytes = sum(file.tensor(name).nbytes for name in file.names)
    assert total_bytes <= len(content)


def test_importing_the_readers_loads_neither_torch_nor_huggingface_hub():
    code = "import sys, jaxis.loading.checkpoint, jaxis.loading.hub, jaxis.config.rope_config\n"
    code += "print([name for name in ('torch', 'huggingface_hub') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
