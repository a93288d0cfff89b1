"""The model class for each `architectures` entry of config.json, as the families' files declare them."""

from __future__ import annotations

import ast
import functools
import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jaxis.config.architecture import architectures_of, check_model_type
from jaxis.config.hf_config import HFConfig
from jaxis.config.value_checks import check_values
from jaxis.errors import ConfigError
from jaxis.models.common.base_model import names_with_head, of_base_model
from jaxis.models.common.family import Family

ENTRY_POINT_GROUP = "jaxis.models"

_FOLDER = Path(__file__).parent
_registered: dict[str, type[Any] | str] = {}


def register_model(architecture: str, model: type[Any] | str) -> None:
    """Registers a model class under the name that checkpoints have in config.json's `architectures`.

    Args:
      architecture: For example "MyModelForCausalLM". Overrides a built-in model of the same name.
      model: The class, or "package.module:Class" to import it when it is first needed.
    """
    if isinstance(model, str) and ":" not in model:
        raise ConfigError(f"register_model({architecture!r}, {model!r}): write it as 'package.module:Class'")
    _registered[architecture] = model


@functools.cache
def built_in_families() -> tuple[Family, ...]:
    """Every family that a file of this folder declares, file by file; imports them all."""
    return tuple(family for path in sorted(_FOLDER.glob("*.py")) for family in _declared_in(path))


def built_in_models() -> dict[str, type[Any]]:
    """The built-in models: architecture -> class; imports them all."""
    return {model.__name__: model for family in built_in_families() for model in family.classes}


@functools.cache
def family_of(architecture: str) -> Family | None:
    """The built-in family of a name in `architectures`; imports only the files of families in which the name stands."""
    for name in (architecture, *names_with_head(architecture)):
        for path in sorted(_FOLDER.glob("*.py")):
            if name in path.read_text("utf-8"):
                for family in _declared_in(path):
                    if name in family.architectures:
                        return family
    return None


def declared_architectures() -> frozenset[str]:
    """The names of `supported_architectures`, read in the families' files, which stay unimported, and JAX with them."""
    return frozenset({*_built_in_names(), *_registered, *_plugins()})


@functools.cache
def _built_in_names() -> frozenset[str]:
    return frozenset(
        name
        for path in _FOLDER.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == Family.__name__
        for name in _names_in(call)
    )


def _names_in(declaration: ast.Call) -> list[str]:
    """The architectures of a call of Family in a file: its classes' names, and other names."""
    classes = ast.walk(declaration.args[1])
    others = [keyword.value for keyword in declaration.keywords if keyword.arg == "other_names"]
    keys = [
        key.value
        for value in others
        if isinstance(value, ast.Dict)
        for key in value.keys
        if isinstance(key, ast.Constant)
    ]
    return [*(node.id for node in classes if isinstance(node, ast.Name)), *map(str, keys)]


def supported_architectures() -> list[str]:
    """Every name that `get_model_class` knows, plug-ins included; imports the built-in models."""
    built_in = (name for family in built_in_families() for name in family.architectures)
    return sorted({*built_in, *_registered, *_plugins()})


def is_supported(architectures: list[str]) -> bool:
    """Whether `get_model_class` knows one of the names."""
    return any(_find(name) is not None for name in architectures)


def get_model_class(architectures: list[str]) -> type[Any]:
    """The class for the first known name: registered classes come first, then plug-ins, then built-in models.

    Raises:
      ConfigError: No name is known, or a plug-in's module cannot be imported.
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
    """The class for config.json's `architectures`; see `get_model_class`.

    Args:
      hf_config: The config.json.
      architectures: Names to take instead of those in it.

    Raises:
      ConfigError: As there; also, the model is a built-in one, and config.json's `model_type` is another's, or one of
        its sizes cannot be one.
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


def _declared_in(path: Path) -> list[Family]:
    module = importlib.import_module(f"jaxis.models.{path.stem}")
    return [value for value in vars(module).values() if isinstance(value, Family)]


@functools.cache
def _plugins() -> dict[str, str]:
    """Name of each model that other packages declare -> its class's path; read once, from every package's metadata."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def _find(architecture: str) -> type[Any] | str | None:
    """The model of this name, a class or the path of one; None without one."""
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
