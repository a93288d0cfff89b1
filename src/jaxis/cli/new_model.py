"""`jaxis new-model`: starts a model family from an existing one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxis.cli.console import note, report_errors
from jaxis.cli.options import Debug


def new_model(
    name: Annotated[str, typer.Argument(help="As its classes will begin, such as Falcon4.", show_default=False)],
    like: Annotated[
        str, typer.Option(metavar="FAMILY", help="Family to start from, such as qwen3.", show_default=False)
    ],
    debug: Debug = False,
) -> None:
    """Start a model family from an existing one.

    To be run in a checkout of jaxis.
    Writes the family's file, its line in the registry, a row of its tests and one of the page of models.
    It is the copied family under another name, and passes that family's tests: change from there what differs.

    \b
    [bold]Example[/bold]
      jaxis new-model Falcon4 --like qwen3
    """
    with report_errors(debug=debug):
        from jaxis.bringup import new_model as bringup

        made = bringup.new_model(name, like, Path())
        note("\n".join(f"wrote {path}" for path in made.files) + f"\ncheck it with: {made.check}")
