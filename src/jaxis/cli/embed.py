"""`jaxis embed`: vectors of the texts in a file."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import exit_on_interrupt, note, report_errors
from jaxis.cli.infer import input_file, output_of
from jaxis.cli.options import Debug, EngineOptions, expand_options
from jaxis.runners import Runner


@expand_options
def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, file or Hub id.", show_default=False)],
    input_path: Annotated[
        str, typer.Argument(metavar="FILE", help="Texts, one a line, as JSON; - is stdin.", show_default=False)
    ],
    output_path: Annotated[
        str,
        typer.Option(
            "--output-file",
            "-o",
            metavar="FILE",
            help="Vectors as JSONL, or as one array if the name ends in .npy; - is stdout.",
        ),
    ] = "-",
    prompt_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The kind of the texts, such as query, for which the checkpoint has words to put before them.",
            show_default=False,
        ),
    ] = None,
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="Tokens that are left of a longer text; -1 is as many as the model takes (default: an error).",
            show_default=False,
        ),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=1,
            help="Elements that vectors are cut to, of a model that was trained for it.",
            show_default=False,
        ),
    ] = None,
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="RUNNER", help="pooling makes vectors with a model that generates text.", rich_help_panel="Engine"
        ),
    ] = "auto",
    engine: EngineOptions = EngineOptions(),  # noqa: B008 (frozen; only its type is used)
    debug: Debug = False,
) -> None:
    """Make a vector of each text of a file.

    Each line is a string, or an object with "text" or "input"; its other fields are kept beside "embedding".
    All lines are checked before anything is computed.
    A run with an output file that was interrupted goes on where it stopped when it is started again.

    \b
    [bold]Examples[/bold]
      jaxis embed ./all-MiniLM-L6-v2 texts.jsonl -o vectors.jsonl
      jaxis embed ./all-MiniLM-L6-v2 texts.jsonl -o vectors.npy
      jaxis embed ./nomic-embed-text-v1.5 texts.jsonl -o vectors.npy --prompt-name document
    """
    arguments = engine.llm_arguments()
    output = output_of(output_path)
    with report_errors(debug=debug), input_file(input_path) as texts:
        with exit_on_interrupt():
            from jaxis.host.progress import ProgressDisplay
            from jaxis.inference.embedding import EmbedOptions, embed_file, open_texts

        source = open_texts(texts, output)  # now rather than after a minute of loading
        options = EmbedOptions(prompt_name, truncate_prompt_tokens, dimensions)
        summary = embed_file(model, arguments, source, output, options, runner=runner, display=ProgressDisplay())
    note(f"{summary.completed} texts, a vector each")


COMMANDS = (Command("embed", embed, "pooling"),)
