"""Terminal helpers shared by the commands: one-line errors, exit codes, model text on a terminal, quiet libraries."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import FrameType
from typing import TextIO

import typer

from jaxis.errors import CheckpointError, ConfigError, JaxisError, RequestError
from jaxis.host.json_object import json_object_text

EXIT_ERROR = 1
EXIT_COULD_NOT_RUN = 3  # of commands that answer in JSON, and then not with no
EXIT_INTERRUPTED = 128 + 2  # as a shell reports SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # as a shell reports SIGPIPE

# Escape sequences in a model's output could move the cursor, retitle the window or worse.
_CONTROL_CHARACTERS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def print_error(message: object) -> None:
    """Prints `jaxis: error: ...` on stderr, as one line."""
    print("jaxis: error:", " ".join(str(message).split()), file=sys.stderr)


def note(message: str) -> None:
    """Prints a line that is not part of the answer on stderr."""
    print(message, file=sys.stderr, flush=True)


def write_answer(text: str, stream: TextIO | None = None) -> None:
    """Writes a model's text to stdout at once; to a terminal, without control characters."""
    output = sys.stdout if stream is None else stream
    output.write(text.translate(_CONTROL_CHARACTERS) if output.isatty() else text)
    output.flush()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes texts by name into a folder, which is created if missing; each ends with a newline.

    Raises JaxisError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n" * (not text.endswith("\n")), encoding="utf-8")
    except OSError as error:
        raise JaxisError(f"{folder} cannot be written: {error.strerror}") from error


def read_stdin() -> str:
    """Reads all of stdin, without the final newline. Raises RequestError if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text (byte {error.start}): convert it first") from None


@contextmanager
def report_errors(*, debug: bool, command: str = "", as_json: bool = False) -> Iterator[None]:
    """Turns exceptions that end a command into one line and an exit code.

    A JaxisError is printed as one line and exits with 1, Ctrl-C exits with 130, a closed stdout with 141.

    Args:
      debug: True to let a JaxisError through with its traceback, and leave the libraries' messages on.
      command: Name of a command with a file of `cli/schemas`; it exits with 3 for an error, since 1 is an answer.
      as_json: True if that command answers in JSON: stdout then gets one object for every exception, too.
    """
    _set_up_messages(debug=debug)

    def answer(code: str, error: BaseException) -> None:
        if as_json:
            print_json_error(command, code, str(error) or type(error).__name__, getattr(error, "keys", ()))

    try:
        yield
    except JaxisError as error:
        if debug and not as_json:
            raise
        print_error(error)
        answer(_code_of(error), error)
        raise typer.Exit(EXIT_COULD_NOT_RUN if command else EXIT_ERROR) from None
    except KeyboardInterrupt as error:
        print(file=sys.stderr)
        answer("interrupted", error)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The interpreter flushes stdout once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except (typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        if not as_json:
            raise
        traceback.print_exc()
        answer("internal", error)
        raise typer.Exit(EXIT_COULD_NOT_RUN) from None


def print_json(command: str, status: str, facts: Mapping[str, object]) -> None:
    """Prints a command's answer, one JSON object, as its file of `cli/schemas` describes it."""
    error = json.loads(_schema_file(command).read_text(encoding="utf-8"))["oneOf"][1]
    print(json_object_text({"schema": error["properties"]["schema"]["const"], "status": status, **facts}))


def print_json_error(command: str, code: str, message: str, keys: Iterable[str] = ()) -> None:
    """Prints the object of a command that could not answer."""
    print_json(command, "error", {"error": {"code": code, "keys": list(keys), "message": message}})


def wants_json(command: str, words: Sequence[str]) -> bool:
    """Returns whether a command's answer to these arguments is an object that `cli/schemas` describes."""
    return "--json" in words and _schema_file(command).is_file()


def _schema_file(command: str) -> Traversable:
    return files("jaxis.cli") / "schemas" / f"{command}.json"


def _code_of(error: JaxisError) -> str:
    codes = {ConfigError: "config", CheckpointError: "checkpoint", RequestError: "request"}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), "other")


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Makes Ctrl-C end the process at once, with exit code 130, while there is nothing to clean up yet.

    A KeyboardInterrupt can get lost meanwhile: raised in a library's callback, it is reported and ignored.
    """

    def end(_signum: int, _frame: FrameType | None) -> None:
        # A progress display hides the cursor of the terminal.
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n" if sys.stderr.isatty() else b"\n")
        os._exit(EXIT_INTERRUPTED)

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _set_up_messages(*, debug: bool) -> None:
    """Shows jaxis's own log messages, and those of JAX and its companions only with `debug`."""
    if debug:
        logging.basicConfig(format="%(name)s: %(levelname)s: %(message)s", level=logging.INFO)
        logging.getLogger("jaxis").setLevel(logging.DEBUG)
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
        return
    logging.basicConfig(format="jaxis: %(message)s", level=logging.ERROR)
    logging.getLogger("jaxis").setLevel(logging.WARNING)
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")


# Tokens that arrive together, or within a few milliseconds, say nothing about speed.
_MIN_RATE_TOKENS = 8
_MIN_RATE_SECONDS = 0.1


class AnswerStats:
    """Times an answer from the moment it is asked for.

    Attributes:
      seed: Seed that makes a sampled answer repeatable; None if it was not sampled.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.seed = seed
        self._num_first_tokens = 0
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start

    def add(self, num_tokens: int) -> None:
        self._last = time.perf_counter()
        self.num_tokens += num_tokens
        if self._first is None and num_tokens:
            self._first = self._last
            self._num_first_tokens = num_tokens

    def __str__(self) -> str:
        parts = [f"{self.num_prompt_tokens} prompt tokens", f"{self.num_tokens} generated"]
        if self._first is not None:
            num_later, seconds = self.num_tokens - self._num_first_tokens, self._last - self._first
            if num_later >= _MIN_RATE_TOKENS and seconds >= _MIN_RATE_SECONDS:
                parts.append(f"first token after {self._first - self._start:.3f} s")
                parts.append(f"then {num_later / seconds:.1f} tokens/s")
            else:
                parts.append(f"all after {self._last - self._start:.3f} s")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)
