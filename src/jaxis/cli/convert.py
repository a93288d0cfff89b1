"""`jaxis convert`: between the checkpoint formats of Hugging Face, Orbax and GGUF."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import note, print_json, report_errors
from jaxis.cli.options import Debug, JsonAnswer, Revision

if TYPE_CHECKING:
    from jaxis.bringup.convert.partial_folder import Conversion, OnProgress


class Format(StrEnum):
    """Formats in which a checkpoint can be written."""

    orbax = "orbax"
    hf = "hf"
    gguf = "gguf"


class OutType(StrEnum):
    """Types of the weights in a GGUF file."""

    auto = "auto"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"


class DType(StrEnum):
    """Types of the weights of a GGUF model in safetensors files."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Folder, GGUF file or Hub id of the checkpoint.", show_default=False)
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="Folder or GGUF file to make.", show_default=False)
    ],
    to: Annotated[
        Format | None,
        typer.Option(
            help="Format to write: Orbax, Hugging Face (safetensors) or GGUF (default with --adapter: hf; gguf for a "
            "DESTINATION that ends in .gguf).",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Adapter (LoRA) to merge into the weights.", show_default=False),
    ] = None,
    scanned: Annotated[
        bool | None,
        typer.Option(
            "--scanned/--unscanned",
            help="With --to orbax: stack layers (and experts) as training scans them, or (default) keep each tensor "
            "by itself.",
            show_default=False,
        ),
    ] = None,
    outtype: Annotated[
        OutType | None,
        typer.Option(
            help="With --to gguf: type of the weights; auto (default) keeps that of the checkpoint.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(
            help="With --to hf, of a GGUF file: type of the weights; auto (default) loses nothing.", show_default=False
        ),
    ] = None,
    as_json: JsonAnswer = False,
    revision: Revision = None,
    debug: Debug = False,
) -> None:
    """Convert a checkpoint between formats.

    Between Hugging Face's and Orbax's every tensor is the same bit for bit.
    An interrupted conversion to either goes on where it stopped when it is run again.
    jaxis runs checkpoints of all formats as they are.

    \b
    [bold]Examples[/bold]
      jaxis convert Qwen/Qwen3-0.6B ./qwen3-orbax --to orbax
      jaxis convert ./Qwen3-0.6B ./qwen3-train --to orbax --scanned
      jaxis convert ./qwen3-train ./qwen3-tuned --to hf
      jaxis convert ./qwen3-tuned ./qwen3-tuned.gguf --to gguf --outtype q8_0
      jaxis convert ./gemma-3.gguf ./gemma-3 --to hf
      jaxis convert ./Qwen3-0.6B ./my-model --adapter ./my-adapter
      jaxis convert ./Qwen3-0.6B ./my-model.gguf --adapter ./my-adapter
    """
    if to is None:
        if destination.suffix != ".gguf" and adapter is None:
            raise typer.BadParameter("give the format to write: orbax, hf or gguf", param_hint="--to")
        to = Format.gguf if destination.suffix == ".gguf" else Format.hf
    if scanned is not None and to is not Format.orbax:
        raise typer.BadParameter("is for --to orbax: other formats hold each tensor by itself", param_hint="--scanned")
    if outtype is not None and to is not Format.gguf:
        raise typer.BadParameter("is for --to gguf", param_hint="--outtype")
    if dtype is not None and (to is not Format.hf or adapter is not None):
        raise typer.BadParameter("is for --to hf, of a GGUF file", param_hint="--dtype")
    with report_errors(debug=debug, command="convert", as_json=as_json):
        from jaxis.host.progress import ProgressDisplay
        from jaxis.loading.hub import resolve_model

        path = resolve_model(source, revision=revision)
        with ExitStack() as stack:
            on_progress = stack.enter_context(ProgressDisplay().working(f"Converting {source}"))
            if adapter is not None and to is Format.hf:
                from jaxis.bringup.convert.merged import convert_merged

                done = convert_merged(path, adapter, destination)
            else:
                if adapter is not None:
                    from jaxis.bringup.convert.merged import merged_beside

                    path = stack.enter_context(merged_beside(path, adapter, destination))
                done = _convert(path, destination, to, bool(scanned), outtype, dtype, on_progress)
        if as_json:
            print_json("convert", "converted", {"destination": str(destination), **dataclasses.asdict(done)})
            return
        resumed = f", {done.resumed_bytes / 1e6:.1f} MB of them by an earlier run" if done.resumed_bytes else ""
        note(f"{destination}: {done.num_tensors} tensors, {done.total_bytes / 1e6:.1f} MB{resumed}")


def _convert(
    path: Path,
    destination: Path,
    to: Format,
    scanned: bool,
    outtype: OutType | None,
    dtype: DType | None,
    on_progress: OnProgress,
) -> Conversion:
    from jaxis.loading.gguf_files import gguf_file

    if to is Format.gguf:
        from jaxis.bringup.convert.to_gguf import convert_to_gguf

        return convert_to_gguf(path, destination, outtype or "auto", on_note=note, on_progress=on_progress)
    if to is Format.hf and gguf_file(path) is not None:
        from jaxis.bringup.convert.from_gguf import convert_from_gguf

        return convert_from_gguf(path, destination, dtype or "auto", on_note=note, on_progress=on_progress)
    if dtype is not None:
        raise typer.BadParameter("is for GGUF files", param_hint="--dtype")
    from jaxis.bringup.convert.convert import convert_checkpoint

    return convert_checkpoint(path, destination, to.value, scanned=scanned, on_progress=on_progress)


COMMANDS = (Command("convert", convert, "bringup"),)
