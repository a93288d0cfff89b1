"""Several models of `jaxis serve`: read from a file or the command line, each with options of its own, all checked."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import yaml

from jaxis.cli.options import ChatTemplate, EngineOptions, expand_options
from jaxis.cli.serve_options import LimitOptions, ServerOptions, SeveralModelsOptions
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError, JaxisError
from jaxis.host.machine import free_host_bytes
from jaxis.nearest_name import did_you_mean
from jaxis.server.config import ServerConfig, default_served_name
from jaxis.server.several.model_settings import ModelSettings, PoolLimits, check_names, parse_duration

MAX_FILE_BYTES = 1 << 20
_OF_MODEL = ("model", "name", "pinned", "idle_timeout")  # keys that are no options
_SERVER_HINTS = get_type_hints(ServerOptions, include_extras=True)
_LIMIT_HINTS = get_type_hints(LimitOptions, include_extras=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of `jaxis serve` that each model can have for itself, beside those of its engine."""

    served_model_name: Annotated[list[str] | None, _SERVER_HINTS["served_model_name"].__metadata__[0]] = None
    model_alias: Annotated[list[str] | None, _SERVER_HINTS["model_alias"].__metadata__[0]] = None
    tool_call_parser: Annotated[str, _SERVER_HINTS["tool_call_parser"].__metadata__[0]] = "auto"
    reasoning_parser: Annotated[str, _SERVER_HINTS["reasoning_parser"].__metadata__[0]] = "auto"
    max_queued: Annotated[int, _LIMIT_HINTS["max_queued"].__metadata__[0]] = LimitOptions.max_queued
    stall_timeout: Annotated[float, _LIMIT_HINTS["stall_timeout"].__metadata__[0]] = LimitOptions.stall_timeout
    chat_template: ChatTemplate = None
    seed: Annotated[int | None, typer.Option()] = None


def read_models(
    models: Sequence[str],
    several: SeveralModelsOptions,
    options: Mapping[str, Any],
    config: ServerConfig,
) -> tuple[list[ModelSettings], PoolLimits]:
    """Reads all models with their options, and checks them.

    Args:
      models: Models of the command line.
      several: Options that the models share.
      options: Options of the command line, by the names of their fields: for all models that have none of their own.
      config: Configuration of the server.

    Raises:
      ConfigError: Something cannot be honoured; the message names the file, the model and the key.
    """
    entries: list[tuple[str, Mapping[str, Any]]] = [(f"the model {name}", {"model": name}) for name in models]
    if several.models is not None:
        if models:
            raise ConfigError(f"--models {several.models} and MODEL {models[0]}: give the file, or models, not both")
        entries = _read_file(several.models)
    reader = _EntryReader(options, config, several.idle_timeout)
    settings = []
    for where, entry in entries:
        try:
            settings.append(reader.read(entry))
        except JaxisError as error:
            raise ConfigError(f"{where}: {error}") from None
    try:
        check_names(settings)
    except ConfigError as error:
        raise ConfigError(f"{several.models or 'MODEL'}: {error}") from None
    num_pinned = sum(model.pinned for model in settings)
    if several.models_max is not None and num_pinned > several.models_max:
        raise ConfigError(f"{num_pinned} models are pinned, and --models-max is {several.models_max}: pin fewer")
    return settings, PoolLimits(free_bytes=free_host_bytes(), most_loaded=several.models_max)


def _read_file(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the name of each model for errors, and its keys with the defaults."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
        value = yaml.safe_load(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict) or not isinstance(value.get("models"), list) or not value["models"]:
        raise ConfigError(f"{path} has no list of models: it needs a key models, with an entry such as `- model: PATH`")
    if unknown := [key for key in value if key not in ("models", "defaults")]:
        raise ConfigError(f"{path}: the key {unknown[0]!r} is unknown: there are models and defaults")
    defaults = value.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path}: defaults is not an object of options")
    if own := [key for key in ("model", "name", "served_model_name", "served-model-name") if key in defaults]:
        raise ConfigError(f"{path}: defaults: {own[0]} is for one model: put it there")
    entries = []
    for number, entry in enumerate(value["models"], 1):
        if not isinstance(entry, dict) or not all(isinstance(key, str) for key in entry):
            raise ConfigError(f"{path}: model {number} is not an object of options such as `model: PATH`")
        name = entry.get("name") or entry.get("model")
        where = f"{path}: model {number}" + (f" ({name})" if name else "")
        entries.append((where, {**defaults, **entry}))
    return entries


