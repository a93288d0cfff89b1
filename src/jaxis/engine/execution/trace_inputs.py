"""A digest of all that tracing a program reads, made without tracing it.

These are the model's objects without the values of its arrays, the program's key and context, JAX's settings, the
environment, the machine, and code: the files of jaxis, JAX and Flax by size, inode and times, and what the loaded
modules hold, in case a process has put other functions or constants into them.

Objects of classes from elsewhere have no digest: their code may change unnoticed. A change of modules after an engine
was made shows when a program is to be written, not when one is read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import flax
import jax
import jaxlib
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxis.engine.execution.model_arrays import ModelArrays
from jaxis.engine.execution.program_context import ProgramContext
from jaxis.engine.execution.program_key import ProgramKey
from jaxis.engine.execution.step_part import HeadPart, StepPart
from jaxis.host.cores import usable_cores
from jaxis.host.machine import cpu_flags, seconds_since_start
from jaxis.kernels import native
from jaxis.layers.module import JaxModule

_PACKAGES = (jax, jaxlib, flax)
_KNOWN = sys.stdlib_module_names | {"jaxis", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"}
# Rooms whose code is traced.
_TRACED = (
    "config",
    "engine.execution",
    "engine.experts",
    "kernels",
    "layers",
    "lora",
    "models",
    "parallel",
    "quantization",
)
_BEGINNINGS = tuple(f"jaxis.{room}." for room in _TRACED)
_VARIABLES = ("JAX", "XLA", "LIBTPU")  # beginnings of names
_CONSTANTS = (int, float, str, bytes, bool, type(None))
# A file system's clock may lag behind the process's.
_CLOCK_SECONDS = 0.1


class UnknownInputError(Exception):
    """A trace may read something that has no digest here."""


class ModelInputs(NamedTuple):
    """A model as the traces of its programs see it.

    Attributes:
      digest: Digest of the model and of the files of code.
      held: Digests of what the loaded modules hold, by name. A trace may load more.
    """

    digest: str
    held: dict[str, str]

    def agree_with(self, held: dict[str, str]) -> bool:
        """Returns whether modules hold the same in another process, or in this one later."""
        return all(self.held.get(name, value) == value for name, value in held.items())


def model_inputs(model: JaxModule) -> ModelInputs | None:
    """Returns a model's inputs to traces; None if they have no digest."""
    files = sources()
    if files is None:
        return None
    try:
        return ModelInputs(_digest(files, model), held_by_modules())
    except UnknownInputError:
        return None


def digest(inputs: ModelInputs, key: ProgramKey, context: ProgramContext) -> str:
    """Returns the digest of all that the trace of a program reads.

    Raises:
      UnknownInputError: Something has no digest.
    """
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    machine = (np.__version__, ml_dtypes.__version__, platform.machine(), cpu_flags(), usable_cores(), native.isa())
    flags = [argument for argument in sys.argv if argument.startswith("--xla")]
    settings = sorted(item for item in jax.config.values.items() if "compilation_cache" not in item[0])
    return _digest(inputs.digest, key, context, settings, variables, flags, machine)


def sources() -> str | None:
    """Returns a digest of the files of code; None if one has changed since this process began."""
    hashed, newest = hashlib.sha256(), 0.0
    for folder in (*native.package_folders(), *(folder for package in _PACKAGES for folder in package.__path__)):
        for path, status in _files(folder):
            newest = max(newest, status.st_ctime, status.st_mtime)
            hashed.update(
                f"{path} {status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode()
            )
    return None if newest > time.time() - seconds_since_start() - _CLOCK_SECONDS else hashed.hexdigest()


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(entry.path)
        elif not entry.name.endswith(".pyc"):
            yield entry.path, entry.stat()


def held_by_modules() -> dict[str, str]:
    """Returns a digest of the functions and constants of each loaded module whose code is traced, and of its classes.

    Raises:
      UnknownInputError: A module holds a function from elsewhere.
    """
    held: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(_BEGINNINGS):
            lines = [*_held_by(module)]
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    lines += _held_by(value)
            held[name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return held


def _held_by(holder: ModuleType | type) -> Iterator[str]:
    for attribute, value in list(vars(holder).items()):
        if type(value) is FunctionType:
            yield f"{attribute} {_code_of(value)}"
        elif type(value) in _CONSTANTS and not attribute.startswith("__"):
            yield f"{attribute} {value!r}"


def _code_of(function: FunctionType) -> str:
    module: str = function.__globals__.get("__name__", "")
    if module.partition(".")[0] not in _KNOWN and not module.startswith("namedtuple_"):
        raise UnknownInputError(f"{module}.{function.__qualname__}")
    return f"{module} {function.__qualname__} {function.__code__.co_firstlineno}"


def _digest(*values: object) -> str:
    hashed = io.BytesIO()
    try:
        _Pickler(hashed, protocol=5).dump(values)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UnknownInputError(str(error)) from None
    return hashlib.sha256(hashed.getbuffer()).hexdigest()


class _Pickler(pickle.Pickler):
    """Pickles what is compared, not restored: arrays without values, functions with what they have captured."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            if obj.__module__.partition(".")[0] not in _KNOWN:
                raise UnknownInputError(f"{obj.__module__}.{obj.__qualname__}")
            return NotImplemented
        described = _described_by(type(obj))
        return NotImplemented if described is None else (tuple, (described(obj),))


def _of_function(obj: FunctionType) -> tuple[object, ...]:
    held = tuple(cell.cell_contents for cell in obj.__closure__ or ())
    return _code_of(obj), obj.__defaults__, obj.__kwdefaults__, held


def _of_module(obj: nnx.Module) -> tuple[object, ...]:
    # Flax keeps states of its own in a module.
    return type(obj), {name: value for name, value in vars(obj).items() if not name.startswith("_pytree_")}


def _without_values(value: Any) -> Any:
    """Describes a leaf of a variable's value: an operand of programs, if it is an array."""
    return (value.shape, value.dtype, value.weak_type) if isinstance(value, jax.Array) else value


def _of_part(obj: StepPart | HeadPart) -> tuple[object, ...]:
    raise UnknownInputError(type(obj).__qualname__)  # it may hold any object of its feature


_DESCRIBED: dict[Any, Callable[[Any], tuple[object, ...]]] = {
    StepPart | HeadPart: _of_part,
    ModelArrays: lambda obj: (obj.hidden_states,),  # the model's digest stands for the arrays
    nnx.Variable: lambda obj: (type(obj), jax.tree.map(_without_values, obj.get_value()), obj.get_metadata()),
    nnx.Module: _of_module,
    jax.Array: lambda obj: (np.asarray(obj), obj.weak_type),  # of a function or an object: a constant of the program
    Mesh: lambda obj: (obj.axis_names, obj.devices.shape, obj.axis_types),
    jax.stages.Wrapped: lambda obj: ("jit", obj.__wrapped__),
    FunctionType: _of_function,
}


@functools.cache
def _described_by(cls: type) -> Callable[[Any], tuple[object, ...]] | None:
    """Returns the function that describes objects of a class; None for those that describe themselves."""
    for kind, described in _DESCRIBED.items():
        if issubclass(cls, kind):
            return described
    if not dataclasses.is_dataclass(cls):
        return None
    # Not what a cached property has left in it.
    names = tuple(field.name for field in dataclasses.fields(cls))
    return lambda obj: (cls, [getattr(obj, name) for name in names])
