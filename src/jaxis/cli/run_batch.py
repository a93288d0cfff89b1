"""`jaxis run-batch`: answers a file of OpenAI requests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import exit_on_interrupt, note, report_errors
from jaxis.cli.infer import input_file, output_of, summary_line
from jaxis.cli.options import Debug, EngineOptions, Replicas, expand_options, open_llm
from jaxis.host.extras import check_extra
from jaxis.rooms import check_room

if TYPE_CHECKING:
    from jaxis.inference.run import RunSummary
    from jaxis.jsonl.source import JSONLSource


@expand_options
def run_batch(
    input_path: Annotated[
        str, typer.Option("--input-file", "-i", metavar="FILE", help="Requests, one a line; - is stdin.")
    ],
    output_path: Annotated[
        str, typer.Option("--output-file", "-o", metavar="FILE", help="Responses, one a line; - is stdout.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="Folder or Hub id (default: the embedded model).", show_default=False
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What requests call the model; can be given several times."),
    ] = None,
    progress_path: Annotated[
        Path | None,
        typer.Option("--progress-file", metavar="FILE", help="JSON file {total, completed, failed, updated_at}."),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="Format of the model's tool calls; auto looks into its chat template, none leaves them in the text."
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="Format of the model's reasoning; auto and none as above.")
    ] = "auto",
    replicas: Replicas = 1,
    engine: EngineOptions = EngineOptions(),  # noqa: B008 (frozen; only its type is used)
    debug: Debug = False,
) -> None:
    """Answer an OpenAI batch file.

    Each line holds custom_id, url (/v1/chat/completions, /v1/completions or /v1/responses) and body.
    Responses stand in the order of the requests; one that failed has its error in it.
    A run that was interrupted goes on where it stopped when it is started again.

    \b
    [bold]Examples[/bold]
      jaxis run-batch -i batch.jsonl -o results.jsonl -m ./Qwen3-0.6B
      jaxis run-batch -i batch.jsonl -o results.jsonl --served-model-name gpt-4o-mini
    """
    arguments = engine.llm_arguments()
    output = output_of(output_path)
    with report_errors(debug=debug), input_file(input_path) as requests:
        check_extra("server", "jaxis run-batch")
        if replicas > 1:
            check_extra("ray", "--replicas")
            check_room("integrations", "--replicas")
        from jaxis.jsonl.source import JSONLSource
        from jaxis.parsing.model_parsers import check_parser_names
        from jaxis.server.config import EMBEDDED_MODEL_NAME

        check_parser_names(tool_call_parser, reasoning_parser)
        source = JSONLSource(requests, "custom_id", output=output)  # now rather than after a minute of loading
        names = served_model_name or [EMBEDDED_MODEL_NAME if model is None else model]
        parsers = (tool_call_parser, reasoning_parser)
        if replicas > 1:
            with exit_on_interrupt():
                from jaxis.integrations.ray_runs import run_requests
            summary = run_requests(model, arguments, names, parsers, replicas, source, output, progress_path)
        else:
            summary = _run_here(model, arguments, names, parsers, source, output, progress_path)
    note(summary_line(summary))


def _run_here(
    model: str | None,
    arguments: dict[str, Any],
    names: list[str],
    parsers: tuple[str, str],
    source: JSONLSource,
    output: Path | BinaryIO,
    progress_path: Path | None,
) -> RunSummary:
    with open_llm(model, arguments) as llm:
        from jaxis.host.progress import ProgressDisplay
        from jaxis.inference.journal import run_key
        from jaxis.inference.openai_batch import BatchTask, served_model
        from jaxis.inference.run import answer_rows, model_identity, run_to_output

        folder = Path(llm.engine.vllm_config.model_config.model)
        key = run_key("requests", model_identity(folder, arguments), [*names, *parsers], source.digest)
        answers = functools.partial(answer_rows, llm.engine, BatchTask(served_model(llm, names, *parsers), key))
        return run_to_output(answers, source, output, key, display=ProgressDisplay(), progress_path=progress_path)


COMMANDS = (Command("run-batch", run_batch, "inference"),)
