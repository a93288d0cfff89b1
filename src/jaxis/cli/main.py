"""The `jaxis` command."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from jaxis.cli.bench import app as bench
from jaxis.cli.bringup import analyze, new_model, report, verify
from jaxis.cli.chat import chat
from jaxis.cli.convert import convert
from jaxis.cli.embed import embed
from jaxis.cli.env import doctor, env
from jaxis.cli.generate import generate
from jaxis.cli.infer import infer
from jaxis.cli.models import list_models, pull, rm
from jaxis.cli.new_key import new_key
from jaxis.cli.plan import plan
from jaxis.cli.quantize import quantize
from jaxis.cli.run_batch import run_batch
from jaxis.cli.serve import serve
from jaxis.cli.serve_options import ServeCommand
from jaxis.cli.train import train
from jaxis.version import __version__

app = typer.Typer(
    name="jaxis",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command(context_settings={"allow_extra_args": True})(generate)  # it says itself what is wrong with them
app.command()(chat)
app.command(cls=ServeCommand)(serve)
app.command()(new_key)
app.command()(pull)
app.command("list")(list_models)
app.command()(rm)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(infer)  # it takes fields
app.command()(run_batch)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)  # as infer
app.command()(embed)
app.command()(quantize)
app.command()(analyze)
app.command()(plan)
app.command()(convert)
app.command(context_settings={"allow_extra_args": True})(verify)  # lengths of prompts, with spaces
app.command()(report)
app.command()(new_model)
app.command()(doctor)
app.command()(env)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxis {__version__}")
        raise typer.Exit


@app.callback()
def jaxis(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLMs in JAX: served, quantized, verified, trained.

    A MODEL is a folder in Hugging Face format, a GGUF file, or a Hub id such as Qwen/Qwen3-0.6B.
    Without one, a small embedded demonstration model answers.

    \b
    [bold]Examples[/bold]
      jaxis generate "What is the capital of France?"
      jaxis generate ./Qwen3-0.6B "Write a haiku" --max-tokens 60
      jaxis chat ./Qwen3-0.6B
      jaxis serve ./Qwen3-0.6B
      jaxis new-key alice >> keys.yaml
      jaxis pull Qwen/Qwen3-0.6B
      jaxis infer -c config.yaml
      jaxis run-batch -i batch.jsonl -o results.jsonl -m ./Qwen3-0.6B
      jaxis embed ./all-MiniLM-L6-v2 texts.jsonl -o vectors.npy
      jaxis train -c config.yaml
      jaxis quantize ./Qwen3-0.6B ./Qwen3-0.6B-int8
      jaxis convert ./Qwen3-0.6B ./Qwen3-0.6B-orbax --to orbax
      jaxis verify ./Qwen3-0.6B
      jaxis analyze Qwen/Qwen3-30B-A3B
      jaxis plan Qwen/Qwen3-8B --on v6e-8
      jaxis bench latency ./Qwen3-0.6B
      jaxis doctor
      jaxis env

    \b
    [bold]Exit codes[/bold]
      0 done, 1 error (one line on stderr), 2 wrong usage, 130 Ctrl-C
      analyze and verify: 0 yes, 1 no, 3 could not run
    """


def main() -> None:
    """Runs the command of `sys.argv`, and exits."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show becomes a question mark, and the answer continues.
            stream.reconfigure(errors="replace")
    app(prog_name="jaxis")
