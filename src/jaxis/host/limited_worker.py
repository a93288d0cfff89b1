"""Answers requests in a process with limits that `limited_process` starts: `python limited_worker.py FILE SOCKET`.

FILE is a module with a function `answer(request, data)`, which returns the arguments of `send`: the answer, and the
data beside it in parts, of which only one need be in memory. {"limit": ...} as an answer names the limit that was
reached. The system bounds untrusted code: the process has limits on its processor time and memory, and leaves no core
dump.

This file and FILE import nothing of jaxis, so that the process starts in a tenth of a second and is small. A message in
either direction is a JSON value and bytes beside it, with their lengths before them.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

Buffer = bytes | bytearray | memoryview

_LENGTHS = struct.Struct("<QQ")
_PART_BYTES = 1 << 20


class MessageTooLongError(Exception):
    """A message is longer than its receiver takes."""


class Received(NamedTuple):
    """A message: a JSON value, the data beside it, and the bytes of both."""

    message: Any
    data: bytearray
    num_bytes: int


def send(connection: socket.socket, message: object, num_bytes: int = 0, parts: Iterable[Buffer] = ()) -> None:
    """Sends a JSON value, and `num_bytes` of data in parts beside it."""
    # Half of a surrogate pair, which UTF-8 does not have, is escaped like everything that is not ASCII.
    text = json.dumps(message).encode()
    connection.sendall(_LENGTHS.pack(len(text), num_bytes) + text)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket, max_bytes: int | None = None) -> Received | None:
    """Returns the next message; None at the end of the connection.

    Raises MessageTooLongError if the message and its data have more than `max_bytes`.
    """
    head = _receive_bytes(connection, _LENGTHS.size)
    if head is None:
        return None
    lengths = _LENGTHS.unpack(head)
    num_bytes = sum(lengths)
    if max_bytes is not None and num_bytes > max_bytes:
        raise MessageTooLongError
    text, data = (_receive_bytes(connection, length) for length in lengths)
    return None if text is None or data is None else Received(json.loads(text), data, num_bytes)


def _receive_bytes(connection: socket.socket, num_bytes: int) -> bytearray | None:
    data = bytearray(num_bytes)
    left = memoryview(data)
    while left:
        received = connection.recv_into(left[:_PART_BYTES])
        if not received:
            return None
        left = left[received:]
    return data


def _limit(seconds: int, memory_bytes: int) -> None:
    """Limits this process to so much more processor time, and to so much memory."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_CPU: int(usage.ru_utime + usage.ru_stime) + 1 + seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _answer(worker: ModuleType, request: Mapping[str, Any], data: bytearray) -> tuple[object, int, Iterable[Buffer]]:
    try:
        return worker.answer(request, data)
    except MemoryError:
        return {"limit": "memory"}, 0, ()


def main(file: str, descriptor: str) -> None:
    """Answers requests from the socket, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides when to end
    spec = importlib.util.spec_from_file_location("worker", file)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    connection = socket.socket(fileno=int(descriptor))
    while (received := receive(connection)) is not None:
        message = received.message
        if sys.platform != "win32":
            _limit(message["seconds"], message["memory_bytes"])
        answer = _answer(worker, message["request"], received.data)
        try:
            send(connection, *answer)
        except BrokenPipeError:  # who asked is gone
            return
        del received, message, answer  # nothing large is kept while this waits


if __name__ == "__main__":
    main(*sys.argv[1:])
