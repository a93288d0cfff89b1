"""The native library and this package agree about functions and numbers, or it is not loaded."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxis.errors import EngineError
from jaxis.kernels import native, native_constants
from jaxis.kernels.weights.packed_format import PackedFormat
from tests.support.places import REPOSITORY

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not built")

SOURCES = REPOSITORY / "native" / "src"


@pytest.fixture
def path():
    return Path(native.library()._name)


def test_a_library_with_another_number_is_an_error(path, monkeypatch):
    monkeypatch.setattr(native_constants, "PANEL_ROWS", 33)
    with pytest.raises(EngineError, match="panel_rows is 32 in the library and 33 in Python; install jaxis again"):
        native.load(path)


@pytest.mark.parametrize("enum", ["WEIGHT_TYPES", "ACTIVATIONS", "FLOAT_TYPES", "CALIBRATIONS", "QUANTIZE_STATUS"])
def test_a_library_with_other_types_is_an_error(path, monkeypatch, enum):
    numbers = getattr(native_constants, enum)
    monkeypatch.setattr(native_constants, enum, numbers | {"new": 99})
    with pytest.raises(EngineError, match=r"\w+\.new is missing in the library and 99 in Python"):
        native.load(path)
    monkeypatch.setattr(native_constants, enum, dict(list(numbers.items())[1:]))
    with pytest.raises(EngineError, match=f"{next(iter(numbers))} is 0 in the library and missing in Python"):
        native.load(path)


def test_a_library_that_lacks_a_function_is_an_error(path, monkeypatch):
    monkeypatch.setitem(native.SIGNATURES, "jaxis_new", (None, []))
    with pytest.raises(EngineError, match="lacks jaxis_new; install jaxis again"):
        native.load(path)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_every_function_that_is_no_handler_has_a_signature(path):
    symbols = subprocess.run(["nm", "-D", "--defined-only", path], check=True, capture_output=True, text=True).stdout
    exported = set(re.findall(r" T (jaxis_\w+)", symbols))
    sources = "".join(source.read_text() for source in SOURCES.glob("*_ffi.cc"))
    handlers = set(re.findall(r"JAXIS_HANDLER\(\s*(jaxis_\w+)", sources))
    assert handlers
    assert handlers < exported
    assert exported - handlers == set(native.SIGNATURES)


def test_a_set_that_was_not_compiled_is_an_error_that_says_how_to(monkeypatch):
    monkeypatch.setenv("JAXIS_CPU_ISA", "avx9")
    # Libraries pick their set once, and this process has asked for its own.
    monkeypatch.setattr(native, "load", lambda path: StubLibrary(b"avx512 avx2", None))
    with pytest.raises(
        EngineError, match=r"JAXIS_CPU_ISA='avx9' cannot run here: give one of avx512, avx2, or none"
    ) as e:
        native._find.__wrapped__()
    assert "JAXIS_ISAS=all pip install -e ." in str(e.value)


def test_a_library_for_another_processor_is_left_alone_and_said(monkeypatch, caplog):
    monkeypatch.setattr(native, "load", lambda path: StubLibrary(b"", None))
    library, why = native._find.__wrapped__()
    assert library is None
    assert "compiled for another machine's processor" in why
    assert why in caplog.text


class StubLibrary:
    """What is asked of a library when it is looked for."""

    def __init__(self, supported: bytes, isa: bytes | None):
        self.jaxis_supported_isas = lambda: supported
        self.jaxis_isa = lambda: isa
        self.jaxis_ffi_major = self.jaxis_ffi_minor = lambda: 0


def test_an_unknown_type_is_no_other_type():
    library = native.library()
    codes = PackedFormat("codes", 64, 32, bits=4, scale="float16").encode()
    assert library.jaxis_panel_bytes(codes.ctypes.data, codes.size, 64) == 32 * 64 * 9 // 16
    assert library.jaxis_panel_bytes(codes.ctypes.data, codes.size - 1, 64) == -1
    assert library.jaxis_panel_bytes(codes.ctypes.data, codes.size, 48) == -1
    codes[0] = 99
    assert library.jaxis_panel_bytes(codes.ctypes.data, codes.size, 64) == -1
    assert not library.jaxis_pack(codes.ctypes.data, codes.size, 32, 64, 4, False, *[None] * 8, 0, 1)
    unsupported = native_constants.QUANTIZE_STATUS["unsupported"]
    assert library.jaxis_quantize(99, 0, None, 1, 64, 64, True, None, None, None) == unsupported
    assert library.jaxis_quantize(0, 99, None, 1, 64, 64, True, None, None, None) == unsupported
    assert library.jaxis_quantize_panels(0, 99, None, 32, 64, 0, None, 0, 1) == unsupported
    assert library.jaxis_quantize_panels(0, 1, None, 32, 64, 48, None, 0, 1) == unsupported
