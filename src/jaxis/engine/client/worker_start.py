"""Starts the processes of engines. The first one can start before its engine is known.

Such a process imports JAX meanwhile, which takes longer than all else when a small model starts. This module has only
fast imports.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import NamedTuple

SOCKET_BUFFER_BYTES = 4 << 20


class StartedWorker(NamedTuple):
    """A process that runs `worker_main` and reads its settings on stdin, with the socket to it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


_ahead: list[StartedWorker] = []


def start_ahead() -> None:
    """Starts the process that `take_worker` returns next; it ends with this process if nobody takes it."""
    _ahead.append(_start())


def take_worker() -> StartedWorker:
    """Returns a process without an engine: the one that was started ahead, or a new one."""
    while _ahead:
        worker = _ahead.pop()
        if worker.process.poll() is None:
            return worker
        worker.connection.close()
    return _start()


def drop_ahead() -> None:
    """Ends the process that was started ahead, since this process will need no engine process."""
    while _ahead:
        worker = _ahead.pop()
        worker.connection.close()
        worker.process.kill()
        worker.process.wait()


def _start() -> StartedWorker:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxis.engine.client.worker_main", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
    return StartedWorker(process, ours)
