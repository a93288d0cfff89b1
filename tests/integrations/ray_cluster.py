"""A small Ray cluster of this test run's own, and the processes in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

_SECONDS = 120.0


# No key file in the home folder, and no report to Ray's makers.
_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
_OBJECT_STORE_BYTES = 80 << 20


@contextmanager
def ray_cluster(folder: str, num_cpus: int = 2) -> Iterator[None]:
    """Starts a cluster on free ports, and ends what it started; other clusters of this machine stay as they are.

    Args:
      folder: For its sockets, whose paths must be short.
      num_cpus: CPUs that it counts with.
    """
    os.environ |= _ENVIRONMENT
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _temp_dir=folder,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def ray_nodes(folder: str, num_nodes: int, num_cpus: int = 1) -> Iterator[Cluster]:
    """The same with several nodes, which are processes of this machine.

    Args:
      folder: For its sockets, whose paths must be short.
      num_nodes: Number of nodes; the first is the cluster's head.
      num_cpus: CPUs that each of them counts with.
    """
    os.environ |= _ENVIRONMENT
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": num_cpus, "object_store_memory": _OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False, "temp_dir": folder})
    try:
        for _ in range(1, num_nodes):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


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
    """Waits for so many of those processes, and returns them.

    Raises:
      AssertionError: There are not in time.
    """
    deadline = time.monotonic() + _SECONDS
    while len(found := actor_processes(name)) != number:
        assert time.monotonic() < deadline, f"{len(found)} processes of {name}, not {number}"
        time.sleep(0.05)
    return found
