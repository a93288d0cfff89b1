"""The /commands of a chat."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path

from jaxis.cli.chat_history import ChatHistory, content_text
from jaxis.cli.chat_session import ChatSession
from jaxis.cli.console import note
from jaxis.errors import RequestError

SETTABLE = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def run_command(session: ChatSession, line: str) -> None:
    """Runs a line that begins with a slash; its messages go to stderr.

    Raises RequestError if there is no such command, or it cannot be done, and EOFError if the command ends the chat.
    """
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        raise RequestError(f"there is no command {name}: /help lists them")
    COMMANDS[name].run(session, argument.strip())


def _help(_session: ChatSession, _argument: str) -> None:
    for command in COMMANDS.values():
        note(f"  {command.usage:<22} {command.help}")
    note("  Enter sends. Alt-Enter (or Esc, then Enter) starts a new line. Tab completes commands.")
    note("  Ctrl-C stops an answer or clears the line. Ctrl-D quits. Up and down recall earlier lines.")


def _clear(session: ChatSession, _argument: str) -> None:
    session.conversation.turns.clear()
    session.images = []
    note("(conversation cleared" + (")" if session.conversation.system is None else "; the system message stays)"))


def _system(session: ChatSession, argument: str) -> None:
    session.conversation.system = argument or None
    note("(system message set)" if argument else "(no system message)")


def _set(session: ChatSession, argument: str) -> None:
    if not argument:
        note("  ".join(f"{name}={getattr(session.params, name)}" for name in SETTABLE))
        return
    name, _, text = argument.partition(" ")
    if name not in SETTABLE:
        raise RequestError(f"/set has no field {name!r}: choose from {', '.join(SETTABLE)}")
    if not text:
        raise RequestError(f"/set {name} needs a value, as in /set temperature 0.2")
    session.params = dataclasses.replace(session.params, **{name: _parse_value(text.strip())})
    note(f"({name}={getattr(session.params, name)})")


def _parse_value(text: str) -> object:
    """Parses a JSON value or "none"; anything else is a verbatim string."""
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _stats(session: ChatSession, argument: str) -> None:
    if argument not in ("on", "off"):
        raise RequestError("/stats needs on or off")
    session.show_stats = argument == "on"
    note(f"(stats {argument})")


def _save(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/save")
    session.conversation.save(path)
    note(f"(saved {len(session.conversation.messages)} messages to {path})")


def _load(session: ChatSession, argument: str) -> None:
    path = _path(argument, "/load")
    session.conversation = ChatHistory.load(path)
    note(f"(loaded {len(session.conversation.messages)} messages from {path})")


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise RequestError(f"{command} needs a file name")
    return Path(argument).expanduser()


def _image(session: ChatSession, argument: str) -> None:
    # Terminals quote, or escape the spaces of, the path of a file that is dropped on them.
    try:
        words = shlex.split(argument)
    except ValueError:  # a quote that is not closed is the name's own
        words = []
    session.add_image(_path(words[0] if len(words) == 1 else argument, "/image"))
    note(f"({session.images[-1]} comes with the next message)")


def _undo(session: ChatSession, _argument: str) -> None:
    content = session.conversation.take_back()
    if content is None:
        raise RequestError("there is nothing to undo")
    note(f"(taken back: {content_text(content)})")


def _retry(session: ChatSession, _argument: str) -> None:
    turns = list(session.conversation.turns)
    content = session.conversation.take_back()
    if content is None:
        raise RequestError("there is no question to ask again")
    try:
        session.ask(content)
    except BaseException:
        if len(session.conversation.turns) < len(turns):  # no new answer: keep the old one
            session.conversation.turns = turns
        raise


def _quit(_session: ChatSession, _argument: str) -> None:
    raise EOFError


@dataclasses.dataclass(frozen=True)
class ChatCommand:
    """A /command: usage and description for /help, and the function that runs it with the session and the argument."""

    usage: str
    help: str
    run: Callable[[ChatSession, str], None]


COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        ChatCommand("/help", "list the commands and keys", _help),
        ChatCommand("/clear", "forget the conversation", _clear),
        ChatCommand("/image FILE", "send an image with the next message", _image),
        ChatCommand("/system [TEXT]", "set the system message, or remove it", _system),
        ChatCommand("/set [NAME VALUE]", "set a sampling parameter, or show them all", _set),
        ChatCommand("/stats on|off", "show token counts and speed after each answer", _stats),
        ChatCommand("/undo", "take back the last question and its answer", _undo),
        ChatCommand("/retry", "ask the last question again", _retry),
        ChatCommand("/save FILE", "write the conversation as JSON", _save),
        ChatCommand("/load FILE", "go on with a conversation that /save wrote", _load),
        ChatCommand("/quit", "leave", _quit),
    )
}
