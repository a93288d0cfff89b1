"""Options that several commands share, as dataclasses that become one command line option per field."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from jaxis.cli.console import exit_on_interrupt, note
from jaxis.engine.argument_groups.fields import argument_infos, argument_types
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError, RequestError
from jaxis.quantization_rules import read_mapping
from jaxis.sampling_params import INTEGER_BOUNDS, NUMBER_BOUNDS, Bounds, SamplingParams

if TYPE_CHECKING:
    from jaxis.llm import LLM

SAMPLING_PANEL = "Sampling (defaults: the checkpoint's generation_config.json)"
OUTPUT_PANEL = "Output"
PROMPT_PANEL = "Prompt"
_PLAIN_TYPES = (bool, int, int | None, str, str | None)
Group = TypeVar("Group")


def parse_json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """Parses an option's JSON object; raises typer.BadParameter for anything else."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"""{text!r} is not a JSON object such as '{{"key": 1}}'""", param_hint=option)
    return value


TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="More variables for the chat template, such as '{\"enable_thinking\": false}'.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Chat template in place of the model's: a file, or chatml, deepseek-v4, deepseek-v4.1, gemma, "
        "kimi-k3, llama2, llama3, mistral, mistral-v7, phi3, zephyr.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and the libraries' log messages.", show_default=False)
]

JsonAnswer = Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)]

Revision = Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the hub (default: main).")]
AdditionalConfig = Annotated[
    str | None,
    typer.Option(
        metavar="JSON|FILE", help='Rules as \'{"quantization": {"qwix": {"rules": [...]}}}\', or a file with that.'
    ),
]
ReportFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write the report; made if missing.")
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Folder, file or Hub id (default: the embedded model).", show_default=False),
]

Replicas = Annotated[
    int, typer.Option(min=1, metavar="NUMBER", help="Engines that share the rows, on a Ray cluster if more than one.")
]


def _engine_option(name: str) -> tuple[str, Any, Any] | None:
    """Makes an argument of `EngineArgs` the field of a group of options; returns None if it has no option."""
    argument, info, hint = EngineArgs.__dataclass_fields__[name], argument_infos()[name], argument_types()[name]
    if info.help is None:
        return None
    plain = hint in _PLAIN_TYPES or get_origin(hint) is Literal
    names = (f"--{(info.option or name).replace('_', '-')}", info.short) if info.short else ()
    option = typer.Option(
        *names,
        help=info.help,
        metavar=info.metavar,
        rich_help_panel=info.panel,
        show_default=hint is not bool,
    )
    return info.option or name, Annotated[hint if plain else str | None, option], argument.default


def _with_engine_options(group: type[Group]) -> type[Group]:
    options = [option for name in argument_infos() if (option := _engine_option(name)) is not None]
    fields = [(name, annotation, dataclasses.field(default=default)) for name, annotation, default in options]
    namespace = {"__doc__": group.__doc__, "__module__": group.__module__}
    return dataclasses.make_dataclass(
        group.__name__, fields, bases=(group,), namespace=namespace, frozen=True, kw_only=True
    )


@_with_engine_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Loading and running of the model: an option for each argument of `EngineArgs` that has one."""

    def llm_arguments(self) -> dict[str, Any]:
        """Returns checked keyword arguments for `jaxis.LLM`. Raises typer.BadParameter if a value cannot be parsed."""
        given = dataclasses.asdict(self)
        names = {info.option or name: name for name, info in argument_infos().items()}
        arguments = {names[option]: value for option, value in given.items() if value is not None}
        for name, value in arguments.items():
            if argument_infos()[name].metavar == "JSON":
                arguments[name] = parse_json_object(value, f"--{name.replace('_', '-')}")
        if "additional_config" in arguments:
            arguments["additional_config"] = parse_additional_config(arguments["additional_config"])
        return arguments


def parse_additional_config(text: str) -> dict[str, Any]:
    """Parses the option's JSON object, or reads the file that it names; raises typer.BadParameter for anything else."""
    try:
        return read_mapping(text, "additional_config")
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--additional-config") from None


def bounded(bounds: Bounds, help: str, **settings: Any) -> OptionInfo:
    """Makes an option with a parameter's bounds."""
    return typer.Option(help=help, min=bounds.low, max=bounds.high, **settings)


