"""A server in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import uvicorn

from jaxis.server.listener import listen
from tests.support.waiting import wait_until


@contextlib.contextmanager
def running(server: uvicorn.Server) -> Iterator[tuple[str, threading.Thread]]:
    """Runs a server while the block runs; yields its address and its thread."""
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", thread
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
