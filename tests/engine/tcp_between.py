"""Changes, or cuts, what a server says on its way."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def between(port: int, change: Callable[[bytes, int], bytes | None]) -> Iterator[int]:
    """A port on the way to another one, on which bytes of the producer go through `change(bytes, position)`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(source, target, change=None):
        position = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = data if change is None else change(data, position)
                position += len(data)
                if changed is None:
                    break
                target.sendall(changed)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def connect(near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            there = threading.Thread(target=forward, args=(near, far), daemon=True)
            there.start()
            forward(far, near, change)
            there.join()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                threading.Thread(target=connect, args=(near,), daemon=True).start()
                del near  # until the next one comes, it would stay open

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        # Closing alone wakes no thread that waits in `accept`, which has a file number reserved for what it waits for.
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listener.close()
