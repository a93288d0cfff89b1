"""The entry point of the `jaxis` script: steps before the commands are imported."""

from __future__ import annotations

import atexit
import gc
import os
import sys

from jaxis.engine.client.worker_start import start_ahead
from jaxis.host.garbage import nothing_collected

# Python's 700 would take a tenth of a short command's time.
_GC_THRESHOLD = 10_000


def script() -> None:
    """Runs the command of `sys.argv`, and ends the process at once.

    Taking the interpreter, JAX's modules and the weights apart takes a tenth of a short command's time, for nothing.
    """
    exit_code = 1  # of an exception that the interpreter shows

    def leave() -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            return  # the interpreter says what is wrong with them
        os._exit(exit_code)

    atexit.register(leave)  # before all others: it runs after them, when the threads have ended
    gc.set_threshold(_GC_THRESHOLD)
    if sys.argv[1:2] == ["serve"] and "--debug" not in sys.argv:  # which changes what JAX reads when it is imported
        start_ahead()
    try:
        with nothing_collected():
            from jaxis.cli.main import main
        main()
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