class _EntryReader:
    """Reads models; `options` and `idle_timeout` are the command line's."""

    def __init__(self, options: Mapping[str, Any], config: ServerConfig, idle_timeout: str | None) -> None:
        self._options, self._config = options, config
        self._idle_timeout = idle_timeout
        self._parsed: dict[str, Any] = {}

        @expand_options
        def read(model: ModelOptions, engine: EngineOptions) -> None:
            self._parsed = {**dataclasses.asdict(model), **dataclasses.asdict(engine)}

        app = typer.Typer(add_completion=False)
        app.command()(read)
        self._command = typer.main.get_command(app)
        self._names = [name for param in self._command.params if (name := param.name) is not None]
        self._switches = {param.name for param in self._command.params if getattr(param, "is_flag", False)}
        self._flags = [name for name in self._names if name.startswith("no_")]  # each turns its field off

    def read(self, entry: Mapping[str, Any]) -> ModelSettings:
        """Reads a model. Raises JaxisError if a key or a value cannot be honoured."""
        keys = {key.replace("-", "_"): value for key, value in entry.items() if value is not None}
        model, name = keys.pop("model", None), keys.pop("name", None)
        pinned, idle = keys.pop("pinned", False), keys.pop("idle_timeout", self._idle_timeout)
        for key, value, kind in (("model", model, str), ("name", name, str), ("pinned", pinned, bool)):
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{key}: {value!r} is not {'true or false' if kind is bool else 'a string'}")
        if name is not None and "served_model_name" in keys:
            raise ConfigError("name and served_model_name say the same: give one")
        given = self._parse(keys)
        options = {**self._options, **given}
        names = [name] if name is not None else options["served_model_name"] or [default_served_name(model)]
        engine = EngineOptions(**{field.name: options[field.name] for field in dataclasses.fields(EngineOptions)})
        arguments = {
            "model": model,
            **engine.llm_arguments(),
            "seed": secrets.randbits(32) if options["seed"] is None else options["seed"],
            "chat_template": options["chat_template"],
            "fit_memory": True,
        }
        EngineArgs(**arguments)
        from jaxis.parsing.model_parsers import check_parser_names

        check_parser_names(options["tool_call_parser"], options["reasoning_parser"])
        config = dataclasses.replace(
            self._config,
            served_model_names=tuple(names),
            model_aliases=tuple(options["model_alias"] or ()),
            tool_call_parser=options["tool_call_parser"],
            reasoning_parser=options["reasoning_parser"],
            max_queued=options["max_queued"],
            stall_seconds=options["stall_timeout"],
        )
        return ModelSettings(config=config, engine_arguments=arguments, pinned=pinned, idle_seconds=_idle_seconds(idle))

    def _parse(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Parses the options that keys give, as the command line does."""
        arguments = [argument for key, value in keys.items() for argument in self._arguments(key, value)]
        try:
            self._command.invoke(self._command.make_context("model", arguments))
        except typer.BadParameter as error:
            raise ConfigError(" ".join(error.format_message().split())) from None
        given = {key.removeprefix("no_") if key in self._flags else key for key in keys}
        return {name: value for name, value in self._parsed.items() if name in given}

    def _arguments(self, key: str, value: object) -> list[str]:
        """Writes a key as the command line's arguments. Raises ConfigError if no such option exists for one model."""
        if key in self._names or f"no_{key}" in self._flags:
            flag = f"no_{key}" if f"no_{key}" in self._flags else key
            option = f"--{flag.replace('_', '-')}"
            if flag in self._switches:
                if not isinstance(value, bool):
                    raise ConfigError(f"{key}: {value!r} is not true or false")
                return [option] if value is (flag == key) else []
            values = value if isinstance(value, list) and key in ("served_model_name", "model_alias") else [value]
            return [f"{option}={json.dumps(v) if isinstance(v, dict | list) else v}" for v in values]
        if key in {field.name for group in (ServerOptions, LimitOptions) for field in dataclasses.fields(group)}:
            raise ConfigError(f"{key} is for all models: give --{key.replace('_', '-')} to jaxis serve")
        known = [*_OF_MODEL, *(name.removeprefix("no_") for name in self._names)]
        raise ConfigError(f"the key {key!r} is unknown{did_you_mean(key, known)}")


def _idle_seconds(value: object) -> float:
    if value is None:
        return ModelSettings.idle_seconds
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"idle_timeout: {value!r} is no time: give seconds, or a string such as 10m")
    try:
        return parse_duration(value)
    except JaxisError:
        raise ConfigError(f"idle_timeout: {value!r} is no time: give seconds, or a string such as 10m") from None
