"""A small Ray cluster of this test run's own, and the processes in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_SECONDS = 120.0


@contextmanager
def ray_cluster(folder: str, num_cpus: int = 2) -> Iterator[None]:
    """Starts a cluster on free ports, and ends what it started; other clusters of this machine stay as they are.

    Args:
      folder: For its sockets, whose paths must be short.
      num_cpus: CPUs that it counts with.
    """
    # No key file in the home folder, and no report to Ray's makers.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=80 << 20,
        _temp_dir=folder,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def actor_processes(name: str) -> list[psutil.Process]:
    """The processes of this cluster's actors whose class has the name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue  # it has just ended
        if title.startswith("ray::") and name in title:
            found.append(process)
    return found


def wait_for_actors(name: str, number: int) -> list[psutil.Process]:
    """Those processes, once there are so many.

    Raises:
      AssertionError: There are not in time.
    """
    deadline = time.monotonic() + _SECONDS
    while len(found := actor_processes(name)) != number:
        assert time.monotonic() < deadline, f"{len(found)} processes of {name}, not {number}"
        time.sleep(0.05)
    return found
