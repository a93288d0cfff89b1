"""The C++ kernels for CPU, called through JAX's foreign function interface.

They are built when the package is installed; without them everything runs on plain JAX. `JAXIS_CPU_ISA` picks the
instruction set by name (`none`: no native kernels at all), so that each can be tested on a machine that has several.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxis
from jaxis.errors import EngineError

LIBRARY = Path("native", "libjaxis.so")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None if it was not built, or if `JAXIS_CPU_ISA=none`.

    Raises:
      EngineError: `JAXIS_CPU_ISA` names an instruction set that the library or the processor does not have.
    """
    wanted = os.environ.get("JAXIS_CPU_ISA")
    # An editable installation has the sources in one folder and what was built in another.
    paths = [path for folder in jaxis.__path__ if (path := Path(folder, LIBRARY)).exists()]
    if wanted == "none" or not paths:
        return None
    lib = ctypes.CDLL(str(paths[0]))
    lib.jaxis_isa.restype = lib.jaxis_supported_isas.restype = ctypes.c_char_p
    if lib.jaxis_isa() is None:
        names = lib.jaxis_supported_isas().decode().replace(" ", ", ")
        raise EngineError(f"JAXIS_CPU_ISA={wanted!r} cannot run here: give one of {names}, or none")
    return lib


def isa() -> str | None:
    """The instruction set in use; None without native kernels."""
    lib = library()
    return None if lib is None else lib.jaxis_isa().decode()


def usable() -> bool:
    """Whether a program traced now may call native kernels: on CPU, on one device."""
    if jax.default_backend() != "cpu" or library() is None:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def call(
    name: str, outputs: Any, *operands: jax.Array, aliases: dict[int, int] | None = None, **attributes: Any
) -> Any:
    """Calls the kernel `name`; attributes are passed as numpy scalars, arrays or strings.

    Args:
      name: Of the handler in the library, without the `jaxis_` it begins with.
      outputs: Shape and type of each output, as `jax.ffi.ffi_call` takes them.
      operands: Arrays.
      aliases: Which operand's memory an output takes over.
      attributes: By name.
    """
    lib = library()
    assert lib is not None
    function = jax.ffi.ffi_call(_register(lib, name), outputs, input_output_aliases=aliases, vmap_method="sequential")
    return function(*operands, **attributes)


def differentiable(function: Callable[..., Any], definition: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose derivatives are those of `definition`: both take and return the same arrays."""
    wrapped = jax.custom_vjp(function)

    def forward(*operands: jax.Array) -> tuple[Any, Sequence[jax.Array]]:
        return function(*operands), operands

    def backward(operands: Sequence[jax.Array], cotangents: Any) -> Any:
        return jax.vjp(definition, *operands)[1](cotangents)

    wrapped.defvjp(forward, backward)
    return wrapped


@functools.cache
def _register(lib: ctypes.CDLL, name: str) -> str:
    """Makes the kernel known to JAX and returns its name there, which says whose kernel it is."""
    target = f"jaxis_{name}_{lib.jaxis_isa().decode()}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(lib, f"jaxis_{name}")), platform="cpu")
    return target
