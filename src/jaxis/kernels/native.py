"""Library of native CPU kernels: loading, checks, and calls from JAX programs."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, overload

import jax
import numpy as np

from jaxis.errors import EngineError
from jaxis.kernels import native_constants
from jaxis.kernels.platform import target_platform

LIBRARY = Path("native", "libjaxis.so")

_logger = logging.getLogger(__name__)


class _Constant(ctypes.Structure):
    """An entry of the library's table of constants. The last one has no name."""

    name: bytes | None
    value: int
    _fields_: ClassVar = [("name", ctypes.c_char_p), ("value", ctypes.c_int64)]


_i32, _i64, _bool, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p

SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # Result type, then argument types, of the `extern "C"` functions in native/src/*.cc.
    "jaxis_ffi_major": (ctypes.c_int, []),
    "jaxis_ffi_minor": (ctypes.c_int, []),
    "jaxis_isa": (ctypes.c_char_p, []),
    "jaxis_supported_isas": (ctypes.c_char_p, []),
    # threads, kernels to time -> median seconds of a kernel beyond its tasks
    "jaxis_barrier_seconds": (ctypes.c_double, [_i32, _i64]),
    "jaxis_num_barriers": (_i64, []),
    "jaxis_constants": (ctypes.POINTER(_Constant), []),
    # format, its numbers, k
    "jaxis_panel_bytes": (_i64, [_pointer, _i64, _i64]),
    # format, its numbers, n, k, bits of the source, is_signed, data, scales, high, zero_points, minima, super_scales,
    # super_minima, packed, first panel, last panel
    "jaxis_pack": (_bool, [_pointer, _i64, _i64, _i64, _i64, _bool, *[_pointer] * 8, _i64, _i64]),
    # type, calibration, weight, rows, k, group, wide_scales, qvalue, scales, zero_points -> status
    "jaxis_quantize": (_i32, [_i32, _i32, _pointer, _i64, _i64, _i64, _bool, _pointer, _pointer, _pointer]),
    # addresses, bytes, count, digests
    "jaxis_digests": (None, [_pointer, _pointer, _i64, _pointer]),
    # type, calibration, weight, rows, k, group, packed, first panel, last panel -> status
    "jaxis_quantize_panels": (_i32, [_i32, _i32, _pointer, _i64, _i64, _i64, _pointer, _i64, _i64]),
}
"""Every function of the library but the FFI handlers, which only XLA calls."""


def library() -> ctypes.CDLL | None:
    """Returns the loaded library; None if it was not built or does not load here, or if `JAXIS_CPU_ISA=none`.

    Raises EngineError if `JAXIS_CPU_ISA` names an instruction set that the library or the processor does not have, or
    the library was built from other sources than this package.
    """
    return _find()[0]


def isa() -> str | None:
    lib = library()
    return None if lib is None else lib.jaxis_isa().decode()


def status() -> str:
    """Returns one line: the instruction set in use and those available, or why there are no native kernels."""
    try:
        lib, why_none = _find()
    except EngineError as error:
        return f"none: {error}"
    if lib is None:
        return f"none: {why_none}"
    return f"{lib.jaxis_isa().decode()} (of {_names(lib)})"


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    wanted = os.environ.get("JAXIS_CPU_ISA")
    if wanted == "none":
        return None, "JAXIS_CPU_ISA=none"
    # An editable installation has the sources and the built library in different folders.
    folders = package_folders()
    paths = [path for folder in folders if (path := Path(folder, LIBRARY)).exists()]
    if not paths:
        missing = Path(folders[0], LIBRARY)
        return None, f"{missing} was not built; install a C++17 compiler (g++ or clang++), then install jaxis again"
    try:
        lib = load(paths[0])
    except OSError as error:
        return None, f"{error}; install jaxis again"
    built, runs = (lib.jaxis_ffi_major(), lib.jaxis_ffi_minor()), _xla_ffi_version()
    # XLA accepts older kernels but not newer ones: the whole backend would fail to start.
    if built > runs:
        return None, (
            f"{paths[0]} was built for XLA's FFI {built[0]}.{built[1]}, which is newer than the installed jaxlib's "
            f"{runs[0]}.{runs[1]}; install jaxis again"
        )
    if not _names(lib):
        why = f"{paths[0]} was compiled for another machine's processor, not for this one's; install jaxis again"
        _logger.warning("native kernels are not used, and all is slower: %s", why)
        return None, why
    if lib.jaxis_isa() is None:
        raise EngineError(
            f"JAXIS_CPU_ISA={wanted!r} cannot run here: give one of {_names(lib)}, or none "
            "(an installation with -e compiles only this machine's best: JAXIS_ISAS=all pip install -e . compiles all)"
        )
    return lib, ""


