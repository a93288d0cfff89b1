"""A replica's share of the machine under Ray."""

from __future__ import annotations

import os
from typing import Any

import ray

from jaxis.errors import ConfigError
from jaxis.host.cores import VARIABLE

# Variables for the number of threads in a process: of XLA, and of numpy's libraries.
_THREAD_VARIABLES = (VARIABLE, "OMP_NUM_THREADS")


def use_reserved_cpus() -> None:
    """Limits this process, and those that it starts, to a thread for each CPU that Ray reserved for it.

    Otherwise every replica on a machine would have threads for all of its processors.
    """
    num_cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
    os.environ |= dict.fromkeys(_THREAD_VARIABLES, str(max(1, int(num_cpus))))


def resources_of_replica(num_replicas: int, num_devices: int) -> dict[str, Any]:
    """Returns the resources of a replica: an equal share of the cluster's processors, and accelerators if there are
    any.

    Args:
      num_replicas: Number of replicas that share the cluster.
      num_devices: Number of accelerators of each replica.

    Returns:
      Arguments of a Ray actor: `num_cpus`, and `num_gpus` or `resources`.

    Raises:
      ConfigError: The cluster has too few accelerators.
    """
    cluster = ray.cluster_resources()
    share = cluster.get("CPU", 0.0) / num_replicas
    resources: dict[str, Any] = {"num_cpus": int(share) if share >= 1 else share}
    for name in ("GPU", "TPU"):
        if (available := cluster.get(name, 0.0)) == 0:
            continue
        if available < num_replicas * num_devices:
            raise ConfigError(
                f"{num_replicas} replicas on {num_devices} {name}s each need {num_replicas * num_devices}, and the "
                f"cluster has {available:g}: ask for fewer replicas"
            )
        resources |= {"num_gpus": num_devices} if name == "GPU" else {"resources": {"TPU": num_devices}}
    return resources
