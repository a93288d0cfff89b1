"""`jaxis chat`: a conversation with a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from jaxis.cli.chat_commands import run_command
from jaxis.cli.chat_session import ChatSession
from jaxis.cli.command import Command
from jaxis.cli.console import EXIT_ERROR, note, print_error, report_errors
from jaxis.cli.options import (
    OUTPUT_PANEL,
    PROMPT_PANEL,
    SAMPLING_PANEL,
    ChatTemplate,
    Debug,
    EngineOptions,
    OptionalModel,
    SamplingOptions,
    TemplateKwargs,
    chat_params,
    expand_options,
    open_llm,
    parse_json_object,
)
from jaxis.errors import JaxisError


@expand_options
def chat(
    model: OptionalModel = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message.", rich_help_panel=PROMPT_PANEL)
    ] = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateKwargs = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Most tokens of an answer (default: until the context is full).",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 (frozen; only its type is used)
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Print token counts and speed on stderr after each answer.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    debug: Debug = False,
) -> None:
    """Talk with a model.

    Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D quits.
    /help lists the commands. The up key recalls lines, also those of earlier chats.

    If stdin is not a terminal, each of its lines is a turn.
    Answers go to stdout, everything else to stderr.

    \b
    [bold]Examples[/bold]
      jaxis chat
      jaxis chat ./Qwen3-0.6B --system "Answer in one sentence." --temperature 0.2
      printf 'My name is Ada.\\nWhat is my name?\\n' | jaxis chat ./Qwen3-0.6B
    """
    overrides = sampling.overrides(max_tokens=max_tokens)
    arguments = {**engine.llm_arguments(), "chat_template": chat_template}
    template_kwargs = parse_json_object(chat_template_kwargs, "--chat-template-kwargs")
    with report_errors(debug=debug), open_llm(model, arguments, chats=True, needs_chat_template=True) as llm:
        params = chat_params(llm.get_default_sampling_params(), overrides)
        session = ChatSession(llm, params, system=system, template_kwargs=template_kwargs, show_stats=stats)
        converse(session, f"{model or 'Embedded model'}, context {llm.max_model_len} tokens")


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def converse(session: ChatSession, title: str) -> None:
    """Takes turns on a terminal, or from the lines of stdin, until there are no more. Raises typer.Exit if a line of
    stdin failed.
    """
    if _on_terminal():
        note(f"{title}. /help lists commands and keys.")
        _run_on_terminal(session)
    elif not _run_on_lines(session):
        raise typer.Exit(EXIT_ERROR)


def _run_on_terminal(session: ChatSession) -> None:
    from jaxis.cli.chat_input import ChatInput, history_file  # prompt_toolkit: not needed for `jaxis --help`

    chat_input = ChatInput(history_file())
    while True:
        try:
            _take_turn(session, chat_input.read())
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        except JaxisError as error:
            print_error(error)


def _run_on_lines(session: ChatSession) -> bool:
    all_well = True
    for line in sys.stdin:
        try:
            _take_turn(session, line)
        except EOFError:
            break
        except JaxisError as error:
            print_error(error)
            all_well = False
    return all_well


def _take_turn(session: ChatSession, text: str) -> None:
    text = text.strip()
    if text.startswith("/"):
        run_command(session, text)
    elif text:
        session.ask(text)


COMMANDS = (Command("chat", chat),)