def package_folders() -> list[str]:
    """Returns the folders of jaxis: two of an editable installation, one with the sources, one with the library."""
    spec = importlib.util.find_spec(__name__.partition(".")[0])
    locations = None if spec is None else spec.submodule_search_locations
    return list(locations or ())


def load(path: Path) -> ctypes.CDLL:
    """Loads a library of native kernels and declares its functions. Raises OSError if it cannot be loaded here.

    Raises EngineError if it was built from other sources: its functions or constants differ from this package's.
    """
    lib = ctypes.CDLL(str(path))
    try:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError:
        raise EngineError(f"{path} is not of this version of jaxis: it lacks {name}; install jaxis again") from None
    _check_constants(path, _constants(lib))
    return lib


def _constants(lib: ctypes.CDLL) -> dict[str, int]:
    constants: dict[str, int] = {}
    for constant in lib.jaxis_constants():
        if constant.name is None:
            break
        constants[constant.name.decode()] = constant.value
    return constants


def _check_constants(path: Path, built: dict[str, int]) -> None:
    expected = native_constants.table()
    for name in expected | built:
        if built.get(name) != expected.get(name):
            raise EngineError(
                f"{path} is not of this version of jaxis: {name} is {built.get(name, 'missing')} in the library and "
                f"{expected.get(name, 'missing')} in Python; install jaxis again"
            )


def _names(lib: ctypes.CDLL) -> str:
    return lib.jaxis_supported_isas().decode().replace(" ", ", ")


def _xla_ffi_version() -> tuple[int, int]:
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    assert major is not None
    assert minor is not None
    return int(major[1]), int(minor[1])


def usable() -> bool:
    """Returns whether a program traced now may call native kernels: on CPU, on one device."""
    if target_platform() != "cpu" or library() is None:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


@overload
def call(
    name: str,
    outputs: jax.ShapeDtypeStruct,
    *operands: jax.Array | np.ndarray,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> jax.Array: ...


@overload
def call(
    name: str,
    outputs: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array | np.ndarray,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Sequence[jax.Array]: ...


def call(
    name: str,
    outputs: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array | np.ndarray,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> jax.Array | Sequence[jax.Array]:
    """Calls the kernel `name`: its handler's name in the library, without the prefix `jaxis_`.

    Args:
      name: The name.
      outputs: Shape and type of each output, as `jax.ffi.ffi_call` takes them.
      operands: Input arrays.
      aliases: Index of an operand -> index of the output that reuses its memory.
      attributes: Attributes of the kernel, by name: numpy scalars, arrays or strings.
    """
    function = jax.ffi.ffi_call(register(name), outputs, input_output_aliases=aliases, vmap_method="sequential")
    return function(*operands, **attributes)


def transformable(function: Callable[..., Any], definition: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, but differentiated and vectorised as `definition`, which has the same trees of arrays."""
    vectorised = jax.custom_batching.custom_vmap(function)

    @vectorised.def_vmap
    def vmap(axis_size: int, is_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
        outputs = jax.vmap(definition, in_axes=axes, axis_size=axis_size)(*operands)
        return outputs, jax.tree.map(lambda _: True, outputs)

    wrapped = jax.custom_vjp(vectorised)

    def forward(*operands: jax.Array) -> tuple[Any, Sequence[jax.Array]]:
        return vectorised(*operands), operands

    def backward(operands: Sequence[jax.Array], cotangents: object) -> Any:
        return jax.vjp(definition, *operands)[1](cotangents)

    wrapped.defvjp(forward, backward)
    return wrapped


def kernel_name(target: str) -> str | None:
    """Returns the kernel's name from its name in JAX; None for a target that is not of this library."""
    lib = library()
    suffix = "" if lib is None else f"_{lib.jaxis_isa().decode()}"
    is_ours = target.startswith("jaxis_") and bool(suffix) and target.endswith(suffix)
    return target.removeprefix("jaxis_").removesuffix(suffix) if is_ours else None


@functools.cache
def register(name: str) -> str:
    """Makes a kernel known to XLA, before a program that calls it is compiled or loaded; returns its name in JAX."""
    lib = library()
    assert lib is not None
    target = f"jaxis_{name}_{lib.jaxis_isa().decode()}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(lib, f"jaxis_{name}")), platform="cpu")
    return target
