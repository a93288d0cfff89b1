"""Line editing for a chat on a terminal: history, completion of /commands, several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from jaxis.cli.chat_commands import COMMANDS, SETTABLE


def history_file() -> Path:
    """Returns the file of earlier chats' lines, by the XDG base directory specification."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "jaxis" / "chat_history"


class ChatInput:
    """Reads the user's messages. If the history file cannot be created, history lasts as long as the chat."""

    def __init__(self, path: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=_ForgivingHistory(path),
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            completer=_CommandCompleter(),
            complete_while_typing=False,
            reserve_space_for_menu=0,
        )

    def read(self) -> str:
        """Reads one message. Raises KeyboardInterrupt on Ctrl-C and EOFError on Ctrl-D."""
        return self._session.prompt()


class _ForgivingHistory(FileHistory):
    """A history file whose loss does not end the chat; only its owner can read it."""

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # storing finds out
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
        super().__init__(path)

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


class _CommandCompleter(Completer):
    """Completes /commands and the names that /set takes."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:  # noqa: ARG002
        text = document.text_before_cursor
        names, word = COMMANDS, text
        if text.startswith("/set "):
            names, word = SETTABLE, text.removeprefix("/set ")
        if not text.startswith("/"):
            return
        for name in names:
            if name.startswith(word):
                yield Completion(name, start_position=-len(word))


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
