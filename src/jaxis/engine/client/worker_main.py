"""The process of an engine: `python -m jaxis.engine.client.worker_main SOCKET`, started by `worker_start`.

It imports the modules that all engines need, reads on stdin which engine to build, and serves it to the process that
started it. It ends when that process closes its end of the socket.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Any


def end_with(connection: socket.socket, is_served: threading.Event) -> None:
    """Ends this process if the server closes the connection before the engine serves it: no request can be waiting.

    Once the engine serves the connection, the serving thread notices its end, perhaps before this thread looks.
    """
    if not connection.recv(1, socket.MSG_PEEK) and not is_served.is_set():
        os._exit(1)


def _wait_for_memory(connection: socket.socket, num_bytes: int) -> None:
    """Waits until the server has freed memory for the engine; ends the process if the server ends."""
    from jaxis.engine.client import wire
    from jaxis.host.channel import to_frame

    connection.sendall(to_frame(wire.LoadPlanned(num_bytes)))
    if not sys.stdin.readline():
        os._exit(1)


def main() -> None:
    # The server's process decides when to end. A signal sent to both must not cut off the requests that it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    is_served = threading.Event()
    threading.Thread(target=end_with, args=(connection, is_served), name="jaxis-orphan", daemon=True).start()
    gc.disable()  # imports make no garbage, and collections would take a tenth of their time
    importlib.import_module("jaxis.engine.setup")
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.client import wire
    from jaxis.engine.client.worker import Worker
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.errors import JaxisError
    from jaxis.host.channel import to_frame
    from jaxis.host.progress import ProgressDisplay

    gc.freeze()  # the modules stay: no collection need look at them, as one would at once
    gc.enable()
    if not (line := sys.stdin.readline()):  # no engine was wanted
        os._exit(1)
    settings: dict[str, Any] = json.loads(line)
    if settings["log"] is not None:
        from jaxis.host.logs import set_up_logs

        set_up_logs(**settings["log"])
    build = importlib.import_module(settings["module"]).build
    progress = ProgressDisplay()
    shared, admit = None, None
    if settings.get("shared") is not None:
        shared, admit = MemoryBudget(**settings["shared"]), functools.partial(_wait_for_memory, connection)
    try:
        info, core = build(EngineArgs(**settings["engine"]), progress, shared=shared, admit=admit)
    except JaxisError as error:
        connection.sendall(to_frame(wire.EngineFailed.of(error)))
        return
    connection.sendall(to_frame(wire.EngineReady(info)))
    # The objects of start-up stay, so collections can skip them.
    gc.collect()
    gc.freeze()
    is_served.set()
    with progress.silent():
        Worker(core, connection, settings["stall_seconds"]).run()


if __name__ == "__main__":
    main()
