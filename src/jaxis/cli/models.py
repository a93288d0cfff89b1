"""`jaxis pull`, `jaxis list` and `jaxis rm`: models in the Hub's cache on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Annotated

import typer

from jaxis.cli.command import Command
from jaxis.cli.console import note, report_errors
from jaxis.cli.options import Debug
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.byte_size import human_bytes

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id.", show_default=False)]


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub id; org/name:Q4_K_M is a GGUF file there.", show_default=False),
    ],
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit (default: main).")] = None,
    debug: Debug = False,
) -> None:
    """Download a model into the Hub's cache.

    Only its config, tokenizer, chat template, and safetensors or GGUF files come; no code does.
    Prints the folder, and the commit, which --revision takes to get the very same files later.

    \b
    [bold]Examples[/bold]
      jaxis pull Qwen/Qwen3-0.6B
      jaxis pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M
      jaxis pull Qwen/Qwen3-0.6B --revision c1899de289a04d12100db370d81485cdf75e47ca
    """
    with report_errors(debug=debug):
        from jaxis.loading.hub import resolve_model
        from jaxis.loading.hub_cache import cached_models

        if os.path.exists(os.path.expanduser(model)):
            raise CheckpointError(f"{model} is a local path: there is nothing to download")
        path = resolve_model(model, revision=revision)
        found = next((each for each in cached_models() if path.is_relative_to(each.path)), None)
        if found is not None:
            note(f"{found.name} at commit {found.commit}, {human_bytes(found.nbytes)} in {found.num_files} files")
        print(path)


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a revision.")] = False,
    empties: Annotated[bool, typer.Option("--empty-pack-cache", help="Delete what --pack-cache kept first.")] = False,
    debug: Debug = False,
) -> None:
    """List the models in the Hub's cache, and those that --pack-cache keeps (packed).

    \b
    [bold]Examples[/bold]
      jaxis list
      jaxis list --json | jq .name
    """
    with report_errors(debug=debug):
        from jaxis.loading.hub_cache import cached_models
        from jaxis.packed.cached_folders import empty_pack_cache, packed_models

        if empties:
            note(f"{human_bytes(empty_pack_cache())} freed")
        models = [*cached_models(), *packed_models()]
        for model in models if as_json else ():
            fields = dataclasses.asdict(model) | {"path": str(model.path), "last_used": model.last_used.isoformat()}
            print(json.dumps(fields))
        if as_json:
            return
        if not models:
            note("no models yet: `jaxis pull MODEL` downloads one")
            return
        rows = [("model", "revision", "commit", "size", "last used")]
        rows += [
            (
                model.name,
                ", ".join(model.refs) or "-",
                model.commit[:12],
                human_bytes(model.nbytes),
                f"{model.last_used:%Y-%m-%d}",
            )
            for model in models
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def rm(
    model: Model,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this branch, tag or commit (default: all).")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    debug: Debug = False,
) -> None:
    """Delete a model from the Hub's cache.

    It says what would go and asks first.

    \b
    [bold]Examples[/bold]
      jaxis rm Qwen/Qwen3-0.6B
      jaxis rm Qwen/Qwen3-0.6B --revision v1.0 --yes
    """
    with report_errors(debug=debug):
        from jaxis.loading.hub_cache import find_cached, remove_cached

        models = find_cached(model, revision)
        for each in models:
            note(f"{each.name} {', '.join((*each.refs, each.commit[:12]))}, {human_bytes(each.nbytes)}")
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("nothing was deleted: stdin is no terminal to ask on, so give --yes")
            if not typer.confirm("Delete this?", err=True):
                note("nothing was deleted")
                return
        note(f"{human_bytes(remove_cached(models))} freed")


COMMANDS = (Command("pull", pull), Command("list", list_models), Command("rm", rm))
