"""`jaxis run-batch`: answers a file of OpenAI requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxis.cli.console import note, report_errors
from jaxis.cli.infer import input_file, output_of, summary_line
from jaxis.cli.options import Debug, EngineOptions, expand_options, open_llm
from jaxis.host.extras import check_extra


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
        from jaxis.inference.source import JSONLSource
        from jaxis.parsing.model_parsers import ModelParsers, check_parser_names
        from jaxis.server.config import EMBEDDED_MODEL_NAME
        from jaxis.server.endpoints.served_model import ServedModel

        check_parser_names(tool_call_parser, reasoning_parser)
        source = JSONLSource(requests, "custom_id", output=output)  # now rather than after a minute of loading
        with open_llm(model, arguments) as llm:
            from jaxis.host.progress import ProgressDisplay
            from jaxis.inference.journal import run_key
            from jaxis.inference.openai_batch import BatchTask
            from jaxis.inference.run import model_identity, run_to_output

            names = served_model_name or [EMBEDDED_MODEL_NAME if model is None else model]
            key = run_key(
                "requests", model_identity(llm, arguments), [*names, tool_call_parser, reasoning_parser], source.digest
            )
            model_type = llm.engine.vllm_config.model_config.hf_config.get("model_type")
            served = ServedModel(
                names=tuple(names),
                tokenizer=llm.tokenizer,
                default_sampling_params=llm.get_default_sampling_params(),
                grammar_compiler=llm.engine.grammar_compiler,
                parsers=ModelParsers.select(
                    llm.tokenizer, model_type, tool=tool_call_parser, reasoning=reasoning_parser
                ),
            )
            task = BatchTask(served, key)
            summary = run_to_output(
                llm, source, task, output, key, display=ProgressDisplay(), progress_path=progress_path
            )
    note(summary_line(summary))