def _sampling(name: str, help: str, **settings: Any) -> OptionInfo:
    bounds = (INTEGER_BOUNDS | NUMBER_BOUNDS)[name]
    return bounded(bounds, help, rich_help_panel=SAMPLING_PANEL, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that override the checkpoint's sampling defaults; the fields are those of SamplingParams."""

    temperature: Annotated[
        float | None, _sampling("temperature", "0 always takes the most likely token.", metavar="NUMBER")
    ] = None
    top_k: Annotated[int | None, _sampling("top_k", "Keep the K most likely tokens; 0 keeps all.", metavar="K")] = None
    top_p: Annotated[
        float | None, _sampling("top_p", "Keep the most likely tokens up to this probability.", metavar="0..1")
    ] = None
    min_p: Annotated[
        float | None,
        _sampling("min_p", "Drop tokens less likely than this share of the most likely one.", metavar="0..1"),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling("repetition_penalty", "Above 1, makes tokens seen before less likely.", metavar="NUMBER"),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes sampling reproducible (default: another for each answer).",
            metavar="NUMBER",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that ends the completion; can be given several times.",
            metavar="TEXT",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None

    def overrides(self, **more: Any) -> dict[str, Any]:
        """Returns the given fields of SamplingParams, and `more` of them; None counts as not given.

        Raises:
          typer.BadParameter: SamplingParams refuses them.
        """
        given = {**dataclasses.asdict(self), **more}
        given = {name: value for name, value in given.items() if value is not None and value != []}
        try:
            SamplingParams(**given)  # now rather than after a minute of loading
        except RequestError as error:
            raise typer.BadParameter(str(error)) from None
        return given


_CHAT_DEFAULTS = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}  # llama.cpp's; the chat page has the same
_FILTERS = ("temperature", "top_p", "top_k", "min_p")


def chat_params(defaults: SamplingParams, overrides: dict[str, Any]) -> SamplingParams:
    """Returns the parameters of a conversation; gentler sampling than the APIs' if the model brings none.

    Without filters, a small model soon leaves the subject. A line says so, unless a temperature is given.
    """
    brings_none = all(getattr(defaults, name) == getattr(SamplingParams, name) for name in _FILTERS)
    gentler = {name: value for name, value in _CHAT_DEFAULTS.items() if name not in overrides} if brings_none else {}
    if gentler and "temperature" not in overrides:
        chosen = ", ".join(f"{name} {value:g}" for name, value in gentler.items())
        note(
            f"The model brings no sampling settings: {chosen}, as in llama.cpp; options such as --temperature change it"
        )
    return dataclasses.replace(defaults, **{**gentler, **overrides})


def with_drawn_seed(params: SamplingParams) -> SamplingParams:
    """Draws a seed for parameters that sample and have none: otherwise every run would give the same answer."""
    if params.greedy or params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(32))


def open_llm(
    model: str | None, arguments: dict[str, Any], *, chats: bool = False, needs_chat_template: bool = False
) -> LLM:
    """Loads a model; None is the embedded one. JAX is imported only here.

    Args:
      model: Folder, file or Hub id.
      arguments: Arguments of `LLM`.
      chats: True to start the process that renders chat templates meanwhile.
      needs_chat_template: True to raise an error if the model has none.
    """
    with exit_on_interrupt():
        if chats:
            from jaxis.tokenizer.template_process import PROCESSES

            PROCESSES.start()
        from jaxis import LLM

        return LLM(model, needs_chat_template=needs_chat_template, **arguments)


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a typer command one option for each field of its parameters that are dataclasses.

    A flag has only one name, `--no-NAME` if it is on by default, so that the help fits into 80 columns.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    turned_off: dict[str, str] = {}  # an option `no_name` -> the field that it turns off

    def add(name: str, annotation: Any, default: object) -> None:
        if isinstance(default, bool):
            option = copy.copy(annotation.__metadata__[0])
            if default:
                turned_off[f"no_{name}"] = name
                name, default = f"no_{name}", False
                option.help = f"Do not {option.help[0].lower()}{option.help[1:]}"
                option.show_default = False
            option.param_decls = option.param_decls or (f"--{name.replace('_', '-')}",)
            annotation = Annotated[bool, option]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            field_hints = get_type_hints(hints[name], include_extras=True)
            for field in dataclasses.fields(hints[name]):
                add(field.name, field_hints[field.name], field.default)
        else:
            add(name, hints[name], parameter.default)

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for option, name in turned_off.items():
            values[name] = not values.pop(option)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    vars(expanded)["__signature__"] = inspect.Signature(parameters)
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded
