"""A follower with a fault: `python -m tests.engine.hosts.faulty_follower FAULT PORT`."""

import sys
import time

from jaxis.cli.main import main
from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.step_programs import ForwardKey

NUM_CALLS = 4  # that it makes before its fault
SLOW_SECONDS = 12


def stuck(self, *_):
    time.sleep(600)


def raises(self, *_):
    raise RuntimeError("a fault of the devices\nwith details")


def faulty_forward(fault):
    forward, calls = ForwardKey.run, []

    def call(self, *arguments):
        calls.append(arguments)
        (forward if len(calls) < NUM_CALLS else fault)(self, *arguments)

    return call


def slow_compile(self, key, compile=DeviceExecutor.compile):
    time.sleep(SLOW_SECONDS)
    return compile(self, key)


if __name__ == "__main__":
    _, fault, port = sys.argv
    if fault == "slow":
        DeviceExecutor.compile = slow_compile
    else:
        ForwardKey.run = faulty_forward({"stuck": stuck, "raises": raises}[fault])
    sys.argv = ["jaxis", "serve", "--nnodes", "2", "--node-rank", "1", "--master-port", port, "--headless"]
    main()
