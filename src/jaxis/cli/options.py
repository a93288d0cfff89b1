"""Options that several commands share, as dataclasses that become one command line option a field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from jaxis.cli.console import exit_on_interrupt
from jaxis.errors import ConfigError, RequestError
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.llm import LLM

SAMPLING_PANEL = "Sampling (defaults: the checkpoint's generation_config.json)"
ENGINE_PANEL = "Engine"
OUTPUT_PANEL = "Output"
PROMPT_PANEL = "Prompt"


def parse_json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """Parses an option's JSON object.

    Raises:
      typer.BadParameter: If it is anything else.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"""{text!r} is no JSON object such as '{{"key": 1}}'""", param_hint=option)
    return value


TemplateKwargs = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="More variables for the chat template, such as '{\"enable_thinking\": false}'.",
        rich_help_panel=PROMPT_PANEL,
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and the libraries' log messages.", show_default=False)
]


def _engine(help: str, **settings: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=ENGINE_PANEL, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How the model is loaded and run; the fields are arguments of `jaxis.LLM`, None leaving its default."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _engine("Type of weights and activations.")] = (
        "auto"
    )
    max_model_len: Annotated[
        int | None,
        _engine("Most tokens of prompt and output together (default: the checkpoint's).", min=1, metavar="TOKENS"),
    ] = None
    max_num_seqs: Annotated[int | None, _engine("Most completions that run at once.", min=1, metavar="NUMBER")] = None
    max_num_batched_tokens: Annotated[
        int | None, _engine("Most tokens of a step; longer prompts go in chunks.", min=1, metavar="TOKENS")
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        _engine("Memory for the KV cache, in bytes or as 2GiB (default: from what is free).", metavar="SIZE"),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8"], _engine("Type of cached keys and values.")
    ] = "auto"
    prefix_caching: Annotated[bool, _engine("Compute equal beginnings of prompts once.", show_default=False)] = True
    tensor_parallel_size: Annotated[int, _engine("Devices to spread the model over.", min=1, metavar="NUMBER")] = 1
    load_format: Annotated[Literal["auto", "dummy"], _engine("Where weights come from; dummy makes random ones.")] = (
        "auto"
    )
    revision: Annotated[str | None, _engine("Branch, tag or commit on the hub (default: main).", metavar="NAME")] = None
    hf_overrides: Annotated[
        str | None,
        _engine("Keys of config.json to set, such as '{\"rope_theta\": 1e6}'.", metavar="JSON"),
    ] = None

    quantization: Annotated[
        str | None,
        _engine(
            "Narrower weights: int8, int4, or a YAML or JSON file with rules; dequantize: widen a quantized model.",
            metavar="NAME|FILE",
        ),
    ] = None
    additional_config: Annotated[
        str | None,
        _engine(
            'Rules as \'{"quantization": {"qwix": {"rules": [...]}}}\', or a file with that.',
            metavar="JSON|FILE",
        ),
    ] = None

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `jaxis.LLM`.

        Raises:
          typer.BadParameter: If a text cannot be parsed.
        """
        arguments = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        arguments["enable_prefix_caching"] = arguments.pop("prefix_caching")
        if self.hf_overrides is not None:
            arguments["hf_overrides"] = parse_json_object(self.hf_overrides, "--hf-overrides")
        if self.additional_config is not None:
            arguments["additional_config"] = parse_additional_config(self.additional_config)
        return arguments


def parse_additional_config(text: str) -> dict[str, Any]:
    """Parses the option's JSON object, or reads the file that it names.

    Raises:
      typer.BadParameter: If it is neither.
    """
    from jaxis.quantization.arguments import read_mapping

    try:
        return read_mapping(text, "additional_config")
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--additional-config") from None


def _sampling(help: str, **settings: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=SAMPLING_PANEL, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What overrides the checkpoint's sampling defaults; the fields are those of SamplingParams."""

    temperature: Annotated[
        float | None, _sampling("0 always takes the most likely token.", min=0.0, metavar="NUMBER")
    ] = None
    top_k: Annotated[int | None, _sampling("Keep the K most likely tokens; 0 keeps all.", min=-1, metavar="K")] = None
    top_p: Annotated[float | None, _sampling("Keep the most likely tokens up to this probability.", metavar="0..1")] = (
        None
    )
    min_p: Annotated[
        float | None,
        _sampling("Drop tokens less likely than this share of the most likely one.", metavar="0..1"),
    ] = None
    repetition_penalty: Annotated[
        float | None, _sampling("Above 1, makes tokens seen before less likely.", metavar="NUMBER")
    ] = None
    seed: Annotated[int | None, _sampling("Makes sampling reproducible.", metavar="NUMBER")] = None
    stop: Annotated[
        list[str] | None, _sampling("Text that ends the completion; can be given several times.", metavar="TEXT")
    ] = None

    def overrides(self, **more: Any) -> dict[str, Any]:
        """The fields of SamplingParams that were given, and `more` of them; None counts as not given.

        Raises:
          typer.BadParameter: If SamplingParams refuses them.
        """
        given = {**dataclasses.asdict(self), **more}
        given = {name: value for name, value in given.items() if value is not None and value != []}
        try:
            SamplingParams(**given)  # now, and not after a minute of loading
        except RequestError as error:
            raise typer.BadParameter(str(error)) from None
        return given


def open_llm(model: str | None, arguments: dict[str, Any]) -> LLM:
    """Loads a model; None is the embedded one. JAX is imported here and not before."""
    with exit_on_interrupt():
        from jaxis import LLM

        return LLM(model, **arguments)


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a typer command one option for each field of its parameters that are dataclasses."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}

    def add(name: str, annotation: object, default: object) -> None:
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
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    expanded.__signature__ = inspect.Signature(parameters)
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded
