"""JaxModule: an nnx.Module whose parameters have dotted names, with the methods that PyTorch users expect.

Children may be in lists, tuples and dicts, as in `model.layers.0`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

Observer = Callable[["JaxModule", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function called as `observer(module, call, args, kwargs)` in place of `module(*args, **kwargs)`.

The original call is `call(module, *args, **kwargs)`.
"""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


class JaxModule(nnx.Module, pytree=False):
    """Base of every layer and model."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # As an nnx graph node, not a JAX pytree, a module may hold its children in plain containers.
        super().__init_subclass__(pytree=False, **kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _observable(vars(cls)["__call__"])

    def named_children(self) -> Iterator[tuple[str, nnx.Module | nnx.Param]]:
        """Yields direct children, modules and parameters, in the order they were set; in containers, as `name.key`."""
        return named_children(self)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, nnx.Param]]:
        """Yields every parameter below this module under its dotted name."""
        return named_parameters(self, prefix)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, nnx.Module]]:
        """Yields this module and every module below it under its dotted name."""
        return named_modules(self, prefix)


class ByMember(type):
    """Metaclass of kinds of modules, which are known by having a kind's attributes.

    A start asks some thousand times, and a protocol of Python 3.11 takes 15 microseconds to answer.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return all(hasattr(instance, name) for name in cls.__annotations__)


@runtime_checkable
class HasAfterLoading(Protocol):
    def after_loading(self) -> None:
        """Called once, after the whole checkpoint has been read and the module's `quant_method` has finished."""
        ...


def named_children(module: nnx.Module) -> Iterator[tuple[str, nnx.Module | nnx.Param]]:
    for name, value in vars(module).items():
        if not name.startswith("_"):
            yield from _flatten(name, value)


def named_parameters(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Param]]:
    for name, child in _walk(module, prefix):
        if _is_parameter(child):
            yield name, child


def named_modules(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Module]]:
    yield prefix, module
    for name, child in _walk(module, prefix):
        if _is_module(child):
            yield name, child


@contextmanager
def calls_observed(observer: Observer) -> Iterator[None]:
    """Passes each JaxModule call in the block to the observer; disables fusion and whole-model compilation."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def calls_are_observed() -> bool:
    """Returns whether `calls_observed` is active: code that fuses several modules must then call each of them."""
    return _observer.get() is not None


class UnusedRngs(nnx.Rngs):
    """Keys of a model that is constructed abstractly: new parameters are zeros.

    Tracing initializers would take seconds.
    """


class AbstractRngs(nnx.Rngs):
    """Keys of a model that is constructed abstractly without a trace: new parameters are shapes and types."""

    def __init__(self, seed: int) -> None:
        del seed


class DeferredRngs(nnx.Rngs):
    """Keys of a model whose new parameters are abstract, until `initialize` gives them their initial values."""


def initialize(param: nnx.Param) -> None:
    """Gives a parameter its initial value, if it was made with `DeferredRngs`."""
    if isinstance(param.get_value(), jax.ShapeDtypeStruct):
        param.set_value(param.get_metadata()["make_initial_value"]())
        param.del_metadata("make_initial_value")  # layers that differ in it would be compiled one by one


def make_parameter(
    rngs: nnx.Rngs,
    init: Initializer,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    axes: tuple[str | None, ...],
    weight_loader: Callable[..., None] | None = None,
) -> nnx.Param:
    """Creates a parameter of the checkpoint's shape, with value `init(key, shape, dtype)`.

    `axes` has a logical axis (`parallel.mesh.LOGICAL_AXIS_RULES`), or None, for each dimension. A function
    `weight_loader(param, tensor, shard_id)` fills the parameter instead of the default loader.
    """
    metadata: dict[str, Any] = {"logical_axes": axes}
    if weight_loader is not None:
        metadata["weight_loader"] = weight_loader
    return parameter_of(lambda key: init(key, shape, dtype), rngs, shape, dtype, **metadata)


def parameter_of(
    make: Callable[[jax.Array], Any], rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, **metadata: Any
) -> nnx.Param:
    """Creates a parameter of the checkpoint's shape and value `make(key)`, or what the kind of keys says instead."""
    if isinstance(rngs, AbstractRngs):
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), **metadata)
    if isinstance(rngs, UnusedRngs):
        return nnx.Param(jnp.zeros(shape, dtype), **metadata)
    key = rngs.params()
    if isinstance(rngs, DeferredRngs):
        value = jax.ShapeDtypeStruct(shape, dtype)
        return nnx.Param(value, make_initial_value=functools.partial(make, key), **metadata)
    return nnx.Param(make(key), **metadata)


def _observable(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def observable(self: JaxModule, *args: Any, **kwargs: Any) -> Any:
        # Models run compiled, so this is checked when a program is traced, not when it runs.
        observer = _observer.get()
        return call(self, *args, **kwargs) if observer is None else observer(self, call, args, kwargs)

    return observable


def _walk(module: nnx.Module, prefix: str) -> Iterator[tuple[str, nnx.Module | nnx.Param]]:
    for name, child in named_children(module):
        full_name = f"{prefix}.{name}" if prefix else name
        yield full_name, child
        if _is_module(child):
            yield from _walk(child, full_name)


class _Kind(enum.Enum):
    MODULE = enum.auto()
    PARAMETER = enum.auto()
    SEQUENCE = enum.auto()
    MAPPING = enum.auto()
    NNX_MAPPING = enum.auto()
    OTHER = enum.auto()


@functools.cache
def _kind(cls: type) -> _Kind:
    """Returns a type's kind in walks. It is cached, since nnx's own instance checks take most of a walk's time."""
    kinds = {
        nnx.List | list | tuple: _Kind.SEQUENCE,
        nnx.Dict: _Kind.NNX_MAPPING,
        dict: _Kind.MAPPING,
        nnx.Module: _Kind.MODULE,
        nnx.Param: _Kind.PARAMETER,
    }
    return next((kind for classes, kind in kinds.items() if issubclass(cls, classes)), _Kind.OTHER)


def _is_module(value: object) -> TypeGuard[nnx.Module]:
    return _kind(type(value)) is _Kind.MODULE


def _is_parameter(value: object) -> TypeGuard[nnx.Param]:
    return _kind(type(value)) is _Kind.PARAMETER


def _flatten(name: str, value: Any) -> Iterator[tuple[str, nnx.Module | nnx.Param]]:
    match _kind(type(value)):
        case _Kind.MODULE | _Kind.PARAMETER:
            yield name, value
        case _Kind.SEQUENCE:
            for index, item in enumerate(value):
                yield from _flatten(f"{name}.{index}", item)
        case _Kind.MAPPING:
            for key, item in value.items():
                yield from _flatten(f"{name}.{key}", item)
        case _Kind.NNX_MAPPING:
            for key, item in vars(value).items():
                if not key.startswith("_"):
                    yield from _flatten(f"{name}.{key}", item)
