"""`jaxis quantize`: writes a checkpoint with low-precision weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxis.cli.console import note, report_errors
from jaxis.cli.options import Debug, parse_additional_config


def quantize(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="Folder or Hub id of the unquantized checkpoint.", show_default=False),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="Folder to make.", show_default=False)],
    quantization: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="int8 (the default), int4, or a YAML or JSON file with rules."),
    ] = None,
    additional_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE", help='Rules as \'{"quantization": {"qwix": {"rules": [...]}}}\', or a file with that.'
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the hub (default: main).")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a checkpoint with low-precision weights, which loads as it is.

    Tokenizer, chat templates and model card are copied.
    The folder appears when it is complete.

    \b
    [bold]Examples[/bold]
      jaxis quantize ./Qwen3-0.6B ./Qwen3-0.6B-int8
      jaxis quantize Qwen/Qwen3-0.6B ./Qwen3-0.6B-int4 --quantization int4
      jaxis chat ./Qwen3-0.6B-int4
    """
    additional = None if additional_config is None else parse_additional_config(additional_config)
    with report_errors(debug=debug):
        from jaxis.errors import ConfigError
        from jaxis.host.progress import ProgressDisplay
        from jaxis.loading.hub import resolve_model
        from jaxis.quantization.arguments import parse_quantization
        from jaxis.quantization.checkpoint import quantize_checkpoint
        from jaxis.quantization.rules import RuleQuantizationConfig

        if quantization is None and additional is None:
            quantization = "int8"
        rules = parse_quantization(quantization, additional)
        if not isinstance(rules, RuleQuantizationConfig):
            raise ConfigError(f"jaxis quantize cannot write what --quantization {quantization} asks for: give rules")
        with ProgressDisplay().working(f"Quantizing {source}") as on_progress:
            nbytes = quantize_checkpoint(
                resolve_model(source, revision=revision), destination, rules, on_progress=on_progress
            )
        note(f"{destination}: {nbytes / 1e6:.1f} MB of weights")
