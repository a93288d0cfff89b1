"""`jaxis chat` on a terminal: line editing, history, Ctrl-C and Ctrl-D."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from jaxis.cli.console import write_answer

ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"
# prompt_toolkit switches bracketed paste on whenever it begins to read a line.
PROMPT_BEGINS, PROMPT = b"\x1b[?2004h", "<prompt>"
ESCAPE_SEQUENCES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
# Makes the pseudo-terminal the controlling one, so that Ctrl-C typed into it is a signal.
PROGRAM = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from jaxis.cli.main import main
main()
"""


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, arguments, environment):
        self.parent, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, arguments)],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**environment, "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
        )
        os.close(child)
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.seen = b""

    def type(self, text):
        """Types as soon as the chat reads a line."""
        self.wait_for(PROMPT)
        self.press(text)

    def press(self, keys):
        os.write(self.parent, keys.encode())

    def wait_for(self, pattern, seconds=120):
        """Reads until the pattern has appeared; returns what came up to its end and goes on behind it."""
        deadline = time.monotonic() + seconds
        while True:
            shown = ESCAPE_SEQUENCES.sub(b"", self.seen.replace(PROMPT_BEGINS, PROMPT.encode()))
            if match := re.search(pattern.encode(), shown):
                self.seen = shown[match.end() :]
                return shown[: match.end()].decode(errors="replace")
            ready, _, _ = select.select([self.parent], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{pattern!r} did not appear in {shown[-2000:]!r}"
            try:
                self.seen += os.read(self.parent, 65536)
            except OSError:  # how Linux reports that the other side is closed
                raise AssertionError(f"the chat ended before {pattern!r} appeared in {shown[-2000:]!r}") from None

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.parent)


@pytest.fixture
def terminal(cli_environment, chat_model, ctrl_c):
    terminals = []

    def start(*options):
        terminals.append(Terminal(["chat", chat_model, "--load-format", "dummy", *options], cli_environment))
        terminals[-1].wait_for("/help lists commands and keys")
        return terminals[-1]

    yield start
    for started in terminals:
        started.close()


def test_a_chat_on_a_terminal(terminal, tmp_path, cli_home):
    # No answer ends by itself: this template has no token at an answer's end, and the files name none.
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    endless = ("--hf-overrides", '{"max_position_embeddings": 16384}', "--chat-template", str(template))
    chat = terminal(*endless, "--temperature", "1", "--top-p", "1", "--top-k", "0")

    # Ctrl-C at the prompt clears the line, and the chat goes on.
    chat.type("half a li" + CTRL_C)
    chat.type("/frobnicate" + ENTER)
    chat.wait_for("jaxis: error: there is no command /frobnicate")

    # Ctrl-C stops an answer of some 16,000 tokens, which would end with a line on how many there were; it keeps what
    # came of it, and the chat goes on.
    chat.type("/stats on" + ENTER)
    chat.wait_for(r"\(stats on\)")
    chat.type("hello" + ENTER)
    chat.wait_for(r"hello\r+\n")
    chat.wait_for(r"((?!Compiling)[\s\S]){200}")  # not the line that is shown meanwhile
    chat.press(CTRL_C)
    assert not re.search(r"tokens, \d+ generated", chat.wait_for(PROMPT))
    first = tmp_path / "first.json"
    chat.press(f"/save {first}" + ENTER)
    chat.wait_for(r"\(saved 2 messages")
    question, answer = json.loads(first.read_text())["messages"]
    assert question == {"role": "user", "content": "hello"}
    assert answer["role"] == "assistant"
    assert answer["content"]

    # The model answers again after that; a message can have several lines.
    chat.type("/set max_tokens 5" + ENTER)
    chat.type("line one" + ALT_ENTER + "line two" + ENTER)
    chat.wait_for(r"prompt tokens, 5 generated")
    second = tmp_path / "second.json"
    chat.type(f"/save {second}" + ENTER)
    chat.wait_for(r"\(saved 4 messages")
    assert json.loads(second.read_text())["messages"][2]["content"] == "line one\nline two"

    # Tab completes, up recalls, Ctrl-D quits.
    chat.type("/und\t")
    chat.wait_for("/undo")
    chat.press(ENTER)
    chat.wait_for(r"\(taken back: line one")
    chat.type(UP + UP + UP + ENTER)
    chat.wait_for(r"prompt tokens, 5 generated")
    chat.type(CTRL_D)
    assert chat.process.wait(timeout=30) == 0

    # The lines are kept for the next chat, for the user alone.
    history = cli_home / "state" / "jaxis" / "chat_history"
    assert "+line one\n+line two" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_control_characters_do_not_reach_a_terminal():
    class FakeTerminal:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

        def isatty(self):
            return True

    stream = FakeTerminal()
    write_answer("a\x1b]0;title\x07\tb\n\x9b2Jé👩‍💻", stream)
    assert stream.text == "a]0;title\tb\n2Jé👩‍💻"
