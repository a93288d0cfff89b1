"""Model classes by their names in config.json's `architectures`, as declared in the families' files."""

from __future__ import annotations

import functools
import importlib
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jaxis.config.architecture import architectures_of, check_model_type
from jaxis.config.hf_config import HFConfig
from jaxis.config.value_checks import check_values
from jaxis.errors import ConfigError
from jaxis.models.common.base_model import names_with_head, of_base_model
from jaxis.models.common.family import Family
from jaxis.rooms import check_room, has_room

ENTRY_POINT_GROUP = "jaxis.models"

_TABLE = Path(__file__).with_name("architectures.json")  # written by `python -m tools.supported_models`
_registered: dict[str, type[Any] | str] = {}


def register_model(architecture: str, model: type[Any] | str) -> None:
    """Registers a model class under its name in config.json's `architectures`.

    Args:
      architecture: Name, such as "MyModelForCausalLM". Overrides a built-in model of the same name.
      model: Class, or "package.module:Class" to import it on first use.
    """
    if isinstance(model, str) and ":" not in model:
        raise ConfigError(f"register_model({architecture!r}, {model!r}): write it as 'package.module:Class'")
    _registered[architecture] = model


@functools.cache
def _modules() -> dict[str, str]:
    """Returns the built-in names in `architectures` -> the module of this package that declares each."""
    return json.loads(_TABLE.read_text("utf-8"))


@functools.cache
def built_in_families() -> tuple[Family, ...]:
    """Returns all families that this installation has, module by module; imports the modules."""
    present = [module for module in sorted(set(_modules().values())) if has_room(f"models.{module}")]
    return tuple(family for module in present for family in _declared_in(module))


def built_in_models() -> dict[str, type[Any]]:
    """Returns the built-in models: architecture -> class; imports all families' modules."""
    return {model.__name__: model for family in built_in_families() for model in family.classes}


@functools.cache
def family_of(architecture: str) -> Family | None:
    """Returns the built-in family of a name in `architectures`; None without one.

    Raises ConfigError if this installation lacks the family's file.
    """
    for name in (architecture, *names_with_head(architecture)):
        if (module := _modules().get(name)) is not None:
            check_room(f"models.{module}", name)
            return next((family for family in _declared_in(module) if name in family.architectures), None)
    return None


def declared_architectures() -> frozenset[str]:
    """Returns the names of `supported_architectures`, without importing the families, nor JAX."""
    return frozenset({*_modules(), *_registered, *_plugins()})


def supported_architectures() -> list[str]:
    """Returns every name that `get_model_class` knows, plug-ins included; imports the built-in models."""
    built_in = (name for family in built_in_families() for name in family.architectures)
    return sorted({*built_in, *_registered, *_plugins()})


def is_supported(architectures: list[str]) -> bool:
    """Returns whether `get_model_class` knows one of the names."""
    return any(_find(name) is not None for name in architectures)


def get_model_class(architectures: list[str]) -> type[Any]:
    """Returns the class of the first known name: registered classes precede plug-ins, plug-ins built-in models.

    Raises ConfigError if no name is known, or a plug-in's module, or a family's, cannot be imported.
    """
    for architecture in architectures:
        if (model := _find(architecture)) is not None:
            return _import_class(architecture, model)
    raise ConfigError(
        f"architectures={architectures} in config.json is not supported; docs/models.md lists the "
        f"{len(supported_architectures())} that are, LlamaForCausalLM among them, and docs/adding-a-model.md shows how "
        "to add one"
    )


def model_class_of(hf_config: HFConfig, architectures: list[str] | None = None) -> type[Any]:
    """Returns the class for config.json's `architectures`, or for other names, as `get_model_class` does.

    For a built-in model, raises ConfigError also if config.json's `model_type` is another model's, or one of its sizes
    is invalid.
    """
    names = architectures or architectures_of(hf_config)
    model = get_model_class(names)
    family = family_of(model.__name__)
    if family is not None and model in family.classes:
        check_model_type(hf_config, model.__name__)
        check_values(hf_config)
    from jaxis.models.common.decoder import CausalLM  # with JAX, which names do not need

    known = next(name for name in names if _find(name) is not None)
    is_base = names_with_head(known) and known != model.__name__ and issubclass(model, CausalLM)
    return of_base_model(model, known) if is_base else model


def _declared_in(module: str) -> list[Family]:
    declared = vars(importlib.import_module(f"jaxis.models.{module}"))
    return [value for value in declared.values() if isinstance(value, Family)]


@functools.cache
def _plugins() -> dict[str, str]:
    """Returns the models that other packages declare, by name -> path of the class; read once from package metadata."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def _find(architecture: str) -> type[Any] | str | None:
    """Returns the model of this name, a class or the path of one; None without one."""
    if (model := _registered.get(architecture) or _plugins().get(architecture)) is not None:
        return model
    family = family_of(architecture)
    if family is None:
        return next((found for name in names_with_head(architecture) if (found := _find(name)) is not None), None)
    names = (architecture, *names_with_head(architecture))
    return next(family.architectures[name] for name in names if name in family.architectures)


def _import_class(architecture: str, model: type[Any] | str) -> type[Any]:
    if not isinstance(model, str):
        return model
    module, _, name = model.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the model class {model!r} registered for {architecture} cannot be imported: {error}"
        ) from error
