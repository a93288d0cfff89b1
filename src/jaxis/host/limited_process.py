"""Processes for untrusted work, with limits on their time, memory and output."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxis.host import limited_worker

_WAIT_SECONDS = 300.0  # for a process that gets no processor time
_MAX_IDLE = 4
# Has glibc keep some freed memory: getting its pages again at each request takes as long as decoding a photo.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 26), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}

Limit = Literal["time", "memory", "output", "ended"]


class LimitExceededError(Exception):
    """A request reached a limit, or ("ended") its process ended for another reason."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.limit: Limit = limit


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a request: processor time, address space of its process, and bytes of the answer with its data."""

    seconds: int
    memory_bytes: int
    answer_bytes: int


class _Process:
    """A running `limited_worker`."""

    def __init__(self, worker: Path) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(_WAIT_SECONDS)
        with theirs:
            # -P: no import takes its module from the folder of the file; -W: nothing untrusted writes into the log.
            command = [sys.executable, "-P", "-W", "ignore", limited_worker.__file__, str(worker), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=os.environ | _ALLOCATOR
            )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False if the system has ended the process."""
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], data: bytes, limits: ProcessLimits) -> limited_worker.Received:
        """Returns the worker's answer. Raises LimitExceededError if there is none, and the process has ended."""
        message = {"request": request, "seconds": limits.seconds, "memory_bytes": limits.memory_bytes}
        limit: Limit | None = None
        try:
            limited_worker.send(self.connection, message, len(data), (data,))
            if (answer := limited_worker.receive(self.connection, limits.answer_bytes)) is not None:
                return answer
        except limited_worker.MessageTooLongError:
            limit = "output"
        except TimeoutError:
            limit = "time"
        except ValueError:  # what it says is no JSON
            limit = "ended"
        except OSError:
            pass
        code = self.end()
        if limit is None:
            limit = "time" if code == -signal.SIGXCPU else "ended"
            if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT):
                limit = "memory"
        raise LimitExceededError(limit)

    def end(self) -> int:
        """Ends the process; returns its exit code."""
        self.connection.close()
        try:
            return self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class LimitedProcesses:
    """Answers requests, each in a process of its own at the time; processes are kept for the next ones.

    Args:
      worker: File of a module that answers (see `limited_worker`).
      large_bytes: Size of an answer whose process has grown too much to be kept.
      max_running: Requests that are answered at a time, while others wait; None is any number.
    """

    def __init__(self, worker: Path, large_bytes: int, max_running: int | None = None) -> None:
        self._worker, self._large_bytes, self._max_running = worker, large_bytes, max_running
        self._lock = threading.Lock()
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._idle: list[_Process] = []
        self._running = (
            contextlib.nullcontext() if self._max_running is None else threading.Semaphore(self._max_running)
        )
        self._pid = os.getpid()

    @property
    def waiting_pids(self) -> list[int]:
        """Ids of the processes that wait for a request."""
        return [process.pid for process in self._idle]

    def start(self) -> None:
        """Starts a process for the first request, without waiting: it is ready a tenth of a second later."""
        with self._lock:
            self._check_fork()
            waiting = bool(self._idle)
        if not waiting:
            self._give_back(_Process(self._worker))

    def ask(
        self, request: Mapping[str, Any], limits: ProcessLimits, data: bytes = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Returns the worker's answer to a request of JSON values, and the data beside it.

        Raises LimitExceededError if the request exceeds a limit, or its process has ended.
        """
        with self._lock:
            self._check_fork()
            running = self._running
        with running:
            process = self._take()
            try:
                answer, answer_data, num_bytes = process.ask(request, data, limits)
            except BaseException:  # such as an interrupt: its answer may still come
                process.end()
                raise
            if num_bytes > self._large_bytes or "limit" in answer:
                process.end()
                self.start()
            else:
                self._give_back(process)
        if "limit" in answer:
            raise LimitExceededError(answer["limit"])
        return answer, answer_data

    def close(self) -> None:
        """Ends the processes that wait."""
        with self._lock:
            self._check_fork()
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                if (process := self._idle.pop()).is_alive:
                    return process
                process.end()
        return _Process(self._worker)

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(process)
                return
        process.end()

    def _check_fork(self) -> None:
        if self._pid != os.getpid():  # this is a fork, and the processes are its parent's
            self._begin()
