"""Reading GGUF files, against gguf-py's writer, and what is not one."""

import contextlib
import re
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.errors import CheckpointError
from jaxis.loading.gguf.container import GGUFFile, read_gguf_metadata
from jaxis.loading.gguf_block_types import BLOCK_TYPES
from jaxis.loading.header_cache import headers_read_once

TENSORS = {
    "token_embd.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "blk.0.ffn_gate_exps.weight": np.arange(24, dtype=np.float16).reshape(2, 3, 4),
    "output_norm.weight": np.ones(5, np.float32),
}
METADATA = {
    "a.uint8": ("add_uint8", 250),
    "a.int8": ("add_int8", -5),
    "a.uint16": ("add_uint16", 65_000),
    "a.int16": ("add_int16", -300),
    "a.uint32": ("add_uint32", 4_000_000_000),
    "a.int32": ("add_int32", -7),
    "a.float32": ("add_float32", 0.5),
    "a.uint64": ("add_uint64", 2**63 + 1),
    "a.int64": ("add_int64", -(2**62)),
    "a.float64": ("add_float64", 1e300),
    "a.bool": ("add_bool", True),
    "a.string": ("add_string", "日本 \u00e9"),
    "a.strings": ("add_array", ["one", "", "three"]),
    "a.integers": ("add_array", [1, -2, 3]),
    "a.floats": ("add_array", [0.5, 1.5]),
    "a.bools": ("add_array", [True, False, True]),
}


def write(path, *, tensors=TENSORS, alignment=None, types=None):
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (method, value) in METADATA.items():
        getattr(writer, method)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def open_bytes(folder, content):
    path = folder / "broken.gguf"
    path.write_bytes(content)
    with GGUFFile(path) as file:
        for name in file.tensors:
            file.tensor(name).tobytes()
    return read_gguf_metadata(path)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_tensors_and_keys_are_those_that_were_written(alignment, tmp_path):
    path = write(tmp_path / "model.gguf", alignment=alignment)
    with GGUFFile(path) as file:
        assert list(file.tensors) == list(TENSORS)
        for name, expected in TENSORS.items():
            found = file.tensor(name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
            file.release(found)
            np.testing.assert_array_equal(found, expected)
    found = read_gguf_metadata(path)
    assert found["general.architecture"] == "llama"
    for key, (_, expected) in METADATA.items():
        value = found[key].tolist() if isinstance(found[key], np.ndarray) else found[key]
        assert value == expected
        assert type(value) is type(expected)


def test_a_header_is_parsed_once_where_asked_for_and_again_when_the_file_changes(tmp_path):
    path = write(tmp_path / "model.gguf")
    with headers_read_once():
        with GGUFFile(path) as file:
            assert read_gguf_metadata(path) is file.metadata
        write(path, alignment=4096)
        assert read_gguf_metadata(path)["general.alignment"] == 4096
    assert read_gguf_metadata(path) is not read_gguf_metadata(path)


def test_quantized_rows_are_bytes(tmp_path):
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2 * 144), np.uint8)
    path = write(tmp_path / "m.gguf", tensors={"x": blocks}, types={"x": gguf.GGMLQuantizationType.Q4_K})
    with GGUFFile(path) as file:
        assert file.tensors["x"].shape == (3, 512)
        np.testing.assert_array_equal(file.tensor("x"), blocks)


