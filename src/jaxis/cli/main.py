"""The `jaxis` command."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from jaxis.cli.console import print_json_error, wants_json
from jaxis.version import __version__

# Command -> module of jaxis.cli that has it, in the order of the help.
_MODULES = {
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "new-key": "new_key",
    "pull": "models",
    "list": "models",
    "rm": "models",
    "infer": "infer",
    "run-batch": "run_batch",
    "train": "train",
    "embed": "embed",
    "quantize": "quantize",
    "pack": "pack",
    "analyze": "bringup",
    "plan": "plan",
    "convert": "convert",
    "verify": "bringup",
    "report": "bringup",
    "new-model": "bringup",
    "doctor": "env",
    "env": "env",
    "bench": "bench",
}
_UsageError = cast(type[Exception], typer.BadParameter.__base__)  # of the click that typer brings


class _Commands(TyperGroup):
    """The commands. Wrong usage of one that is to answer in JSON is an object on stdout, too."""

    def invoke(self, ctx: Any) -> Any:
        name, words = "".join(ctx._protected_args), ctx.args
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if wants_json(name, words):
                print_json_error(name, "usage", cast(typer.BadParameter, error).format_message())
            raise


def make_app(names: Iterable[str] = _MODULES) -> typer.Typer:
    """Makes the application with some of the commands. The modules of all, and their options, take half a second."""
    app = typer.Typer(
        name="jaxis",
        cls=_Commands,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    for name in names:
        commands = {command.name: command for command in import_module(f"jaxis.cli.{_MODULES[name]}").COMMANDS}
        commands[name].add_to(app)
    app.callback()(jaxis)
    return app


def __getattr__(name: str) -> typer.Typer:
    """Makes `app`, with all commands, when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = app = make_app()
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxis {__version__}")
        raise typer.Exit


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
      jaxis pack ./Qwen3-0.6B ./Qwen3-0.6B-packed
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
      analyze, convert, doctor, new-model, plan, quantize, report, verify: 1 no, 3 could not run
    """


def main() -> None:
    """Runs the command of `sys.argv`, and exits."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show becomes a question mark, and the answer continues.
            stream.reconfigure(errors="replace")
    wanted = sys.argv[1:2]
    app = make_app(wanted) if wanted and wanted[0] in _MODULES else make_app()
    app(prog_name="jaxis")
