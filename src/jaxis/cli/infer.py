"""`jaxis infer`: answers a file of conversations."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from jaxis.cli.command import FIELDS, Command, apply_overrides
from jaxis.cli.console import exit_on_interrupt, note, report_errors
from jaxis.cli.options import Debug, Replicas
from jaxis.errors import ConfigError
from jaxis.host.extras import check_extra
from jaxis.rooms import check_room

if TYPE_CHECKING:
    from jaxis.inference.inference_config import InferenceConfig
    from jaxis.inference.run import RunSummary

STANDARD_STREAM = "-"


def infer(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="YAML file with model, generation and paths.", show_default=False
        ),
    ] = None,
    replicas: Replicas = 1,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Talk with the model instead.")] = False,
    debug: Debug = False,
) -> None:
    """Answer conversations from a JSONL file, in their order.

    Every field of the file can be given on the command line, by its dotted name.
    Without input_path, conversations are read from stdin; without output_path, answers go to stdout.
    A run with an output_path that was interrupted goes on where it stopped when it is started again.
    A row that cannot be answered holds metadata.error; the others are answered, and the exit code is 0.

    \b
    [bold]Examples[/bold]
      jaxis infer -c config.yaml
      jaxis infer -c config.yaml --generation.temperature 0.2 --output_path other.jsonl
      jaxis infer --model.model_name ./Qwen3-0.6B < conversations.jsonl > answers.jsonl
      jaxis infer -c config.yaml -i
    """
    with report_errors(debug=debug):
        from jaxis.config.yaml_file import read_yaml_mapping
        from jaxis.inference.inference_config import InferenceConfig

        values = {} if config is None else read_yaml_mapping(config)
        apply_overrides(values, context.args)
        inference_config = InferenceConfig.of(values)
        if interactive:
            _converse(inference_config)
        else:
            note(summary_line(_answer(inference_config, replicas)))


@contextmanager
def input_file(path: str | None) -> Iterator[Path]:
    """Yields the input; stdin if none is named. Raises ConfigError if stdin is a terminal."""
    if path is not None and path != STANDARD_STREAM:
        yield Path(path)
        return
    if sys.stdin.isatty():
        raise ConfigError("no input: give --input_path FILE, or pipe one in")
    from jaxis.jsonl.source import spooled_stdin

    with spooled_stdin() as spooled:
        yield spooled


def output_of(path: str | None) -> Path | BinaryIO:
    """Returns the output; stdout if none is named."""
    return sys.stdout.buffer if path is None or path == STANDARD_STREAM else Path(path)


def summary_line(summary: RunSummary) -> str:
    failed = f", {summary.failed} failed" if summary.failed else ""
    return f"{summary.completed} of {summary.total} rows answered{failed}"


def _answer(config: InferenceConfig, replicas: int) -> RunSummary:
    if replicas > 1:
        check_extra("ray", "--replicas")
        check_room("integrations", "--replicas")
    output = output_of(config.output_path)
    with input_file(config.input_path) as input_path:
        from jaxis.jsonl.source import JSONLSource

        source = JSONLSource(input_path, "conversation_id", output=output)  # now rather than after a minute of loading
        progress_path = None if config.progress_path is None else Path(config.progress_path)
        if replicas > 1:
            with exit_on_interrupt():
                from jaxis.integrations.ray_runs import run_conversations
            return run_conversations(config, replicas, source, output, progress_path)
        with exit_on_interrupt():
            from jaxis.inference.engine import JAXInferenceEngine

            engine = JAXInferenceEngine(config.model, generation_params=config.generation)
        with engine:
            return engine.run(source, config.generation, output, progress_path)


def _converse(config: InferenceConfig) -> None:
    if config.input_path is not None or config.output_path is not None:
        note("jaxis: the paths of the configuration have no effect with --interactive")
    if config.model.tool_call_parser is not None:
        note("jaxis: model.tool_call_parser has no effect with --interactive: calls are shown as the model writes them")
    from jaxis.cli.chat import converse

    with exit_on_interrupt():
        from jaxis.cli.chat_session import ChatSession
        from jaxis.inference.engine import JAXInferenceEngine
        from jaxis.inference.generation_params import to_sampling_params
        from jaxis.inference.template_arguments import template_arguments

        engine = JAXInferenceEngine(config.model, generation_params=config.generation)
    with engine:
        template = template_arguments(config.model, config.generation, engine.llm.tokenizer)
        if config.generation.tools is not None and config.generation.tool_choice != "none":
            template["tools"] = config.generation.tools
        session = ChatSession(engine.llm, to_sampling_params(config.generation), template_kwargs=template)
        name = config.model.model_name or "Embedded model"
        converse(session, f"{name}, context {engine.llm.max_model_len} tokens")


COMMANDS = (Command("infer", infer, "inference", FIELDS),)