def test_every_type_has_ggufs_sizes():
    for type_id, block_type in BLOCK_TYPES.items():
        if block_type.trailer:  # bitnet.cpp's
            continue
        kind = gguf.GGMLQuantizationType(type_id)
        assert (block_type.name, (block_type.elements, block_type.nbytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


def test_text_that_is_not_utf8_survives(tmp_path, valid):
    found = open_bytes(tmp_path, valid.replace(b"three", b"th\xff\xfee"))
    assert found["a.strings"][2].encode("utf-8", "surrogateescape") == b"th\xff\xfee"


def test_every_truncation_is_an_error(tmp_path, valid):
    end = len(valid) - 12  # padding follows
    for size in {*range(0, end, 7), end - 1}:
        with pytest.raises(CheckpointError, match=r"truncated|does not begin"):
            open_bytes(tmp_path, valid[:size])


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_read_or_refused(tmp_path_factory, valid, changes):
    content = bytearray(valid)
    for position, byte in changes:
        content[position % len(content)] = byte
    with contextlib.suppress(CheckpointError):
        open_bytes(tmp_path_factory.getbasetemp(), bytes(content))


def header(tensors=0, keys=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def info(name=b"t", shape=(4,), kind=0, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", kind, offset)


HUGE = 2**63
PADDING = b"\0" * 4096


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with 'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"ggjt" + PADDING, "does not begin with 'GGUF'"),
        (b"tjgg" + PADDING, "is from before GGUF (2023)"),
        (header(version=1), "has version 1 of GGUF; versions 2 and 3 are read"),
        (header(version=4), "has version 4 of GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (header(tensors=HUGE), "is truncated within the header"),
        (header(keys=HUGE), "is truncated within the header"),
        (header(keys=1) + struct.pack("<Q", HUGE) + PADDING, "is truncated within key 1 of 1"),
        (header(keys=1) + key(b"k", 8, struct.pack("<Q", HUGE)) + PADDING, "is truncated within the key 'k'"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQ", 4, HUGE)) + PADDING, "is truncated within the key 'k'"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQ", 8, HUGE)) + PADDING, "is truncated within the key 'k'"),
        (header(keys=1) + key(b"k", 9, struct.pack("<IQ", 9, 1)) + PADDING, "is an array of the type 9"),
        (header(keys=1) + key(b"k", 77, b"") + PADDING, "has a value of the unknown type 77"),
        (header(keys=2) + 2 * key(b"k", 0, b"\1") + PADDING, "the key 'k' occurs twice"),
        (header(tensors=2) + 2 * info() + PADDING, "the tensor 't' occurs twice"),
        (header(tensors=1) + info(shape=(1,) * 5) + PADDING, "has 5 dimensions, more than 4"),
        (header(tensors=1) + info(shape=(2**32, 2**32)) + PADDING, "has the shape [4294967296, 4294967296]"),
        (header(tensors=1) + info(shape=(4, 0)) + PADDING, "has the shape [0, 4]"),
        (
            header(tensors=1) + info(shape=(40,), kind=8) + PADDING,
            "rows of 40 elements, which blocks of 32 (Q8_0) do not",
        ),
        (header(tensors=1) + info(offset=33) + PADDING, "starts at 33, not at a multiple of 32"),
        (header(tensors=1) + info(offset=2**40), "is truncated: 1099511627"),
        (header(tensors=2) + info() + info(b"u") + PADDING, "tensor 'u' overlaps the one before it"),
        (header(tensors=1) + info(kind=37) + PADDING, "of the type IQ4_NL_4_8, made for an old llama.cpp"),
        (header(tensors=1) + info(kind=16) + PADDING, "of the type IQ2_XXS, which is not supported: use a file in"),
        (header(tensors=1) + info(kind=139) + PADDING, "of the type IQ4_K of ik_llama.cpp"),
        (header(tensors=1) + info(kind=202) + PADDING, "of a type of ik_llama.cpp (202)"),
        (header(tensors=1) + info(kind=9999) + PADDING, "of the unknown type 9999"),
        (header(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 48)), "general.alignment is 48, not a power"),
        (header(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 0)), "general.alignment is 0, not a power"),
    ],
)
def test_what_is_broken_is_named(content, message, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        open_bytes(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_a_header_that_claims_more_than_the_limit_is_an_error(tmp_path, monkeypatch, valid):
    monkeypatch.setattr("jaxis.loading.gguf.container.MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="is not within its first 100 bytes"):
        open_bytes(tmp_path, valid)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        GGUFFile(tmp_path / "none.gguf")
