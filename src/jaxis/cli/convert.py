"""`jaxis convert`: between Hugging Face's checkpoint format and Orbax's."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jaxis.cli.console import note, report_errors
from jaxis.cli.options import Debug


class Format(StrEnum):
    """Formats in which a checkpoint can be written."""

    orbax = "orbax"
    hf = "hf"


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Folder or Hub id of the checkpoint.", show_default=False)
    ],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="Folder to make.", show_default=False)],
    to: Annotated[Format, typer.Option(help="Format to write: Orbax, or Hugging Face (safetensors).")],
    scanned: Annotated[
        bool | None,
        typer.Option(
            "--scanned/--unscanned",
            help="With --to orbax: stack layers (and experts) as training scans them, or (default) keep each tensor "
            "by itself.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the hub (default: main).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Convert a checkpoint, every tensor bit for bit.

    An interrupted conversion goes on where it stopped when it is run again.
    jaxis runs checkpoints of all three kinds as they are.

    \b
    [bold]Examples[/bold]
      jaxis convert Qwen/Qwen3-0.6B ./qwen3-orbax --to orbax
      jaxis convert ./Qwen3-0.6B ./qwen3-train --to orbax --scanned
      jaxis convert ./qwen3-train ./qwen3-tuned --to hf
    """
    if scanned is not None and to is Format.hf:
        raise typer.BadParameter(
            "is for --to orbax: safetensors files always hold each tensor by itself", param_hint="--scanned"
        )
    with report_errors(debug=debug):
        from jaxis.bringup.convert.convert import convert_checkpoint
        from jaxis.host.progress import ProgressDisplay
        from jaxis.loading.hub import resolve_model

        with ProgressDisplay().working(f"Converting {source}") as on_progress:
            done = convert_checkpoint(
                resolve_model(source, revision=revision),
                destination,
                to.value,
                scanned=bool(scanned),
                on_progress=on_progress,
            )
        resumed = f", {done.resumed_bytes / 1e6:.1f} MB of them by an earlier run" if done.resumed_bytes else ""
        note(f"{destination}: {done.num_tensors} tensors, {done.total_bytes / 1e6:.1f} MB{resumed}")
