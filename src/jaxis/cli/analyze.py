"""`jaxis analyze`: whether jaxis runs a model, told without reading its weights."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from jaxis.cli.console import EXIT_ERROR, report_errors
from jaxis.cli.options import Debug


def analyze(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder, GGUF file, config.json, or Hub id.", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Name the keys that change nothing too.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Ask about a memory such as 80GiB, not this machine's; it must then fit."),
    ] = None,
    kv_cache_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "int8"], typer.Option(help="Type of the cache to give figures for.")
    ] = "bfloat16",
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the hub (default: main).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Tell whether a model can run, what it is made of, and how large it is.

    Reads config.json and the headers of the weights, never the weights: seconds for any size.
    The exit code is 0 only if it can run (with --memory: and fits).

    \b
    [bold]Examples[/bold]
      jaxis analyze Qwen/Qwen3-30B-A3B
      jaxis analyze ./model --memory 80GiB
      jaxis analyze config.json --json | jq .problems
    """
    with report_errors(debug=debug):
        from rich.console import Console

        from jaxis.bringup.analyze.analysis import analyze
        from jaxis.bringup.analyze.text import analysis_text

        analysis = analyze(model, memory=memory, kv_cache_dtype=kv_cache_dtype, revision=revision)
        if as_json:
            print(analysis.to_json())
        else:
            print(analysis_text(analysis, Console(highlight=False), verbose=verbose), end="")
        if not analysis.can_run or (memory is not None and not analysis.fits):
            raise typer.Exit(EXIT_ERROR)
