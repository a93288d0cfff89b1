"""Processes that render chat templates, with limits on time, memory and output."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from jaxis.errors import RequestError
from jaxis.tokenizer import template_worker

# Far more than a conversation of 8 MB needs, which takes half a second.
MAX_SECONDS = 10  # of processor time
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 26
_WAIT_SECONDS = 300.0  # for a process that gets no processor time
_MAX_IDLE = 4
_LARGE_CHARACTERS = 1 << 20  # after which a process has grown, and is ended


class _Process:
    """A running `template_worker`."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(_WAIT_SECONDS)
        with theirs:
            # -P: no import takes its module from the folder of the file.
            command = [sys.executable, "-P", str(Path(template_worker.__file__)), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked: the system may have ended it."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer; without one, the kind of the limit that ended it."""
        try:
            template_worker.send(self.connection, request)
            if (answer := template_worker.receive(self.connection)) is not None:
                return answer
        except OSError:  # it has ended, or does not answer
            pass
        code = self.end()
        if code == -signal.SIGXCPU:
            return {"kind": "time"}
        return {"kind": "memory" if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT) else "ended"}

    def end(self) -> int:
        """Ends the process; returns its exit code."""
        self.connection.close()
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class TemplateProcesses:
    """Renders templates, each in a process of its own at the time; processes are kept for the next ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._pid = os.getpid()

    def start(self) -> None:
        """Starts a process for the first template, and does not wait for it: it is ready a tenth of a second later."""
        with self._lock:
            waiting = bool(self._idle)
        if not waiting:
            self._give_back(_Process())

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Renders a template.

        Args:
          template: Jinja source.
          variables: JSON values.

        Raises:
          RequestError: The template is invalid, raises an error, or exceeds a limit.
        """
        request = {
            "template": template,
            "variables": variables,
            "max_seconds": MAX_SECONDS,
            "max_memory_bytes": MAX_MEMORY_BYTES,
            "max_characters": MAX_CHARACTERS,
        }
        process = self._take()
        try:
            answer = process.ask(request)
        except BaseException:  # such as an interrupt: its answer may still come
            process.end()
            raise
        if len(answer.get("text", "")) > _LARGE_CHARACTERS or answer.get("kind") in _LIMITS:
            process.end()
        else:
            self._give_back(process)
        if "text" in answer:
            return answer["text"]
        raise _error(answer)

    def close(self) -> None:
        """Ends the processes that wait."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _take(self) -> _Process:
        with self._lock:
            if self._pid != os.getpid():  # this is a fork, and the processes are its parent's
                self._idle, self._pid = [], os.getpid()
            while self._idle:
                if (process := self._idle.pop()).is_alive:
                    return process
                process.end()
        return _Process()

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(process)
                return
        process.end()


def _error(answer: Mapping[str, Any]) -> RequestError:
    if answer["kind"] == "syntax":
        error = RequestError(f"the chat template has a syntax error in line {answer['line']}: {answer['reason']}")
        error.__cause__ = jinja2.TemplateSyntaxError(answer["reason"], answer["line"])
        return error
    if answer["kind"] == "refused":
        return RequestError(f"the chat template refused the conversation: {answer['reason']}")
    return RequestError(f"the chat template {_LIMITS[answer['kind']]()}: use the template of the model's publisher")


# What a template did that was ended by a limit.
_LIMITS: Mapping[str, Callable[[], str]] = {
    "time": lambda: f"takes more than {MAX_SECONDS} s of processor time",
    "memory": lambda: f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory",
    "output": lambda: f"writes more than {MAX_CHARACTERS} characters",
    "ended": lambda: "ended the process that renders it",
}
PROCESSES = TemplateProcesses()
atexit.register(PROCESSES.close)
