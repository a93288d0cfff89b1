"""`jaxis report`: the bring-up checklist of a model, ticked from evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxis.cli.console import EXIT_ERROR, note, report_errors, write_files
from jaxis.cli.options import Debug


def report(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder or Hub id of a checkpoint, or a config.json alone.", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write the report; made if missing.")
    ] = Path("report"),
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the hub (default: main).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Tick a model's bring-up checklist from evidence.

    Analyses, verifies in float32 and bfloat16, and converts to Orbax and back.
    Writes report.md, report.json, and report.html, one page with plots.
    Needs torch, transformers and matplotlib: pip install 'jaxis\\[verify]'.
    Exits with 1 if an item is not ticked.

    \b
    [bold]Examples[/bold]
      jaxis report ./Qwen3-0.6B
      jaxis report config.json --output qwen3-report
    """
    with report_errors(debug=debug):
        from rich.console import Console

        from jaxis.bringup.report.report import make_report
        from jaxis.bringup.report.text import report_html, report_markdown

        with Console(stderr=True).status("Starting") as status:
            made = make_report(
                model, revision=revision, on_stage=lambda stage: status.update(stage[0].upper() + stage[1:])
            )
            files = {
                "report.json": made.to_json(),
                "report.md": report_markdown(made),
                "report.html": report_html(made),
            }
        write_files(output, files)
        for item in made.items:
            print(f"[{'x' if item.passed else ' '}] {item.title}")
        note(f"wrote {', '.join(str(output / name) for name in files)}")
    if not made.passed:
        raise typer.Exit(EXIT_ERROR)
