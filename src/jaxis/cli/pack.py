"""`jaxis pack`: writes a model's weights as the native kernels read them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import note, report_errors
from jaxis.cli.options import AdditionalConfig, Debug, Revision, parse_additional_config


def pack(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, GGUF file or Hub id of the model.", show_default=False)
    ],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="Folder to make.", show_default=False)],
    quantization: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="int8, int4, or a YAML or JSON file with rules (default: as stored)."),
    ] = None,
    vision_quantization: Annotated[
        Literal["int8"] | None, typer.Option(help="Low-precision weights of the vision tower (default: as stored).")
    ] = None,
    additional_config: AdditionalConfig = None,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Write a model's weights as the CPU kernels read them, so that a start maps the file.

    The folder runs wherever the model does on CPU, on every instruction set, with the same answers.
    Processes that run it share its memory.
    Another version of jaxis asks to pack the model again.

    \b
    [bold]Examples[/bold]
      jaxis pack Qwen/Qwen3-0.6B ./Qwen3-0.6B-packed --quantization int8
      jaxis pack ./gemma-3-q4_k_m.gguf ./gemma-3-packed
      jaxis serve ./Qwen3-0.6B-packed
    """
    additional = None if additional_config is None else parse_additional_config(additional_config)
    with report_errors(debug=debug):
        from jaxis.bringup.convert.to_packed import pack_model
        from jaxis.engine.arguments import EngineArgs
        from jaxis.host.progress import ProgressDisplay

        args = EngineArgs(
            model=model,
            quantization=quantization,
            vision_quantization=vision_quantization,
            additional_config=additional,
            revision=revision,
        )
        nbytes = pack_model(args, destination, ProgressDisplay())
        note(f"{destination}: {nbytes / 1e6:.1f} MB\nto try it: jaxis chat {shlex.quote(str(destination))}")


COMMANDS = (Command("pack", pack, "bringup"),)
